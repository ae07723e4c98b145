#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"
#include "scheduler/plan_image.hpp"

/// What the ranks of a group must have in common: each sends it in front of its queries, and compares what the others
/// sent. The same digests on the host and on a GPU.
namespace folio::inline v0::kernels::cuda {

struct GatherHeader {
  uint64_t digest = 0;    ///< of batch and configuration
  uint64_t q_scales = 0;  ///< QScales::digest
  float q_scale = 1.0f;   ///< the first value, for a message
  float sm_scale = 0.0f;  ///< with the default resolved
  float logits_soft_cap = 0.0f;
};

FOLIO_HOST_DEVICE constexpr bool same(const GatherHeader& a, const GatherHeader& b) {
  return a.digest == b.digest && a.q_scales == b.q_scales && a.sm_scale == b.sm_scale &&
         a.logits_soft_cap == b.logits_soft_cap;
}

/// A layer's q scales where they lie: rows are requests, or one for all; columns are KV heads, or one for all.
struct QScales {
  const float* data = nullptr;
  int32_t rows = 1;
  int32_t columns = 1;
  int64_t row_stride = 0;
  ScaleGranularity granularity = ScaleGranularity::kPerTensor;
  const int32_t* cu_q = nullptr;  ///< where rows are requests: those without queries have no scale

  FOLIO_HOST_DEVICE constexpr int64_t count() const { return int64_t{rows} * columns; }
  /// The digest of no values. One value is the same whatever its granularity, and the same as a scalar.
  FOLIO_HOST_DEVICE constexpr uint64_t begin() const {
    return count() > 1 ? scheduler::checksum_term(static_cast<uint64_t>(granularity), 0) : 0;
  }
  /// What value i adds, in any order.
  FOLIO_HOST_DEVICE uint64_t term(int64_t i) const {
    const int64_t row = i / columns;
    if (cu_q != nullptr && cu_q[row] == cu_q[row + 1]) return 0;
    return term_of(data[row * row_stride + i % columns], i);
  }
  FOLIO_HOST_DEVICE static constexpr uint64_t term_of(float value, int64_t i) {
    return scheduler::checksum_term(std::bit_cast<uint32_t>(value), static_cast<uint64_t>(i) + 1);
  }
};

/// A difference that a GPU has found, in page-locked memory that it writes at the host's address, once: its owner sets
/// `rank` back to -1.
struct HeaderFault {
  int32_t rank = -1;    ///< the lowest that differs
  GatherHeader theirs;  ///< of that rank
  GatherHeader mine;
};

/// A header as a kernel writes it.
struct SentHeader {
  GatherHeader* to = nullptr;  ///< null: none is sent
  GatherHeader header;         ///< but for the q scales, where `q_scales` has data
  QScales q_scales;            ///< in device memory; no data: the header has their digest
};

/// The headers of all ranks as a kernel compares them.
struct GatheredHeaders {
  const std::byte* first = nullptr;  ///< rank 0's; null: nothing is compared
  int64_t stride = 0;                ///< bytes from one to the next
  int32_t world = 1;
  int32_t rank = 0;              ///< whose header the others are compared with
  HeaderFault* fault = nullptr;  ///< one that the host has not read yet stays
};

}  // namespace folio::inline v0::kernels::cuda
