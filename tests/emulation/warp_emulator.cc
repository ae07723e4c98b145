#include "warp_emulator.hpp"

#include <cstdlib>
#include <deque>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace folio::emulation {
namespace {

constexpr size_t kStackBytes = 256 * 1024;

extern "C" void folio_emulation_switch(void** save, void* to);
asm(R"(
.text
.globl folio_emulation_switch
.hidden folio_emulation_switch
.type folio_emulation_switch, @function
folio_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size folio_emulation_switch, .-folio_emulation_switch
)");

struct Barrier {
  uint32_t count = 0;
  uint32_t pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
};

struct Copy {
  void* to;
  const void* from;
  int32_t bytes;
  int32_t zeros;
  uint32_t barrier;  ///< whose bytes it counts at, if box
  bool box;
  int32_t owner;
  CUtensorMap map;
  int32_t at[5];
  uint32_t shared;
  bool store = false;  ///< a box from shared memory: counts at no barrier
};
struct Arrival {
  uint32_t barrier;
  int32_t owner;
};

struct Warp {
  uint32_t slots[2][32][8];
  int32_t arrived = 0;
  uint32_t generation = 0;
};
struct Meeting {
  int32_t arrived = 0;
  uint32_t generation = 0;
};

struct Grid {
  std::vector<void*> stacks;  // saved stack pointers
  std::vector<bool> done;
  std::vector<unsigned char*> memory;
  std::vector<Warp> warps;
  std::unordered_map<int32_t, Meeting> meetings;
  std::unordered_map<uint32_t, Barrier> barriers;
  std::deque<Copy> copies;
  std::vector<Arrival> arrivals;
  std::vector<unsigned char> shared;
  unsigned char* base = nullptr;
  void* main_stack = nullptr;
  int32_t current = 0;
  int32_t block = 0;
  int32_t blocks = 0;
  int32_t threads = 0;
  uint64_t random = 1;
  int64_t idle = 0;
  const std::function<void()>* body = nullptr;
};
thread_local Grid* grid = nullptr;

uint32_t next_random() {
  grid->random ^= grid->random << 13;
  grid->random ^= grid->random >> 7;
  grid->random ^= grid->random << 17;
  return static_cast<uint32_t>(grid->random >> 20);
}

void end_phase(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  ++barrier.phase;
  grid->idle = 0;
}

void complete(const Copy& copy) {
  if (!copy.box) {
    std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, static_cast<size_t>(copy.zeros));
    return;
  }
  TensorMap map;
  std::memcpy(&map, &copy.map, sizeof(map));
  uint32_t linear = 0;
  uint32_t i[5];
  for (i[4] = 0; i[4] < map.box[4]; ++i[4]) {
    for (i[3] = 0; i[3] < map.box[3]; ++i[3]) {
      for (i[2] = 0; i[2] < map.box[2]; ++i[2]) {
        for (i[1] = 0; i[1] < map.box[1]; ++i[1]) {
          for (i[0] = 0; i[0] < map.box[0]; ++i[0], linear += map.bytes) {
            bool inside = true;
            unsigned char* element = map.data;
            for (int d = 0; d < 5; ++d) {
              const int64_t c = int64_t{copy.at[d]} + i[d];
              inside = inside && c >= 0 && c < static_cast<int64_t>(map.dims[d]);
              element += c * static_cast<int64_t>(map.strides[d]);
            }
            uint32_t to = copy.shared + linear;
            to ^= map.side_by_side == 128 ? (to >> 7 & 7) << 4 : (to >> 7 & 3) << 4;
            if (copy.store) {
              if (inside) std::memcpy(element, grid->base + to, map.bytes);
            } else if (inside) {
              std::memcpy(grid->base + to, element, map.bytes);
            } else {
              std::memset(grid->base + to, 0, map.bytes);
            }
          }
        }
      }
    }
  }
  if (copy.store) return;
  Barrier& barrier = grid->barriers.at(copy.barrier);
  barrier.bytes -= linear;
  end_phase(barrier);
}

/// At once or later.
void begin(const Copy& copy) {
  if (next_random() % 2 == 0) {
    complete(copy);
  } else {
    grid->copies.push_back(copy);
  }
}

