#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "folio/types/float_convert.hpp"
#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/attention_case_test_util.hpp"

/// The data that tests of a kernel's softmax and masks share: special values, where they go, and steps of one request.
namespace folio::inline v0::kernels::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// All that changes logits or the denominator.
inline CaseOptions all_features() {
  CaseOptions options;
  options.soft_cap = options.alibi = options.sinks = true;
  return options;
}

/// Overwrites the scales of one token's K (`values` false) or V in the first segment's int8 cache, all heads.
inline void overwrite_token_scale(AttentionCase& subject, int32_t request, int32_t token, bool values, float scale) {
  const SegmentArgs& args = subject.args().segments[0];
  const KvCacheView& cache = args.cache;
  const TokenScales& scales = values ? cache.v_token_scales : cache.k_token_scales;
  const int64_t page = args.table.indices[args.table.indptr[request] + token / cache.page_size];
  for (int32_t h = 0; h < cache.num_kv_heads; ++h) {
    scales.data[page * scales.strides.page + token % cache.page_size * scales.strides.token + h * scales.strides.head] =
        scale;
  }
}

/// Overwrites one token's K (`values` false) or V, all heads, in the first segment.
inline void overwrite(AttentionCase& subject, int32_t request, int32_t token, bool values, float value) {
  const SegmentArgs& args = subject.args().segments[0];
  const KvCacheView& cache = args.cache;
  const int64_t page = args.table.indices[args.table.indptr[request] + token / cache.page_size];
  const int64_t slot = token % cache.page_size;
  const KvStrides& strides = values ? cache.v_strides : cache.k_strides;
  const bool pairs = values && cache.format == KvFormat::kCpuPacked;
  for (int32_t h = 0; h < cache.num_kv_heads; ++h) {
    for (int32_t d = 0; d < (values ? cache.head_dim_v : cache.head_dim_qk); ++d) {
      const int64_t at = page * strides.page + h * strides.head +
                         (pairs ? slot / 2 * strides.token + 2 * d + slot % 2 : slot * strides.token + d);
      store_from_float(values ? cache.v : cache.k, cache.dtype, at, value);
    }
  }
}

/// Overwrites the K and V of a token of the first request.
inline void overwrite_kv(AttentionCase& subject, int32_t token, float value) {
  overwrite(subject, 0, token, false, value);
  overwrite(subject, 0, token, true, value);
}

/// A custom mask of `rows` rows and `columns` columns that hides the columns `hidden` from every row.
inline std::vector<uint8_t> mask_without(int32_t rows, int32_t columns, const std::vector<int32_t>& hidden) {
  std::vector<uint8_t> bits(static_cast<size_t>((rows * columns + 7) / 8), 0xff);
  for (int32_t row = 0; row < rows; ++row) {
    for (const int32_t column : hidden) {
      const int32_t bit = row * columns + column;
      bits[static_cast<size_t>(bit / 8)] &= static_cast<uint8_t>(~(1 << (bit % 8)));
    }
  }
  return bits;
}

/// Runs tokens [begin, end) of the only request as a step of their own, over the KV up to `end`.
inline AttentionCase::Result run_step(AttentionCase& subject, const AttentionKernel& kernel, int32_t begin, int32_t end,
                                      int32_t workers) {
  subject.batch().q_len = {end - begin};
  subject.batch().q_first_pos = {begin};
  subject.batch().segments[0].kv_len = {end};
  const ConstTensorView q = subject.args().q;
  subject.mutable_args().q.data = static_cast<const char*>(q.data) + begin * q.strides[0] * size_of(q.dtype);
  AttentionCase::Result result = subject.run(kernel, workers);
  subject.mutable_args().q.data = q.data;
  return result;
}

/// Makes the only request's row `length` tokens long, a multiple of its pages longer than it is: its one page, over and
/// over. The last tokens keep their places in pages and tiles.
inline void lengthen_row(AttentionCase& subject, int32_t length, std::vector<SegmentArgs>& args) {
  OwnedArgs& memory = subject.memory()[0];
  const int64_t pages = (int64_t{length} + subject.config().page_size - 1) / subject.config().page_size;
  memory.indices.assign(static_cast<size_t>(pages), memory.indices[0]);
  memory.indptr = {0, static_cast<int32_t>(pages)};
  subject.batch().segments[0].kv_len = {length};
  args.assign(subject.args().segments.begin(), subject.args().segments.end());
  args[0].table.indices = memory.indices.data();
  args[0].table.indptr = memory.indptr.data();
  args[0].table.num_indices = pages;
  subject.mutable_args().segments = args;
}

}  // namespace folio::inline v0::kernels::testing
