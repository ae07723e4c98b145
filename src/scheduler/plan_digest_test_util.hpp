#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/scheduler.hpp"

/// What tests compare of plans.
namespace folio::inline v0::scheduler::testing {

/// Cost of every worker's work tiles. An empty work tile counts as one tile.
std::vector<int64_t> worker_loads(const SchedulerConfig& config, const PlanView& plan);

/// The indices of a plan's work tiles in an order in which they may run: worker after worker, or dynamic tile after
/// dynamic tile, each with its continuations. Empty where a continuation leads nowhere.
std::vector<int32_t> running_order(const PlanView& plan);

/// How each row's result is folded, by (KV head, packed row): "((a+b)+c)" over its work tiles' keys. Two plans with
/// equal texts give a kernel's results the same bits at the fixed-split levels.
std::map<std::pair<int32_t, int32_t>, std::string> fold_orders(const PlanView& plan);

/// Every field of a plan that is not an address.
std::vector<int64_t> serialise(const PlanView& plan);

}  // namespace folio::inline v0::scheduler::testing
