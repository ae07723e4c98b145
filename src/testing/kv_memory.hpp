#pragma once

#include <cstddef>
#include <vector>

#include "folio/types/kv_cache.hpp"
#include "testing/guarded_buffer.hpp"
#include "testing/problem.hpp"

namespace folio::inline v0::verify {

/// The keys and values of a problem in memory: one paged pool for all its paged segments, one pair of ragged tensors
/// for every ragged one. Whatever belongs to no row is NaN. Read-only once built.
class KvMemory {
 public:
  KvMemory(const ConformanceCase& conformance_case, const Problem& problem);

  const KvCacheView& cache() const { return cache_; }
  /// The ragged tensors of segment `segment`; without an indptr.
  const RaggedKvView& ragged(size_t segment) const { return ragged_[segment]; }
  /// First token of a row in them.
  int32_t ragged_begin(size_t segment, size_t row) const { return ragged_begin_[segment][row]; }

  std::vector<const GuardedBuffer*> buffers() const;

  /// Overwrites the keys and values of one row with NaN: those of a segment's tokens in pages that no other row has.
  void poison_row(const Problem& problem, size_t segment, size_t row);

 private:
  void lay_out_cache(const ConformanceCase& conformance_case, const Problem& problem, Random& random);
  GuardedBuffer far_pages(const KvStrides& strides, int64_t page_elements) const;
  std::byte* ds_mla_row(int64_t page, int64_t slot) const;
  void lay_out_token_scales(bool alias, Random& random);
  void write_paged(const Problem& problem);
  void protect();
  void unprotect();
  void add_ragged(const Problem& problem, const SegmentModel& segment, Random& random);

  GuardedBuffer first_, second_;                   ///< K, or both; V
  GuardedBuffer k_token_scales_, v_token_scales_;  ///< int8: of K, or of both; of V
  std::vector<GuardedBuffer> ragged_memory_;
  KvCacheView cache_;
  std::vector<RaggedKvView> ragged_;
  std::vector<std::vector<int32_t>> ragged_begin_;
};

}  // namespace folio::inline v0::verify
