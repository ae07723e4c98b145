// How threads of a CTA meet: lanes that exchange words, named barriers, mbarriers.
#include <stdexcept>

#include "emulated_cta.hpp"

namespace folio::emulation {

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
  complete_reads();
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

void end_phase(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  ++barrier.phase;
  grid->idle = 0;
}

}  // namespace folio::emulation
