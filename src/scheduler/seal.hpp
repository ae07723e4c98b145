#pragma once

#include <cstdint>

#include "scheduler/partition_rule.hpp"
#include "scheduler/plan_image.hpp"

/// How a GPU finds out whether a schedule in the engine's hands still is what was planned.
namespace folio::inline v0::scheduler {

/// What word `index` adds to a schedule's checksum, a sum that threads can make in any order. For every index it is a
/// bijection of the word, so that no change of a single word goes unseen.
FOLIO_HOST_DEVICE constexpr uint64_t checksum_term(uint64_t word, uint64_t index) {
  uint64_t mixed = (word ^ (index * 0x9e3779b97f4a7c15)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 31)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 29);
}

/// What is known of a schedule apart from it.
struct ChecksumRecord {
  static constexpr int32_t kMaxImages = 2;

  uint64_t num_words = 0;
  uint64_t checksum = 0;
  int32_t num_images = 0;
  PlanImageHeader* images[kMaxImages] = {};  ///< where the schedule's images begin
  PlanImageHeader emptied[kMaxImages] = {};  ///< the same plans without work, for schedules that were changed
};

}  // namespace folio::inline v0::scheduler
