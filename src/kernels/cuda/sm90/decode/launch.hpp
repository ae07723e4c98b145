#pragma once

#include <cuda.h>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/sm90/decode/config.hpp"

/// What the host hands to the kernel, and the kernel's instantiations.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// "cuda-sm90-decode": few query rows against long keys, on Hopper; docs/kernels/cuda_sm90_decode.md.
extern const AttentionKernel kSm90DecodeKernel;

/// The kernel's parameters. They contain the tensor maps, so that a captured graph keeps them.
struct DecodeParams {
  struct Maps {
    CUtensorMap k;
    CUtensorMap v;
  };
  Maps maps[kMaxSegments];
  AttentionParams attention;
  int32_t copy_tokens[kMaxSegments];  ///< kCpAsync (the maps are not valid), kTmaHalfTile or kTmaWholeTile
  bool cp_async_16B[kMaxSegments];    ///< kCpAsync: data is aligned and of the kernel's type: cp.async of 16 bytes
};

/// Fills maps, copy_tokens and cp_async_16B from `attention`.
void set_copies(DecodeParams& params, const HeadDims& dims);

/// Launches the kernel of one type of keys and values in shared memory and of its head dimensions.
template <DType kType, int32_t kDimQk, int32_t kDimV>
void launch_instantiation(const AttentionParams& params, const LaunchShape& shape, Stream stream);

/// All instantiations. CMakeLists.txt has the same list and generates a source for each from instantiation.cu.in.
#define FOLIO_SM90_DECODE_INSTANTIATIONS(X) \
  X(DType::kBFloat16, 64, 64)               \
  X(DType::kBFloat16, 96, 96)               \
  X(DType::kBFloat16, 128, 128)             \
  X(DType::kBFloat16, 192, 128)             \
  X(DType::kBFloat16, 256, 256)             \
  X(DType::kFloat16, 64, 64)                \
  X(DType::kFloat16, 96, 96)                \
  X(DType::kFloat16, 128, 128)              \
  X(DType::kFloat16, 192, 128)              \
  X(DType::kFloat16, 256, 256)              \
  X(DType::kFloat8E4M3, 64, 64)             \
  X(DType::kFloat8E4M3, 128, 128)           \
  X(DType::kFloat8E4M3, 256, 256)           \
  X(DType::kFloat8E5M2, 64, 64)             \
  X(DType::kFloat8E5M2, 128, 128)           \
  X(DType::kFloat8E5M2, 256, 256)

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
