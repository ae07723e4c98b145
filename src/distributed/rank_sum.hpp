#pragma once

#include <cstddef>
#include <span>

#include "attention/gpu_backend.hpp"
#include "folio/types/device.hpp"

namespace folio::inline v0::distributed {

/// sum_over_ranks on `gpu`, or on the host where it is null. `out` may be one of at most SumParams::kMostRanks parts.
void sum_in_order(const attention::GpuBackend* gpu, std::span<const float* const> sent, size_t count, float* out,
                  Stream stream);

}  // namespace folio::inline v0::distributed
