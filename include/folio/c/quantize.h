/* Quantisation of whole tensors and the scales of caches; see folio/quantize.hpp. Tensors are [tokens, heads,
 * head_dim]. */
#ifndef FOLIO_C_QUANTIZE_H_
#define FOLIO_C_QUANTIZE_H_

#include "folio/c/context.h"

FOLIO_C_BEGIN

/* Bytes of the scale factors of an NVFP4 matrix; blocks_per_row: num_heads * head_dim / 16. */
FOLIO_C_API folio_status folio_nvfp4_scale_bytes(int64_t rows, int64_t blocks_per_row, int64_t* bytes) FOLIO_C_NOEXCEPT;

/* out = fp8(in / scale), to nearest even, saturated. scale: positive, per tensor; NULL: 1. */
FOLIO_C_API folio_status folio_quantize_fp8(const folio_context* context, const folio_const_tensor_view* in,
                                            const folio_tensor_view* out, const folio_scale* scale,
                                            void* stream) FOLIO_C_NOEXCEPT;
/* out: FOLIO_DTYPE_FLOAT4_E2M1X2 [tokens, heads, head_dim / 2]. block_scale: the matrix's factors, of which row
 * first_row is token 0's. global_scale: positive. */
FOLIO_C_API folio_status folio_quantize_nvfp4(const folio_context* context, const folio_const_tensor_view* in,
                                              const folio_tensor_view* out, void* block_scale, int64_t first_row,
                                              float global_scale, void* stream) FOLIO_C_NOEXCEPT;
/* The inverse; out: float32. */
FOLIO_C_API folio_status folio_dequantize_nvfp4(const folio_context* context, const folio_const_tensor_view* in,
                                                const void* block_scale, int64_t first_row, float global_scale,
                                                const folio_tensor_view* out, void* stream) FOLIO_C_NOEXCEPT;

/* What the largest magnitudes of queries, keys and values are divided by; 0 = vLLM's 200, 200, 100. */
typedef struct folio_kv_scale_constants {
  float q;
  float k;
  float v;
} folio_kv_scale_constants;
/* A layer's fp8 scales from its first batch: max |x| / constant of q, k and v into scales [3]. constants NULL: the
 * defaults. */
FOLIO_C_API folio_status folio_calculate_kv_scales(const folio_context* context, const folio_const_tensor_view* q,
                                                   const folio_const_tensor_view* k, const folio_const_tensor_view* v,
                                                   const folio_kv_scale_constants* constants, float* scales,
                                                   void* stream) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_QUANTIZE_H_ */
