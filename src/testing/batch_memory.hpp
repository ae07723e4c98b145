#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "folio/types/attention.hpp"
#include "testing/guarded_buffer.hpp"
#include "testing/kv_memory.hpp"
#include "testing/problem.hpp"

namespace folio::inline v0::verify {

/// Some of a request's queries, for a batch.
struct SlicePart {
  size_t request = 0;
  int32_t q_begin = 0;
  int32_t q_end = 0;
  int32_t kv_drop = 0;  ///< tokens left out at the end of its last segment: those that come later
};

/// A batch made of parts of a problem, in ascending order of the requests.
struct Slice {
  std::vector<SlicePart> parts;
  int32_t padding_requests = 0;
  int32_t padding_tokens = 0;
};

Slice whole_problem(const Problem& problem);

/// What a run wrote: rows of the slice's tokens, one after the other.
struct RunOutput {
  std::vector<uint8_t> out;           ///< [tokens, num_q_heads, head_dim_v] as stored (NVFP4: head_dim_v / 2 bytes)
  std::vector<uint8_t> block_scales;  ///< NVFP4: [tokens, num_q_heads, head_dim_v / 16], in this order
  std::vector<float> lse;             ///< [tokens, num_q_heads] as written; empty if not wanted
  std::string stray_write;            ///< what was written that must not be; empty = nothing
};

/// A batch in memory: guarded, strided, with junk in all that must not be read and canaries in all that must not be
/// written.
class BatchMemory {
 public:
  BatchMemory(const ConformanceCase& conformance_case, const Problem& problem, const KvMemory& kv, const Slice& slice);

  const BatchView& view() const { return view_; }
  const AttentionArgs& args() const { return args_; }
  int32_t num_tokens() const { return num_tokens_; }

  /// All memory that a run uses.
  std::vector<const GuardedBuffer*> buffers() const;
  /// Makes it a batch whose lengths lie on the device.
  void move_lengths_to_device();
  /// Overwrites every array that only `plan` may read.
  void spoil_lengths();
  /// What is in the outputs now.
  RunOutput collect() const;
  /// True if any byte of the outputs has been written.
  bool written() const;

 private:
  void add_queries(const Problem& problem, const Slice& slice, Random& random);
  void add_outputs(const ConformanceCase& conformance_case, const Problem& problem, Random& random);
  /// Memory for an NVFP4 output's block scales, of a matrix that has other rows around the batch's.
  void add_block_scales(const Problem& problem, Random& random);
  void add_segment(const ConformanceCase& conformance_case, const Problem& problem, const KvMemory& kv,
                   const Slice& slice, size_t segment, Random& random);
  bool follows_earlier_segments(const std::vector<int32_t>& first_pos) const;
  void add_table(const ConformanceCase& conformance_case, const std::vector<const KvRowModel*>& rows,
                 const std::vector<int32_t>& kv_len, int32_t page_size, SegmentArgs& args, Random& random);
  void add_rules(const Problem& problem, const Slice& slice, Random& random);
  void add_mask(const Problem& problem, const Slice& slice, Random& random);
  Scale scale_of(const ScaleModel& model, const Slice& slice);

  template <typename T>
  const T* keep(const std::vector<T>& values);  ///< read by `run`
  template <typename T>
  const T* keep_length(const std::vector<T>& values);  ///< read by `plan` only

  std::vector<GuardedBuffer> memory_, lengths_;
  GuardedBuffer out_memory_, lse_memory_, block_scale_memory_;
  std::vector<KvSegment> segments_;
  std::vector<SegmentArgs> segment_args_;
  BatchView view_;
  AttentionArgs args_;
  int32_t num_tokens_ = 0;  ///< without padding
};

}  // namespace folio::inline v0::verify
