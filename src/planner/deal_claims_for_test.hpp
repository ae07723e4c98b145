#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "planner/plan_view.hpp"

namespace folio::inline v0::planner::testing {

/// A claimed plan as lists of those who happened to claim: for kernels that run lists, to run what another would claim.
struct DealtClaims {
  std::vector<WorkItem> items;
  std::vector<int32_t> worker_indptr;
};

/// Every claim, in order, goes to some worker; the seed says to whom. Points `plan` to the lists, which have to outlive
/// it.
inline void deal_claims(PlanView& plan, uint32_t seed, DealtClaims& dealt) {
  std::mt19937 random(seed);
  std::vector<std::vector<WorkItem>> lists(static_cast<size_t>(plan.num_workers));
  for (int32_t claim = 0; claim < plan.num_claims; ++claim) {
    std::vector<WorkItem>& list = lists[random() % lists.size()];
    for (int32_t i = claim;; i = plan.items[i].partial) {
      list.push_back(plan.items[i]);
      if ((plan.items[i].flags & kFinish) != 0) break;
      list.back().partial = -1;
    }
  }
  dealt = DealtClaims{};
  for (const std::vector<WorkItem>& list : lists) {
    dealt.worker_indptr.push_back(static_cast<int32_t>(dealt.items.size()));
    dealt.items.insert(dealt.items.end(), list.begin(), list.end());
  }
  dealt.worker_indptr.push_back(static_cast<int32_t>(dealt.items.size()));
  plan.items = dealt.items.data();
  plan.worker_indptr = dealt.worker_indptr.data();
  plan.num_claims = 0;
}

}  // namespace folio::inline v0::planner::testing
