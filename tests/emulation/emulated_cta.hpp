#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>
#include <vector>

#include "warp_emulator.hpp"

/// The state of the CTA that runs: what the parts of the emulator share. warp_emulator.cc has the fibers,
/// emulated_barriers.cc how they meet, emulated_copies.cc what copies asynchronously.
namespace folio::emulation {

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

/// A grid and its CTA that runs.
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
  std::vector<std::vector<uint32_t>> reads;  ///< of each thread, that may not be complete
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
// Hidden: a library and a program that both have the emulator each have a grid of their own.
#pragma GCC visibility push(hidden)

/// Null where none runs.
extern Grid* grid;

uint32_t next_random();
/// Ends the barrier's phase if nothing is missing.
void end_phase(Barrier& barrier);
/// Completes an asynchronous copy or arrival that a random draw picks, or none.
void complete_any();

#pragma GCC visibility pop

}  // namespace folio::emulation
