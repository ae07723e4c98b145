#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "folio/types/dtype.hpp"

namespace folio::inline v0 {

inline constexpr int32_t kMaxRank = 5;

/// A borrowed strided tensor. Strides are in elements, may be 0 (broadcast) or larger than packed; element (i0, i1,
/// ...) lies at data + sum(i_k * strides[k]). `data` is the address on whichever device the function's context names.
template <typename Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::kUnset;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};    ///< elements per dimension; only the first `rank` count
  std::array<int64_t, kMaxRank> strides{};  ///< elements; only the first `rank` count

  constexpr BasicTensorView() noexcept = default;

  /// A packed row-major tensor over `memory`. At most kMaxRank dimensions.
  constexpr BasicTensorView(Void* memory, DType type, std::initializer_list<int64_t> dims) noexcept
      : data(memory), dtype(type), rank(static_cast<int32_t>(dims.size())) {
    int32_t i = 0;
    for (int64_t dim : dims) shape[static_cast<size_t>(i++)] = dim;
    int64_t stride = 1;
    for (int32_t k = rank - 1; k >= 0; --k) {
      strides[static_cast<size_t>(k)] = stride;
      stride *= shape[static_cast<size_t>(k)];
    }
  }

  /// A read-only view of the same tensor.
  constexpr operator BasicTensorView<const Void>()
      const noexcept {  // NOLINT(google-explicit-constructor): adding const is safe
    BasicTensorView<const Void> view;
    view.data = data;
    view.dtype = dtype;
    view.rank = rank;
    view.shape = shape;
    view.strides = strides;
    return view;
  }
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

}  // namespace folio::inline v0
