#pragma once

#include "kernels/cpu/common/attention/fold.hpp"
#include "kernels/cpu/common/attention/load_queries.hpp"
#include "kernels/cpu/generic/attention/accumulate.hpp"
#include "kernels/cpu/generic/attention/rotate.hpp"

/// The functions of one instruction set's Arithmetic.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

static void load_turned_queries(const ItemCall& call) noexcept {
  load_queries(call);
  for (int32_t r = 0; call.rope != nullptr && r < call.num_rows; ++r) {
    rotate(call, call.rows[r].position, call.scratch.q + r * call.qk_stride);
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

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
