#include "folio/quantize.hpp"

#include "capi/convert.hpp"

using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_view;

folio_status folio_nvfp4_scale_bytes(int64_t rows, int64_t blocks_per_row, int64_t* bytes) noexcept {
  return guarded([&] {
    deref(bytes, "bytes");
    constexpr int64_t kMost = int64_t{1} << 31;  // of either, so that their product is no more than 2^63
    folio::core::require(rows >= 0 && rows < kMost, "rows is ", rows, "; 0 to 2^31 - 1 are known");
    folio::core::require(blocks_per_row >= 0 && blocks_per_row < kMost, "blocks_per_row is ", blocks_per_row,
                         "; 0 to 2^31 - 1 are known");
    *bytes = folio::nvfp4_scale_bytes(rows, blocks_per_row);
  });
}

folio_status folio_quantize_fp8(const folio_context* context, const folio_const_tensor_view* in,
                                const folio_tensor_view* out, const folio_scale* scale, void* stream) noexcept {
  return guarded([&] {
    folio::quantize_fp8(deref(context, "context").context, to_view(deref(in, "in"), "in.dtype"),
                        to_view(deref(out, "out"), "out.dtype"), folio::capi::to_scale(scale, "scale.granularity"),
                        folio::Stream{stream});
  });
}

folio_status folio_quantize_nvfp4(const folio_context* context, const folio_const_tensor_view* in,
                                  const folio_tensor_view* out, void* block_scale, int64_t first_row,
                                  float global_scale, void* stream) noexcept {
  return guarded([&] {
    folio::core::require(block_scale != nullptr, "block_scale is null");
    folio::quantize_nvfp4(deref(context, "context").context, to_view(deref(in, "in"), "in.dtype"),
                          to_view(deref(out, "out"), "out.dtype"), {block_scale, first_row}, global_scale,
                          folio::Stream{stream});
  });
}

folio_status folio_dequantize_nvfp4(const folio_context* context, const folio_const_tensor_view* in,
                                    const void* block_scale, int64_t first_row, float global_scale,
                                    const folio_tensor_view* out, void* stream) noexcept {
  return guarded([&] {
    folio::core::require(block_scale != nullptr, "block_scale is null");
    // BlockScaleArgs serves both directions; this one only reads.
    folio::dequantize_nvfp4(deref(context, "context").context, to_view(deref(in, "in"), "in.dtype"),
                            {const_cast<void*>(block_scale), first_row}, global_scale,
                            to_view(deref(out, "out"), "out.dtype"), folio::Stream{stream});
  });
}

folio_status folio_calculate_kv_scales(const folio_context* context, const folio_const_tensor_view* q,
                                       const folio_const_tensor_view* k, const folio_const_tensor_view* v,
                                       const folio_kv_scale_constants* constants, float* scales,
                                       void* stream) noexcept {
  return guarded([&] {
    folio::KvScaleConstants divisors;
    if (constants != nullptr) {
      if (constants->q != 0.0f) divisors.q = constants->q;
      if (constants->k != 0.0f) divisors.k = constants->k;
      if (constants->v != 0.0f) divisors.v = constants->v;
    }
    folio::calculate_kv_scales(deref(context, "context").context, to_view(deref(q, "q"), "q.dtype"),
                               to_view(deref(k, "k"), "k.dtype"), to_view(deref(v, "v"), "v.dtype"),
                               folio::capi::to_span(scales, 3, "scales"), divisors, folio::Stream{stream});
  });
}
