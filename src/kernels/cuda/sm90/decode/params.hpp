#pragma once

#include <cuda.h>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/sm90/decode/shape.hpp"

namespace folio::inline v0::kernels::cuda::sm90::decode {

/// What the kernel is launched with: tensor maps stand in the parameters, so that a captured graph holds them.
struct DecodeParams {
  struct Maps {
    CUtensorMap k;
    CUtensorMap v;
  };
  Maps maps[kMaxSegments];
  AttentionParams attention;
  int32_t box[kMaxSegments];  ///< kSingles, kSmallBox or kLargeBox; the maps of kSingles are not to be used
  bool direct[kMaxSegments];  ///< of kSingles: pieces of 16 bytes may be copied as they are
};

/// Fills `maps`, `box` and `direct`. Of a segment that no tensor map can describe, the box is kSingles.
void describe_segments(DecodeParams& params, const HeadDims& dims);

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
