#include "attention/cache_args.hpp"

#include <cmath>

#include "core/error.hpp"
#include "folio/types/ds_mla.hpp"

namespace folio::inline v0::attention {

using core::require;
namespace cuda = kernels::cuda;

namespace {

/// Data that kernels do not write is const in the views that come in, and not in MoveSide, which is both.
std::byte* bytes_of(const void* data) {
  return static_cast<std::byte*>(const_cast<void*>(data));
}

}  // namespace

void check_device(const char* function, const Context& context, Stream stream) {
  if (context.device().type != DeviceType::kCpu) {
    core::fail(ErrorCode::kUnsupported, function, " on a device other than the CPU; CPU contexts are offered");
  }
  require(stream.handle == nullptr, function, " on a CPU context takes no stream; pass a default-constructed Stream");
}

void check_tensor(const char* name, const ConstTensorView& tensor, int64_t heads, int64_t dim) {
  require(tensor.rank == 3, name, " has rank ", tensor.rank, "; it must be [tokens, num_kv_heads, head_dim]");
  require(tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kFloat16 || tensor.dtype == DType::kBFloat16 ||
              is_fp8(tensor.dtype),
          name, " is ", to_string(tensor.dtype), "; float32, float16, bfloat16 and the cache's fp8 type are taken");
  require(tensor.shape[0] >= 0 && tensor.shape[1] == heads && tensor.shape[2] == dim, name, " is [", tensor.shape[0],
          ", ", tensor.shape[1], ", ", tensor.shape[2], "]; it must be [tokens, ", heads, ", ", dim, "]");
  require(tensor.strides[2] == 1 || dim == 1, name, "'s innermost stride is ", tensor.strides[2], "; it must be 1");
  require(reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(size_of(tensor.dtype)) == 0, name,
          " is not aligned to an element of ", to_string(tensor.dtype));
}

void check_status(const int32_t* status, bool on_gpu) {
  require(status == nullptr || on_gpu, "status is given on a CPU context, which throws for indices out of range");
  require(reinterpret_cast<uintptr_t>(status) % alignof(int32_t) == 0, "status is not aligned to an int32");
}

bool is_default(const Scale& scale) {
  return scale.data == nullptr && scale.value == 1.0f && scale.granularity == ScaleGranularity::kPerTensor &&
         scale.request_stride == 0;
}

bool same_scale(const Scale& a, const Scale& b) {
  return a.value == b.value && a.data == b.data && a.granularity == b.granularity &&
         a.request_stride == b.request_stride;
}

void check_scale(const char* name, const Scale& scale, bool used, const char* why_not, int64_t heads, int64_t requests,
                 bool readable) {
  if (!used) {
    require(is_default(scale), name, " is given, but ", why_not);
    return;
  }
  const auto granularity = scale.granularity;
  const bool per_tensor = granularity == ScaleGranularity::kPerTensor;
  const bool per_head = granularity == ScaleGranularity::kPerHead;
  const bool per_request = granularity == ScaleGranularity::kPerRequest;
  const bool per_both = granularity == ScaleGranularity::kPerRequestAndHead;
  require(per_tensor || per_head || (requests >= 0 && (per_request || per_both)), name, ".granularity is ",
          static_cast<int32_t>(granularity), "; per tensor (0) and per head (1)",
          requests >= 0 ? ", per request (2) and per request and head (3)" : "", " are taken here");
  require(scale.request_stride == 0 || per_both, name, ".request_stride is ", scale.request_stride,
          ", but the scale is not per request and head");
  require(scale.request_stride >= 0, name, ".request_stride is ", scale.request_stride, "; it must not be negative");
  if (scale.data == nullptr) {
    require(per_tensor, name, " is per head or request, but has no data");
    require(std::isfinite(scale.value) && scale.value > 0.0f, name, ".value is ", scale.value,
            "; it must be finite and above 0");
    return;
  }
  require(scale.value == 1.0f, name, " has data and a value of ", scale.value, "; leave the value at 1");
  require(reinterpret_cast<uintptr_t>(scale.data) % alignof(float) == 0, name, ".data is not aligned to a float");
  if (!readable) return;
  const auto table = kernels::generic::scale_table(scale);
  const int64_t rows = per_request || per_both ? requests : 1;
  const int64_t columns = per_head || per_both ? heads : 1;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const float value = table.at(row, column);
      require(std::isfinite(value) && value > 0.0f, name, ".data of request ", row, ", head ", column, " is ", value,
              "; it must be finite and above 0");
    }
  }
}

