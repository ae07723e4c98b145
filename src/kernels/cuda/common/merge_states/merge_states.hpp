#pragma once

#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/device.hpp"
#include "folio/types/kv_cache.hpp"

/// Merges of partial results on a GPU, with the arithmetic of kernels/cpu/generic/combine: what a row gets depends on
/// the row alone. Weights are exponentials taken in double and rounded to float, so that they are the C library's but
/// for the last bit of a few; sums and products are float32, in the order of the states.
namespace folio::inline v0::kernels::cuda {

/// As kernels::generic::CombineSource. All addresses are the device's.
struct CombineSource {
  const void* out = nullptr;
  DType dtype = DType::kUnset;  ///< float32, float16, bfloat16
  int64_t num_states = 0;
  int64_t state_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  const float* lse = nullptr;
  int64_t lse_state_stride = 0;
  int64_t lse_token_stride = 0;
  int64_t lse_head_stride = 0;
  LseBase base = LseBase::kE;
};

struct CombineParams {
  CombineSource sources[2];  ///< folded in order
  int64_t num_tokens = 0;
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  void* out = nullptr;  ///< may be a source's memory if element for element at the same place
  DType out_dtype = DType::kUnset;
  Scale out_scale;  ///< per tensor; fp8 outputs only
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;
  LseView lse;                    ///< data null: not wanted
  const uint8_t* mask = nullptr;  ///< [num_tokens]; tokens whose byte is 0 stay as they are. Null: all are written
};

/// Enqueues the merge. Throws Error(kDeviceError) where the launch fails.
void enqueue(const CombineParams& params, Stream stream);

/// Merges of eight states or fewer, all of 16 bits or all of 32: one thread a row weighs its states, then all threads
/// take pieces of rows. Returns false, and does nothing, for others.
bool enqueue_few_states(const CombineParams& params, bool wide, Stream stream);

/// Whether every row of all sources and of the output begins where eight elements can be read or written at once.
bool is_wide(const CombineParams& params);

}  // namespace folio::inline v0::kernels::cuda
