#pragma once

#include "kernels/cpu/common/attention/locate.hpp"

namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

template <DType kType>
static void load_queries_as(const ItemCall& call) {
  for (int32_t r = 0; r < call.num_rows; ++r) {
    convert_row<kType>(call.rows[r].q, call.head_dim_qk, call.scratch.q + r * call.qk_stride);
  }
}

static void load_queries(const ItemCall& call) noexcept {
  switch (call.q_dtype) {
    case DType::kFloat32: load_queries_as<DType::kFloat32>(call); break;
    case DType::kFloat16: load_queries_as<DType::kFloat16>(call); break;
    case DType::kBFloat16: load_queries_as<DType::kBFloat16>(call); break;
    case DType::kFloat8E4M3: load_queries_as<DType::kFloat8E4M3>(call); break;
    case DType::kFloat8E5M2: load_queries_as<DType::kFloat8E5M2>(call); break;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
  // Blocks of scores take whole groups of rows; those beyond the last are computed and never read.
  for (int32_t r = call.num_rows; r < padded_rows(call.num_rows); ++r) {
    __builtin_memset(call.scratch.q + r * call.qk_stride, 0, static_cast<size_t>(call.qk_stride) * sizeof(float));
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
