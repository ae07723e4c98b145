#include "warp_emulator.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

#include "waiting_grids.hpp"

// The variables of device_launch_parameters.h, which declares them const.
extern "C" {
uint3 folio_thread_index __asm__("threadIdx");
uint3 folio_block_index __asm__("blockIdx");
dim3 folio_block_size __asm__("blockDim");
dim3 folio_grid_size __asm__("gridDim");
}

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

/// A cp.async.
struct Copy {
  void* to;
  const void* from;
  int32_t bytes;
  int32_t zeros;
  int32_t group;
};
/// A box of a tensor, copied by TMA to shared memory, where it counts at a barrier, or from there.
struct Box {
  CUtensorMap map;
  int32_t at[5];
  uint32_t shared;
  uint32_t barrier;
  int32_t owner;
  bool store;
};
struct Arrival {
  uint32_t barrier;
  int32_t owner;
};

/// Lanes of a warp that exchange words.
struct Exchange {
  uint32_t slots[2][32][8];
  uint32_t arrived = 0;  ///< a bit a lane
  uint32_t generation = 0;
};
struct Warp {
  Exchange all;
  std::map<uint32_t, Exchange> some;  ///< by mask
  uint32_t live = 0xffffffffu;        ///< lanes that have not returned
};
struct Meeting {
  int32_t arrived = 0;
  uint32_t generation = 0;
  bool given = false;  ///< true, so far
  bool result = false;
};
struct MeetingOfAll {
  int32_t arrived = 0;
  int32_t given = 0;  ///< true, so far
  int32_t result = 0;
  uint32_t generation = 0;
};

struct Grid {
  std::vector<void*> stacks;  // saved stack pointers
  std::vector<bool> done;
  std::vector<unsigned char*> memory;
  std::vector<Warp> warps;
  std::unordered_map<int32_t, Meeting> meetings;
  MeetingOfAll meeting_of_all;
  std::vector<int32_t> groups;  ///< cp.async groups that a thread has committed
  std::unordered_map<uint32_t, Barrier> barriers;
  std::vector<std::vector<Copy>> copies;  ///< of each thread, that have not arrived
  std::vector<Box> boxes;
  std::vector<Arrival> arrivals;
  unsigned char* base = nullptr;
  void* main_stack = nullptr;
  int32_t current = 0;
  dim3 blocks;
  int32_t threads = 0;
  int32_t live = 0;  ///< threads that have not returned
  uint64_t random = 1;
  int64_t idle = 0;
  const std::function<void()>* body = nullptr;
  size_t shared_bytes = 0;
  bool waits_for_grids = false;  ///< some thread does, since the last turn of other grids
};
Grid* grid = nullptr;
std::mutex one_grid;

/// The most shared memory that a CTA can have, and what aligns it. Beside the static variables of kernels, so that 32
/// bits tell where these are, too.
alignas(1024) unsigned char dynamic_shared_memory[228 * 1024 + 1024];

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
  std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, static_cast<size_t>(copy.zeros));
}
void complete(const Box& copy) {
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
            if (map.side_by_side > 0) to ^= map.side_by_side == 128 ? (to >> 7 & 7) << 4 : (to >> 7 & 3) << 4;
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
template <typename AnyCopy>
void begin(const AnyCopy& copy, std::vector<AnyCopy>& late) {
  if (next_random() % 2 == 0) {
    complete(copy);
  } else {
    late.push_back(copy);
  }
}
template <typename AnyCopy>
void complete_late(std::vector<AnyCopy>& late, size_t n) {
  const AnyCopy copy = late[n];
  late[n] = late.back();
  late.pop_back();
  complete(copy);
}

/// Completes the running thread's cp.async of groups below `groups`.
void complete_groups(int32_t groups) {
  auto& copies = grid->copies[static_cast<size_t>(grid->current)];
  for (size_t n = copies.size(); n-- > 0;) {
    if (copies[n].group < groups) complete_late(copies, n);
  }
}

/// Completes what a random draw says, or nothing.
void complete_any() {
  auto& copies = grid->copies[next_random() % grid->copies.size()];
  if (!copies.empty()) complete_late(copies, next_random() % copies.size());
  if (!grid->boxes.empty()) {
    complete_late(grid->boxes, next_random() % grid->boxes.size());
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
  --grid->live;
  grid->warps[static_cast<size_t>(grid->current / 32)].live &= ~(1u << grid->current % 32);
  grid->idle = 0;
  void* unused;
  folio_emulation_switch(&unused, grid->main_stack);
  std::abort();
}

/// Other grids' turn. They overwrite what grids have in common, which is kept here in the meantime.
void let_grids_run() {
  constexpr std::chrono::microseconds kTurn(20);
  Grid* const mine = grid;
  const uint3 block = folio_block_index;
  const dim3 block_size = folio_block_size;
  const std::vector<unsigned char> shared(mine->base, mine->base + mine->shared_bytes);
  one_grid.unlock();
  std::this_thread::sleep_for(kTurn);
  one_grid.lock();
  std::copy(shared.begin(), shared.end(), mine->base);
  folio_block_index = block;
  folio_block_size = block_size;
  folio_grid_size = mine->blocks;
  grid = mine;
  grid->waits_for_grids = false;
  grid->idle = 0;
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
    // Another order every time: a missing barrier shows.
    const auto first = static_cast<int32_t>(next_random() % static_cast<uint32_t>(grid->threads));
    const bool backward = next_random() % 2 == 0;
    for (int32_t n = 0; n < grid->threads; ++n) {
      const int32_t i = (first + (backward ? grid->threads - n : n)) % grid->threads;
      if (grid->done[static_cast<size_t>(i)]) continue;
      ++left;
      grid->current = i;
      folio_thread_index.x = static_cast<uint32_t>(i);
      folio_emulation_switch(&grid->main_stack, grid->stacks[static_cast<size_t>(i)]);
    }
    const auto due = next_random() % 4;
    for (uint32_t n = 0; n < due; ++n) complete_any();
    if (grid->waits_for_grids) let_grids_run();
    if (++grid->idle > 200000) throw std::runtime_error("the emulated CTA stands still");
  }
}

}  // namespace

