#pragma once

#include <cuda.h>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/sm90/mla/shape.hpp"

namespace folio::inline v0::kernels::cuda::sm90::mla {

/// How a segment's keys and values come to shared memory.
struct SegmentCopy {
  int32_t box;        ///< tokens of a box; 0: copied by threads, and the maps are not to be used
  int32_t log_boxes;  ///< a tile has 2^log_boxes of them
  FastDiv page_size;
  bool inside;  ///< values are their keys' first components: one tile is both
  bool direct;  ///< copies by threads: pieces of 16 bytes may be copied as they are
};

/// What the kernel is launched with: tensor maps stand in the parameters, so that a captured graph holds them.
struct MlaParams {
  struct Maps {
    CUtensorMap k;
    CUtensorMap v;  ///< not of values inside keys
  };
  Maps maps[kMaxSegments];
  AttentionParams attention;
  SegmentCopy copies[kMaxSegments];
};
static_assert(sizeof(MlaParams) <= 32764, "what a kernel has of parameters on Volta and newer, from CUDA 12.1 on");

/// Fills `maps` and `copies`.
void describe(MlaParams& params);

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