/// Completes copies of one thread (-1: any one), in any order.
void complete_some(int32_t owner) {
  if (owner >= 0) {
    for (size_t n = 0; n < grid->copies.size();) {
      if (grid->copies[n].owner != owner || (grid->copies[n].box && !grid->copies[n].store)) {
        ++n;
        continue;
      }
      const Copy copy = grid->copies[n];
      grid->copies.erase(grid->copies.begin() + static_cast<std::ptrdiff_t>(n));
      complete(copy);
    }
    return;
  }
  if (!grid->copies.empty()) {
    const size_t n = next_random() % grid->copies.size();
    const Copy copy = grid->copies[n];
    grid->copies.erase(grid->copies.begin() + static_cast<std::ptrdiff_t>(n));
    complete(copy);
    grid->idle = 0;
  } else if (!grid->arrivals.empty()) {
    const size_t n = next_random() % grid->arrivals.size();
    const Arrival arrival = grid->arrivals[n];
    grid->arrivals.erase(grid->arrivals.begin() + static_cast<std::ptrdiff_t>(n));
    mbarrier_arrive(arrival.barrier, 1);
  }
}

[[noreturn]] void fiber_main() {
  (*grid->body)();
  grid->done[static_cast<size_t>(grid->current)] = true;
  void* unused;
  folio_emulation_switch(&unused, grid->main_stack);
  std::abort();
}

void run_block() {
  for (int32_t i = 0; i < grid->threads; ++i) {
    auto* top = reinterpret_cast<void**>(grid->memory[static_cast<size_t>(i)] + kStackBytes);
    *--top = nullptr;  // fiber_main is entered as by a call: the stack is 8 off a multiple of 16
    *--top = reinterpret_cast<void*>(&fiber_main);
    for (int n = 0; n < 6; ++n) *--top = nullptr;
    grid->stacks[static_cast<size_t>(i)] = top;
    grid->done[static_cast<size_t>(i)] = false;
  }
  int32_t left = grid->threads;
  while (left > 0) {
    left = 0;
    for (int32_t i = 0; i < grid->threads; ++i) {
      if (grid->done[static_cast<size_t>(i)]) continue;
      ++left;
      grid->current = i;
      folio_emulation_switch(&grid->main_stack, grid->stacks[static_cast<size_t>(i)]);
    }
    const auto due = next_random() % 4;
    for (uint32_t n = 0; n < due; ++n) complete_some(-1);
    if (++grid->idle > 200000) throw std::runtime_error("the emulated CTA stands still");
  }
}

}  // namespace

Index thread_index() {
  return {grid->current};
}
Index block_index() {
  return {grid->block};
}
Count grid_size() {
  return {static_cast<uint32_t>(grid->blocks)};
}
unsigned char* shared_memory() {
  return grid->base;
}

void yield() {
  folio_emulation_switch(&grid->stacks[static_cast<size_t>(grid->current)], grid->main_stack);
}

void run_grid(int32_t blocks, int32_t threads, size_t shared_bytes, uint64_t seed, const std::function<void()>& body) {
  Grid state;
  state.blocks = blocks;
  state.threads = threads;
  state.body = &body;
  state.random = seed * 2654435761u + 88172645463325252ull;
  state.stacks.resize(static_cast<size_t>(threads));
  state.done.resize(static_cast<size_t>(threads));
  static thread_local std::vector<unsigned char> stacks;
  stacks.resize(static_cast<size_t>(threads) * kStackBytes + 64);
  auto* first = stacks.data() + (64 - reinterpret_cast<uintptr_t>(stacks.data()) % 64) % 64;
  for (int32_t i = 0; i < threads; ++i) state.memory.push_back(first + static_cast<size_t>(i) * kStackBytes);
  Grid* const outer = grid;
  grid = &state;
  try {
    for (state.block = 0; state.block < blocks; ++state.block) {
      state.warps.assign(static_cast<size_t>(threads / 32), Warp{});
      state.meetings.clear();
      state.barriers.clear();
      state.shared.assign(shared_bytes + 1024, 0xff);  // NaN in every type
      state.base = state.shared.data() + (1024 - reinterpret_cast<uintptr_t>(state.shared.data()) % 1024) % 1024;
      run_block();
      if (!state.copies.empty() || !state.arrivals.empty()) throw std::runtime_error("copies outlive the CTA");
    }
  } catch (...) {
    grid = outer;
    throw;
  }
  grid = outer;
}