uint3 thread_index() {
  return folio_thread_index;
}
unsigned char* shared_memory() {
  return grid->base;
}

void yield() {
  folio_emulation_switch(&grid->stacks[static_cast<size_t>(grid->current)], grid->main_stack);
}

void let_other_grids_run() {
  grid->waits_for_grids = true;
  yield();
}

namespace {

constexpr size_t kMostThreads = 1024;

/// Memory for the stacks of a grid's fibers; pages that no fiber touches take none. Grids that wait for others keep
/// theirs, so that there are several; one_grid guards which are free.
class Stacks {
 public:
  Stacks() : memory_(take()) {}
  ~Stacks() { free().push_back(memory_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  unsigned char* of(int32_t thread) const { return memory_ + static_cast<size_t>(thread) * kStackBytes; }

 private:
  static std::vector<unsigned char*>& free() {
    static std::vector<unsigned char*> all;
    return all;
  }
  static unsigned char* take() {
    if (!free().empty()) {
      unsigned char* const last = free().back();
      free().pop_back();
      return last;
    }
    void* const memory = mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<unsigned char*>(memory);
  }

  unsigned char* memory_;
};

void run_blocks(Grid& state, size_t shared_bytes) {
  uint3& block = folio_block_index;
  for (block.z = 0; block.z < state.blocks.z; ++block.z) {
    for (block.y = 0; block.y < state.blocks.y; ++block.y) {
      for (block.x = 0; block.x < state.blocks.x; ++block.x) {
        state.warps.assign(static_cast<size_t>((state.threads + 31) / 32), Warp{});
        if (state.threads % 32 != 0) state.warps.back().live = (1u << state.threads % 32) - 1;
        state.meetings.clear();
        state.meeting_of_all = {};
        state.copies.resize(static_cast<size_t>(state.threads));
        state.groups.assign(static_cast<size_t>(state.threads), 0);
        state.barriers.clear();
        state.live = state.threads;
        std::memset(state.base, 0xff, shared_bytes);  // NaN in every type
        run_block();
        bool late = !state.boxes.empty() || !state.arrivals.empty();
        for (const auto& copies : state.copies) late = late || !copies.empty();
        if (late) throw std::runtime_error("copies outlive the CTA");
      }
    }
  }
}

}  // namespace

void run_grid(const dim3& blocks, int32_t threads, size_t shared_bytes, uint64_t seed,
              const std::function<void()>& body) {
  if (shared_bytes + 1024 > sizeof(dynamic_shared_memory)) throw std::runtime_error("too much shared memory");
  if (threads > static_cast<int32_t>(kMostThreads)) throw std::runtime_error("a CTA has at most 1024 threads");
  const std::lock_guard lock(one_grid);
  const Stacks stacks;
  Grid state;
  state.shared_bytes = shared_bytes;
  state.blocks = blocks;
  state.threads = threads;
  state.body = &body;
  state.random = seed * 2654435761u + 88172645463325252ull;
  state.stacks.resize(static_cast<size_t>(threads));
  state.done.resize(static_cast<size_t>(threads));
  state.base = dynamic_shared_memory;
  for (int32_t i = 0; i < threads; ++i) state.memory.push_back(stacks.of(i));
  folio_block_size = dim3(static_cast<uint32_t>(threads));
  folio_grid_size = blocks;
  grid = &state;
  try {
    run_blocks(state, shared_bytes);
  } catch (...) {
    grid = nullptr;
    throw;
  }
  grid = nullptr;
}

const uint32_t (*exchange(const uint32_t (&mine)[8], uint32_t mask))[8] {
  Warp& warp = grid->warps[static_cast<size_t>(grid->current / 32)];
  Exchange& of_mask = mask == 0xffffffffu ? warp.all : warp.some[mask];
  const uint32_t generation = of_mask.generation;
  auto& slots = of_mask.slots[generation & 1];
  std::memcpy(slots[grid->current % 32], mine, sizeof(mine));
  of_mask.arrived |= 1u << grid->current % 32;
  while (of_mask.generation == generation) {
    if ((of_mask.arrived & warp.live) == (mask & warp.live)) {
      of_mask.arrived = 0;
      ++of_mask.generation;
      grid->idle = 0;
    } else {
      yield();
    }
  }
  return slots;
}

int32_t meet_all(bool mine) {
  MeetingOfAll& meeting = grid->meeting_of_all;
  const uint32_t generation = meeting.generation;
  ++meeting.arrived;
  meeting.given += mine ? 1 : 0;
  while (meeting.generation == generation) {
    if (meeting.arrived >= grid->live) {
      meeting.result = meeting.given;
      meeting.arrived = meeting.given = 0;
      ++meeting.generation;
      grid->idle = 0;
    } else {
      yield();
    }
  }
  return meeting.result;
}

void named_barrier_arrive(int32_t id, int32_t threads) {
  Meeting& meeting = grid->meetings[id];
  if (++meeting.arrived != threads) return;
  meeting.arrived = 0;
  meeting.result = meeting.given;
  meeting.given = false;
  ++meeting.generation;
  grid->idle = 0;
}
bool named_barrier_any(int32_t id, int32_t threads, bool mine) {
  Meeting& meeting = grid->meetings[id];
  meeting.given = meeting.given || mine;
  named_barrier_sync(id, threads);
  return meeting.result;
}
void named_barrier_sync(int32_t id, int32_t threads) {
  const uint32_t generation = grid->meetings[id].generation;
  named_barrier_arrive(id, threads);
  while (grid->meetings[id].generation == generation) yield();
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
  const auto thread = static_cast<size_t>(grid->current);
  begin(Copy{to, from, bytes, zeros, grid->groups[thread]}, grid->copies[thread]);
}
void commit_copies() {
  ++grid->groups[static_cast<size_t>(grid->current)];
}
void finish_groups(int32_t pending) {
  complete_groups(grid->groups[static_cast<size_t>(grid->current)] - pending);
}
void cp_async_mbarrier_arrive(uint32_t barrier) {
  complete_groups(std::numeric_limits<int32_t>::max());  // late enough: others have run since
  if (next_random() % 2 == 0) {
    mbarrier_arrive(barrier, 1);
  } else {
    grid->arrivals.push_back({barrier, grid->current});
  }
}

void finish_copies() {
  complete_groups(std::numeric_limits<int32_t>::max());
  for (size_t n = grid->boxes.size(); n-- > 0;) {
    if (grid->boxes[n].owner == grid->current && grid->boxes[n].store) complete_late(grid->boxes, n);
  }
}

CUresult encode_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* dims,
                    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                    CUtensorMapFloatOOBfill fill) {
  static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
  const uint16_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  const bool exchanges = swizzle != CU_TENSOR_MAP_SWIZZLE_NONE;
  const uint16_t side_by_side = !exchanges ? 0 : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 64;
  if ((type != CU_TENSOR_MAP_DATA_TYPE_UINT16 && type != CU_TENSOR_MAP_DATA_TYPE_UINT8) || rank != 5 ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      (exchanges && swizzle != CU_TENSOR_MAP_SWIZZLE_128B && swizzle != CU_TENSOR_MAP_SWIZZLE_64B) ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || (exchanges && box[0] * bytes > side_by_side) ||
      box[0] * bytes % 16 != 0 || reinterpret_cast<uintptr_t>(data) % 16 != 0) {
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

namespace {

void check_box(uint32_t shared, const CUtensorMap& map) {
  TensorMap read{};
  std::memcpy(&read, &map, sizeof(read));
  if (shared % 128 != 0) throw std::runtime_error("a box begins at no multiple of 128");
  if (read.side_by_side > 0 && shared % 512 != 0) {
    throw std::runtime_error("a box with exchanged pieces begins at no multiple of 512");
  }
}

}  // namespace

void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, const int32_t (&at)[5]) {
  check_box(shared, *map);
  begin({*map, {at[0], at[1], at[2], at[3], at[4]}, shared, barrier, grid->current, false}, grid->boxes);
}

void store_box(const CUtensorMap* map, uint32_t shared, const int32_t (&at)[5]) {
  check_box(shared, *map);
  begin({*map, {at[0], at[1], at[2], at[3], at[4]}, shared, 0, grid->current, true}, grid->boxes);
}

}  // namespace folio::emulation
