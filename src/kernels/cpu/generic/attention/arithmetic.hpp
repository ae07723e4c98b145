#pragma once

#include "kernels/cpu/generic/attention/accumulate.hpp"

/// The functions of one instruction set's Arithmetic.
namespace folio::inline v0::kernels::generic::FOLIO_ISA {

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

static void accumulate(const ItemCall& call) noexcept {
  switch (call.keys.dtype) {
    case DType::kFloat32: accumulate_as<DType::kFloat32>(call); break;
    case DType::kFloat16: accumulate_as<DType::kFloat16>(call); break;
    case DType::kBFloat16: accumulate_as<DType::kBFloat16>(call); break;
    case DType::kFloat8E4M3: accumulate_as<DType::kFloat8E4M3>(call); break;
    case DType::kFloat8E5M2: accumulate_as<DType::kFloat8E5M2>(call); break;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
}

static void fold(float* max, float* sum, float* acc, float other_max, float other_sum, const float* other_acc,
                 int32_t n) noexcept {
  if (other_max == -__builtin_inff()) return;
  if (*max == -__builtin_inff()) {
    *max = other_max;
    *sum = other_sum;
    __builtin_memcpy(acc, other_acc, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const float most = *max > other_max ? *max : other_max;
  const float mine = exp2_nonpositive(*max - most);
  const float others = exp2_nonpositive(other_max - most);
  for (int32_t d = 0; d < n; d += 4) {
    store(acc + d, load<Quad>(acc + d) * mine + load<Quad>(other_acc + d) * others);
  }
  *sum = *sum * mine + other_sum * others;
  *max = *sum != *sum ? *sum : most;
}

}  // namespace folio::inline v0::kernels::generic::FOLIO_ISA
