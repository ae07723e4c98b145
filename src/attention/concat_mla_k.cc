#include <cstddef>
#include <cstring>

#include "attention/cache_args.hpp"
#include "attention/op_state.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/kv_cache.hpp"

namespace folio::inline v0 {
namespace {

template <typename View>
void check_view(const char* name, const View& view, DType dtype) {
  core::require(view.rank == 3, name, " has rank ", view.rank, "; it must be [tokens, heads, components]");
  core::require(view.dtype == dtype, name, " is ", view.dtype, "; k is ", dtype);
  core::require(view.shape[0] >= 0 && view.shape[1] >= 0 && view.shape[2] >= 0, name, " has a negative size");
  core::require(view.shape[2] <= 1 || view.strides[2] == 1, name, " has stride ", view.strides[2],
                " between components; it must be 1");
  const bool empty = view.shape[0] == 0 || view.shape[1] == 0 || view.shape[2] == 0;
  core::require(empty || view.data != nullptr, name, " is null");
}

/// Whether each of the two outer dimensions steps over all that lies inside it, in either order of them.
bool rows_are_apart(const TensorView& view) {
  const int64_t row = view.shape[2];
  const auto steps_over = [&](size_t inner, size_t outer) {
    const int64_t inner_stride = view.shape[inner] > 1 ? view.strides[inner] : row;
    const int64_t inner_extent = inner_stride * (view.shape[inner] - 1) + row;
    return inner_stride >= row && (view.shape[outer] <= 1 || view.strides[outer] >= inner_extent);
  };
  return row == 0 || view.shape[0] == 0 || view.shape[1] == 0 || steps_over(1, 0) || steps_over(0, 1);
}

template <typename Byte, typename View>
Byte* row_of(const View& view, int64_t token, int64_t head) {
  return static_cast<Byte*>(view.data) + (token * view.strides[0] + head * view.strides[1]) * size_of(view.dtype);
}

void check_args(const TensorView& k, const ConstTensorView& k_nope, const ConstTensorView& k_pe) {
  core::require(
      k.dtype == DType::kFloat32 || k.dtype == DType::kFloat16 || k.dtype == DType::kBFloat16 || is_fp8(k.dtype),
      "k is ", k.dtype, "; offered are float32, float16, bfloat16, fp8_e4m3 and fp8_e5m2");
  check_view("k", k, k.dtype);
  check_view("k_nope", k_nope, k.dtype);
  check_view("k_pe", k_pe, k.dtype);
  const int64_t tokens = k.shape[0];
  const int64_t heads = k.shape[1];
  core::require(k_nope.shape[0] == tokens && k_nope.shape[1] == heads, "k_nope is [", k_nope.shape[0], ", ",
                k_nope.shape[1], ", ...]; k is [", tokens, ", ", heads, ", ...]");
  core::require(k_pe.shape[0] == tokens && k_pe.shape[1] == 1, "k_pe is [", k_pe.shape[0], ", ", k_pe.shape[1],
                ", ...]; it must be [", tokens, ", 1, ...]");
  core::require(k.shape[2] == k_nope.shape[2] + k_pe.shape[2], "k has ", k.shape[2], " components; k_nope has ",
                k_nope.shape[2], " and k_pe ", k_pe.shape[2]);
  core::require(rows_are_apart(k), "rows of k overlap: its strides are ", k.strides[0], " and ", k.strides[1],
                " for rows of ", k.shape[2]);
}

/// Whether k_nope is the part of k where it would be copied to.
bool is_in_place(const TensorView& k, const ConstTensorView& k_nope) {
  return k.data == k_nope.data && k.strides[0] == k_nope.strides[0] && k.strides[1] == k_nope.strides[1];
}

}  // namespace

void concat_mla_k(const Context& context, const TensorView& k, const ConstTensorView& k_nope,
                  const ConstTensorView& k_pe, Stream stream) {
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) {
    attention::check_device("concat_mla_k", context, stream);
    concat_mla_k(k, k_nope, k_pe);
    return;
  }
  check_args(k, k_nope, k_pe);
  const int64_t bytes = size_of(k.dtype);
  const auto aligned = [&](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
  };
  core::require(aligned(k.data) && aligned(k_nope.data) && aligned(k_pe.data),
                "k, k_nope or k_pe is not aligned to its elements of ", bytes, " bytes");
  kernels::cuda::ConcatParams params;
  params.k = row_of<unsigned char>(k, 0, 0);
  params.nope = row_of<const unsigned char>(k_nope, 0, 0);
  params.rope = row_of<const unsigned char>(k_pe, 0, 0);
  params.num_tokens = k.shape[0];
  params.num_heads = core::checked_cast<int32_t>(k.shape[1]);
  params.nope_bytes = core::checked_cast<int32_t>(k_nope.shape[2] * bytes);
  params.rope_bytes = core::checked_cast<int32_t>(k_pe.shape[2] * bytes);
  params.k_token = k.strides[0] * bytes;
  params.k_head = k.strides[1] * bytes;
  params.nope_token = k_nope.strides[0] * bytes;
  params.nope_head = k_nope.strides[1] * bytes;
  params.rope_token = k_pe.strides[0] * bytes;
  params.copy_nope = !is_in_place(k, k_nope);
  gpu->enqueue(params, stream);
}

void concat_mla_k(const TensorView& k, const ConstTensorView& k_nope, const ConstTensorView& k_pe) {
  check_args(k, k_nope, k_pe);
  const int64_t tokens = k.shape[0];
  const int64_t heads = k.shape[1];
  const auto nope_bytes = static_cast<size_t>(k_nope.shape[2] * size_of(k.dtype));
  const auto rope_bytes = static_cast<size_t>(k_pe.shape[2] * size_of(k.dtype));
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t head = 0; head < heads; ++head) {
      auto* row = row_of<std::byte>(k, token, head);
      if (nope_bytes > 0) std::memmove(row, row_of<const std::byte>(k_nope, token, head), nope_bytes);
      if (rope_bytes > 0) std::memmove(row + nope_bytes, row_of<const std::byte>(k_pe, token, 0), rope_bytes);
    }
  }
}

}  // namespace folio::inline v0
