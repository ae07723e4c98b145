#pragma once

#include <cuda.h>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/sm90/mla/config.hpp"

/// Parameters of the kernel and its host side.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// "cuda-sm90-mla": multi-head latent attention on Hopper, head dimensions 576/512 and 512/512;
/// docs/kernels/cuda_sm90_mla.md.
extern const AttentionKernel kSm90MlaKernel;

/// How a segment's keys and values are loaded.
struct KvCopy {
  int32_t tma_tokens;      ///< tokens of a TMA tile; 0: copied by threads, and the tensor maps are not to be used
  int32_t log2_tma_tiles;  ///< a column block (fp8: an fp8 block) has 2^log2_tma_tiles TMA tiles
  FastDiv page_size;
  bool ds_mla;   ///< rows of KvFormat::kFp8DsMla
  bool v_in_k;   ///< values are the first components of their keys: one KV tile holds both
  bool aligned;  ///< copied by threads: 16-byte cp.async may be used
};

/// The kernel's parameters. Tensor maps are among them, so that a captured graph holds them.
struct MlaParams {
  struct TensorMaps {
    CUtensorMap k;       ///< ds_mla: of the latents
    CUtensorMap v;       ///< not set if v_in_k; ds_mla: of the RoPE parts
    CUtensorMap scales;  ///< ds_mla: a token's four, 16 bytes
  };
  TensorMaps maps[kMaxSegments];
  CUtensorMap q_map;  ///< set if q_by_tma
  AttentionParams attention;
  KvCopy copies[kMaxSegments];
  int32_t q_tma_heads;  ///< heads of a TMA tile of Q
  bool out_16B;         ///< the output is of a 16-bit type and may be written in chunks of 16 bytes
  bool q_by_tma;        ///< where a work tile's rows are whole tokens, or 64 heads of one; Q is of the MMA's type
};
static_assert(sizeof(MlaParams) <= 32764, "the limit of kernel parameters on Volta and newer, from CUDA 12.1 on");

/// The parameters with `maps` and `copies` filled. `mma_dtype`: of Q in shared memory.
MlaParams make_params(const AttentionParams& attention, DType mma_dtype);

// Launches, explicitly instantiated by instantiation_*.cu.in for the element types of MMAs and the head dimensions of
// kHeadDimsQk.

/// Packed rows are rows of MMAs. `general`: there is a soft cap, ALiBi or a custom mask. `fp8`: q or segments may be
/// fp8.
template <DType kDType, int32_t DimQk>
void launch_rows(const AttentionParams& params, bool general, bool fp8, int32_t num_workers, Stream stream);

/// The same where all keys and values are rows of fp8_ds_mla.
template <bool General>
void launch_rows_ds_mla(const AttentionParams& params, int32_t num_workers, Stream stream);

/// MMAs with swapped operands: no work tile has more than kSwapAbRows packed rows. `kFp8`: of all keys and values.
/// `DsMla`: they are rows of fp8_ds_mla.
template <DType kDType, int32_t DimQk, Fp8 kFp8, bool DsMla>
void launch_swap_ab(const AttentionParams& params, int32_t num_workers, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
