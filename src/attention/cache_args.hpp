#pragma once

#include <cstdint>

#include "attention/op_state.hpp"
#include "folio/context.hpp"
#include "folio/kv_cache.hpp"
#include "kernels/cpu/generic/cache/cache_kernels.hpp"
#include "kvcache/strided_set.hpp"

/// What the cache functions share: checks, and the parameters of their kernels. All checks throw kInvalidArgument
/// unless they say otherwise; names are for messages.
namespace folio::inline v0::attention {

/// The context is a CPU's and the stream the default one. kUnsupported for other devices.
void check_device(const char* function, const Context& context, Stream stream);

/// [tokens, heads, dim], innermost contiguous, of any of the cache's dtypes, aligned to its elements, strides not
/// negative.
void check_tensor(const char* name, const ConstTensorView& tensor, int64_t heads, int64_t dim);

/// A scale that the function can use. `used`: the side it belongs to is fp8 and not copied bitwise; otherwise it must
/// be left at its default, and `why_not` says why. `requests`: rows that per-request scales may be indexed by; -1 =
/// such scales are refused. Values must be finite and > 0, arrays where they are `readable` (on the host).
void check_scale(const char* name, const Scale& scale, bool used, const char* why_not, int64_t heads,
                 int64_t requests = -1, bool readable = true);

/// `status` is a GPU's only, and aligned.
void check_status(const int32_t* status, bool on_gpu);

bool is_default(const Scale& scale);
bool same_scale(const Scale& a, const Scale& b);

/// A cache has scales of its own, in its rows (KvFormat::kFp8DsMla) or beside them (int8): other scales are not for it.
bool has_own_scales(const KvCacheView& cache);
const char* own_scales_reason(const KvCacheView& cache);

/// A tensor's rows share no byte with a cache, nor with its token scales.
void check_apart(const char* name, const kvcache::StridedSet& rows, const KvCacheView& cache);

/// int8 caches are for CPU contexts: kUnsupported on a GPU.
void check_gpu_cache(const char* function, const KvCacheView& cache);

/// How rows of one side become rows of the other; rows of fp8_ds_mla have `kFp8DsMla`. `bitwise`: sides are of one
/// format and dtype, and values are copied.
kernels::generic::RowConversion row_conversion(DType from, KvFormat from_format, DType to, KvFormat to_format,
                                               bool bitwise);
/// Elements of a row that is moved: bytes, where rows of fp8_ds_mla are copied.
int32_t row_elements(const KvCacheView& cache, int32_t head_dim, bool bitwise);

/// A checked tensor's rows for kernels.
template <typename Byte, typename Void>
kernels::generic::TensorRows<Byte> tensor_rows(const BasicTensorView<Void>& tensor) {
  const int64_t bytes = size_of(tensor.dtype);
  return {static_cast<Byte*>(tensor.data), tensor.strides[0] * bytes, tensor.strides[1] * bytes};
}

/// A misaligned address is an error that takes the whole CUDA context with it; so all are looked at.
void check_gpu_aligned(const char* name, const void* data, int32_t bytes);

/// One half of a move on a GPU: keys, or values, of a cache or a tensor.
kernels::cuda::MoveSide move_side(const KvCacheView& cache, bool is_k);
kernels::cuda::MoveSide move_side(const ConstTensorView& tensor);
kernels::cuda::MoveHalf move_half(const kernels::cuda::MoveSide& from, const kernels::cuda::MoveSide& to,
                                  int32_t head_dim, const Scale& from_scale, const Scale& to_scale, bool bitwise);
/// A move of some of a cache's tokens, without its halves.
kernels::cuda::MoveParams move_of(const KvCacheView& cache, int32_t* status);

}  // namespace folio::inline v0::attention