bool has_own_scales(const KvCacheView& cache) {
  return cache.format == KvFormat::kFp8DsMla || cache.dtype == DType::kInt8;
}

const char* own_scales_reason(const KvCacheView& cache) {
  return cache.dtype == DType::kInt8 ? "int8 caches have a scale for each token and KV head"
                                     : "rows of fp8_ds_mla have scales of their own";
}

void check_apart(const char* name, const kvcache::StridedSet& rows, const KvCacheView& cache) {
  require(kvcache::lie_apart(rows, kvcache::k_set(cache)) && kvcache::lie_apart(rows, kvcache::v_set(cache)), name,
          " overlaps the cache");
  if (cache.dtype != DType::kInt8) return;
  require(kvcache::lie_apart(rows, kvcache::token_scale_set("k_token_scales", cache, cache.k_token_scales)) &&
              kvcache::lie_apart(rows, kvcache::token_scale_set("v_token_scales", cache, cache.v_token_scales)),
          name, " overlaps the cache's token scales");
}

void check_gpu_cache(const char* function, const KvCacheView& cache) {
  if (cache.dtype != DType::kInt8) return;
  core::fail(ErrorCode::kUnsupported, function, " of an int8 cache on a GPU; CPU contexts take int8 caches");
}

kernels::generic::RowConversion row_conversion(DType from, KvFormat from_format, DType to, KvFormat to_format,
                                               bool bitwise) {
  if (bitwise) return kernels::generic::row_conversion(from, to, true);
  if (from_format == KvFormat::kFp8DsMla) return kernels::generic::ds_mla_decoding(to);
  if (to_format == KvFormat::kFp8DsMla) return kernels::generic::ds_mla_encoding(from);
  return kernels::generic::row_conversion(from, to, false);
}

int32_t row_elements(const KvCacheView& cache, int32_t head_dim, bool bitwise) {
  return bitwise && cache.format == KvFormat::kFp8DsMla ? kDsMlaRowBytes : head_dim;
}

void check_gpu_aligned(const char* name, const void* data, int32_t bytes) {
  require(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0, name,
          " is not aligned to its elements of ", bytes, " bytes");
}

cuda::MoveSide move_side(const KvCacheView& cache, bool is_k) {
  const KvStrides& strides = is_k ? cache.k_strides : cache.v_strides;
  cuda::MoveSide side;
  side.data = bytes_of(is_k ? cache.k : cache.v);
  side.dtype = cache.dtype;
  side.page_stride = strides.page;
  side.token_stride = strides.token;
  side.head_stride = strides.head;
  side.step = !is_k && cache.format == KvFormat::kCpuPacked ? 2 : 1;
  side.ds_mla = cache.format == KvFormat::kFp8DsMla;
  return side;
}

cuda::MoveSide move_side(const ConstTensorView& tensor) {
  cuda::MoveSide side;
  side.data = bytes_of(tensor.data);
  side.dtype = tensor.dtype;
  side.token_stride = tensor.strides[0];
  side.head_stride = tensor.strides[1];
  return side;
}

cuda::MoveHalf move_half(const cuda::MoveSide& from, const cuda::MoveSide& to, int32_t head_dim,
                         const Scale& from_scale, const Scale& to_scale, bool bitwise) {
  cuda::MoveHalf half;
  half.from = from;
  half.to = to;
  half.head_dim = head_dim;
  half.from_scale = from_scale;
  half.to_scale = to_scale;
  half.bitwise = bitwise;
  return half;
}

cuda::MoveParams move_of(const KvCacheView& cache, int32_t* status) {
  cuda::MoveParams move;
  move.num_heads = cache.num_kv_heads;
  move.page_size = cache.page_size;
  move.status = status;
  return move;
}

}  // namespace folio::inline v0::attention
