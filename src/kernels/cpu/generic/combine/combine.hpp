#pragma once

#include <cstdint>
#include <span>

#include "folio/types/attention.hpp"
#include "folio/types/dtype.hpp"

namespace folio::inline v0::kernels::generic {

/// One or more partial attention results with one layout: state s, row (t, h) has its head_dim elements at
/// out + s*state_stride + t*token_stride + h*head_stride and its log-sum-exp at the like place of lse. Strides in
/// elements.
struct CombineSource {
  const void* out = nullptr;
  DType dtype = DType::kUnset;  ///< float32, float16, bfloat16
  int64_t num_states = 1;
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
  std::span<const CombineSource> sources;  ///< combined in order
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  void* out = nullptr;  ///< may be a source's memory if element for element at the same place
  DType out_dtype = DType::kUnset;
  float out_scale = 1.0f;  ///< fp8 only
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;
  LseView lse;                    ///< data null: not wanted
  const uint8_t* mask = nullptr;  ///< [tokens]; rows of tokens whose byte is 0 stay as they are. Null: all are written
};

/// Combines rows [begin, end); row r is token r / num_heads, head r % num_heads. A row's result does not depend on the
/// range. Scales are e^(lse - max), summed and applied in float32; differences of LSEs and changes of base are taken
/// in double, so that large LSEs lose nothing. A row with one state that is not empty gets that state's values
/// unchanged.
void combine_rows(const CombineParams& params, int64_t begin, int64_t end) noexcept;

}  // namespace folio::inline v0::kernels::generic