const uint32_t (*exchange(const uint32_t (&mine)[8]))[8] {
  Warp& warp = grid->warps[static_cast<size_t>(grid->current / 32)];
  const uint32_t generation = warp.generation;
  auto& slots = warp.slots[generation & 1];
  std::memcpy(slots[grid->current % 32], mine, sizeof(mine));
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
    grid->idle = 0;
  } else {
    while (warp.generation == generation) yield();
  }
  return slots;
}

void named_barrier_arrive(int32_t id, int32_t threads) {
  Meeting& meeting = grid->meetings[id];
  if (++meeting.arrived != threads) return;
  meeting.arrived = 0;
  ++meeting.generation;
  grid->idle = 0;
}
void named_barrier_sync(int32_t id, int32_t threads) {
  const uint32_t generation = grid->meetings[id].generation;
  named_barrier_arrive(id, threads);
  while (grid->meetings[id].generation == generation) yield();
}
void meet_all() {
  named_barrier_sync(0, grid->threads);
}

void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  if (barrier % 8 != 0) throw std::runtime_error("a barrier is not aligned");
  grid->barriers[barrier] = {arrivals, arrivals, 0, 0};
}
void mbarrier_arrive(uint32_t barrier, uint32_t count) {
  Barrier& state = grid->barriers.at(barrier);
  if (state.pending < count) throw std::runtime_error("more arrivals than a barrier has");
  state.pending -= count;
  end_phase(state);
}
void expect(uint32_t barrier, uint32_t bytes) {
  grid->barriers.at(barrier).bytes += bytes;
}
bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  return (grid->barriers.at(barrier).phase & 1) != parity;
}

void copy_later(void* to, const void* from, int32_t bytes, int32_t zeros) {
  begin({to, from, bytes, zeros, 0, false, grid->current, {}, {}, 0});
}
void cp_async_mbarrier_arrive(uint32_t barrier) {
  complete_some(grid->current);  // late enough: others have run since
  if (next_random() % 2 == 0) {
    mbarrier_arrive(barrier, 1);
  } else {
    grid->arrivals.push_back({barrier, grid->current});
  }
}

void finish_copies() {
  complete_some(grid->current);
}

CUresult encode_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* dims,
                    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                    CUtensorMapFloatOOBfill fill) {
  static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
  const uint16_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  const uint16_t side_by_side = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 64;
  if ((type != CU_TENSOR_MAP_DATA_TYPE_UINT16 && type != CU_TENSOR_MAP_DATA_TYPE_UINT8) || rank != 5 ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      (swizzle != CU_TENSOR_MAP_SWIZZLE_128B && swizzle != CU_TENSOR_MAP_SWIZZLE_64B) ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || box[0] * bytes > side_by_side ||
      reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap made{};
  made.bytes = bytes;
  made.side_by_side = side_by_side;
  made.data = static_cast<unsigned char*>(data);
  for (int d = 0; d < 5; ++d) {
    made.dims[d] = dims[d];
    made.strides[d] = d == 0 ? bytes : strides[d - 1];
    made.box[d] = box[d];
    const bool stride_fits = d == 0 || (made.strides[d] % 16 == 0 && made.strides[d] < uint64_t{1} << 40);
    if (dims[d] == 0 || dims[d] > uint64_t{1} << 32 || box[d] == 0 || box[d] > 256 || steps[d] != 1 || !stride_fits) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, const int32_t (&at)[5]) {
  if (shared % 512 != 0) throw std::runtime_error("a box with exchanged pieces begins at no multiple of 512");
  begin({nullptr, nullptr, 0, 0, barrier, true, grid->current, *map, {at[0], at[1], at[2], at[3], at[4]}, shared});
}

void store_box(const CUtensorMap* map, uint32_t shared, const int32_t (&at)[5]) {
  if (shared % 512 != 0) throw std::runtime_error("a box with exchanged pieces begins at no multiple of 512");
  Copy copy{nullptr, nullptr, 0, 0, 0, true, grid->current, *map, {at[0], at[1], at[2], at[3], at[4]}, shared};
  copy.store = true;
  begin(copy);
}

}  // namespace folio::emulation
