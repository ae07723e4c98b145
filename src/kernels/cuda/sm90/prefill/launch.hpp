#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/sm90/prefill/config.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// How the producer loads a segment's K and V.
struct SegmentLoad {
  int32_t tma_tokens;      ///< tokens of a TMA tile; 0: threads copy, and the tensor maps must not be used
  int32_t atoms_per_page;  ///< from page to page, in steps of kAtomRows tokens; the same for K and V
  FastDiv page_size;
  bool is_16B_aligned;  ///< threads may copy 16 bytes at a time, as they are
};

/// Parameters of the kernel. Tensor maps are part of them, so that a captured graph holds them.
struct PrefillParams {
  struct Maps {
    CUtensorMap k;
    CUtensorMap v;
  };
  Maps maps[kMaxSegments];
  CUtensorMap q;       ///< a TMA tile: the 64 rows of a consumer warpgroup, tokens x group
  CUtensorMap output;  ///< likewise
  AttentionParams attention;
  SegmentLoad loads[kMaxSegments];
  FastDiv group;         ///< query heads of a KV head
  bool q_by_tma;         ///< `q` may be used for work tiles of kBlockM rows that begin with a token's first head
  bool out_by_tma;       ///< `output` likewise
  bool out_16B_aligned;  ///< every row of a 16-bit output begins at a multiple of 16 bytes
};
static_assert(sizeof(PrefillParams) <= 32764, "what a kernel has of parameters on Volta and newer, from CUDA 12.1 on");

/// Parameters of one launch. `kv_bytes` of an element of K and V as the kernel loads them: 2, or 1 for fp8. Segments of
/// other dtypes are copied by threads.
PrefillParams make_params(const AttentionParams& attention, const HeadDims& dims, int32_t kv_bytes);

/// Launches the kernel of one element type of the MMA and its head dimensions. CMake generates a source for each
/// instantiation. `kFp8`: all K and V have this dtype, and the producer dequantizes them to `T`; Q has any dtype.
/// `kFp8Mma`: Q, K and V are operands of FP8 MMA instead; `variant` is kPlain then.
template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8 = Fp8::kNone, bool kFp8Mma = false>
void launch_prefill(const AttentionParams& attention, Variant variant, int32_t num_workers, Stream stream);

/// "cuda-sm90-prefill": many query rows, on Hopper. See docs/kernels/cuda_sm90_prefill.md.
extern const AttentionKernel kSm90PrefillKernel;

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
