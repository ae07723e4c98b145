#include "warp_emulator.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "emulated_cta.hpp"
#include "waiting_grids.hpp"

// The variables of device_launch_parameters.h, which declares them const.
extern "C" {
uint3 folio_thread_index __asm__("threadIdx");
uint3 folio_block_index __asm__("blockIdx");
dim3 folio_block_size __asm__("blockDim");
dim3 folio_grid_size __asm__("gridDim");
}

namespace folio::emulation {

Grid* grid = nullptr;

uint32_t next_random() {
  grid->random ^= grid->random << 13;
  grid->random ^= grid->random >> 7;
  grid->random ^= grid->random << 17;
  return static_cast<uint32_t>(grid->random >> 20);
}

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

std::mutex one_grid;

/// The most shared memory that a CTA can have, and what aligns it. Beside the static variables of kernels, so that 32
/// bits tell where these are, too.
alignas(1024) unsigned char dynamic_shared_memory[228 * 1024 + 1024];

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
        state.reads.assign(static_cast<size_t>(state.threads), {});
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

}  // namespace folio::emulation
