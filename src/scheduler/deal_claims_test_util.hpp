#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "scheduler/plan_view.hpp"

namespace folio::inline v0::scheduler::testing {

/// A claimed plan as lists of those who happened to claim: for kernels that run lists, to run what another would claim.
struct DealtClaims {
  std::vector<WorkTile> work_tiles;
  std::vector<int32_t> worker_indptr;
};

/// Every claim, in order, goes to some worker; the seed says to whom. Points `plan` to the lists, which have to outlive
/// it.
inline void deal_claims(PlanView& plan, uint32_t seed, DealtClaims& dealt) {
  std::mt19937 random(seed);
  std::vector<std::vector<WorkTile>> lists(static_cast<size_t>(plan.num_workers));
  for (int32_t claim = 0; claim < plan.num_dynamic_tiles; ++claim) {
    std::vector<WorkTile>& list = lists[random() % lists.size()];
    for (int32_t i = claim;; i = plan.work_tiles[i].partial) {
      list.push_back(plan.work_tiles[i]);
      if ((plan.work_tiles[i].flags & kFinish) != 0) break;
      list.back().partial = -1;
    }
  }
  dealt = DealtClaims{};
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
