#pragma once

#include <cuda.h>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/sm90/prefill/shape.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// How a segment's keys and values come to shared memory.
struct SegmentCopy {
  int32_t box;     ///< tokens of a box; 0: copied by threads, and the maps are not to be used
  int32_t eights;  ///< from page to page, in steps of eight tokens, of keys and of values
  FastDiv page_size;
  bool direct;  ///< copies by threads: pieces of 16 bytes may be copied as they are
};

/// What the kernel is launched with: tensor maps stand in the parameters, so that a captured graph holds them.
struct PrefillParams {
  struct Maps {
    CUtensorMap k;
    CUtensorMap v;
  };
  Maps maps[kMaxSegments];
  CUtensorMap queries;  ///< a box: a math warpgroup's 64 rows, tokens x group
  CUtensorMap results;  ///< likewise
  AttentionParams attention;
  SegmentCopy copies[kMaxSegments];
  FastDiv group;          ///< query heads of a KV head
  bool queries_by_boxes;  ///< `queries` may be used for items of kRows rows that begin with a token's first head
  bool results_by_boxes;  ///< `results` likewise
  bool out_wide;          ///< every row of an output of 16 bits begins at a multiple of 16 bytes
};
static_assert(sizeof(PrefillParams) <= 32764, "what a kernel has of parameters on Volta and newer, from CUDA 12.1 on");

/// Fills all but `attention`. `kv_bytes`: of an element of keys and values as the kernel takes them, 2 or,
/// of codes, 1; segments of others are copied by threads.
void describe(PrefillParams& params, const HeadDims& dims, int32_t kv_bytes);

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
