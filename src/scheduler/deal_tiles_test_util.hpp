#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "scheduler/plan_view.hpp"

namespace folio::inline v0::scheduler::testing {

/// A dynamic schedule as static lists: what each worker happened to claim. Kernels that run lists can then run it.
struct DealtTiles {
  std::vector<WorkTile> work_tiles;
  std::vector<int32_t> worker_indptr;
};

/// Deals every dynamic tile, in order, to a worker that the seed chooses. Points `plan` to the lists, which must
/// outlive it.
inline void deal_dynamic_tiles(PlanView& plan, uint32_t seed, DealtTiles& dealt) {
  std::mt19937 random(seed);
  std::vector<std::vector<WorkTile>> lists(static_cast<size_t>(plan.num_workers));
  for (int32_t dynamic_tile = 0; dynamic_tile < plan.num_dynamic_tiles; ++dynamic_tile) {
    std::vector<WorkTile>& list = lists[random() % lists.size()];
    for (int32_t i = dynamic_tile;; i = plan.work_tiles[i].partial) {
      list.push_back(plan.work_tiles[i]);
      if ((plan.work_tiles[i].flags & kFinish) != 0) break;
      list.back().partial = -1;
    }
  }
  dealt = DealtTiles{};
  for (const std::vector<WorkTile>& list : lists) {
    dealt.worker_indptr.push_back(static_cast<int32_t>(dealt.work_tiles.size()));
    dealt.work_tiles.insert(dealt.work_tiles.end(), list.begin(), list.end());
  }
  dealt.worker_indptr.push_back(static_cast<int32_t>(dealt.work_tiles.size()));
  plan.work_tiles = dealt.work_tiles.data();
  plan.worker_indptr = dealt.worker_indptr.data();
  plan.num_dynamic_tiles = 0;
}

}  // namespace folio::inline v0::scheduler::testing
