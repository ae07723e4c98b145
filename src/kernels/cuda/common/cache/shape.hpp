#pragma once

#include <cstdint>

#include "kernels/cuda/common/cache/move.hpp"

namespace folio::inline v0::kernels::cuda {

/// Sets pieces and tile: the widest pieces that addresses and strides allow, and as many tokens as give each thread
/// four of them, fewer where there are few tokens.
void set_shape(MoveParams& params, int64_t num_tokens);

}  // namespace folio::inline v0::kernels::cuda
