#pragma once

#include <cstdint>
#include <string_view>

#include "folio/types/dtype.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0 {

/// How a page's keys and values lie in memory.
enum class KvFormat : int32_t {
  /// Any page, token and head strides, head dimension contiguous. Covers NHD, HND, interleaved and separate K/V pools,
  /// token pools (page size 1) and V aliasing K. Every kernel reads it.
  kStrided = 0,
  /// What CPU kernels like best. Per page, head-major: K is [head][token][head_dim_qk]; V is
  /// [head][token / 2][head_dim_v][2], two neighbouring tokens side by side. Page sizes even, 16 or more; 16-bit, fp8
  /// and int8.
  kCpuPacked = 1,
  /// DeepSeek's rows of fp8 latents for MLA (V3.2; vLLM's `fp8_ds_mla`): a token has 656 bytes, folio/types/ds_mla.hpp.
  /// One KV head, head dimensions 576/512, dtype fp8_e4m3; V lies in K. Page and token strides are bytes.
  kFp8DsMla = 2,
};

/// "strided", "cpu_packed", "fp8_ds_mla"; "invalid" for any other value.
constexpr std::string_view to_string(KvFormat format) noexcept {
  switch (format) {
    case KvFormat::kStrided: return "strided";
    case KvFormat::kCpuPacked: return "cpu_packed";
    case KvFormat::kFp8DsMla: return "fp8_ds_mla";
  }
  return "invalid";
}

/// Element strides of one of the two halves of a KV cache.
struct KvStrides {
  int64_t page = 0;   ///< from a page to the next
  int64_t token = 0;  ///< from a token to the next within a page (kCpuPacked: from a token pair to the next, in V)
  int64_t head = 0;   ///< from a KV head to the next within a page
};

/// The scales of an int8 cache's keys or values, one a token and KV head: a stored component k8 of token t of page p,
/// head h is k8 * data[p * strides.page + t * strides.token + h * strides.head]. Page ids are the cache's.
struct TokenScales {
  float* data = nullptr;
  KvStrides strides;  ///< elements; not negative
};

/// A borrowed paged KV cache of one layer. Token t of page p, head h, component d of K lies at
/// k + p*k_strides.page + t*k_strides.token + h*k_strides.head + d (elements; 64-bit arithmetic); V likewise, but in
/// the packed format V's element is v + p*page + (t/2)*token + h*head + 2*d + t%2. `v` may point into `k` (V aliasing
/// K). In kFp8DsMla the token's row begins there, v is k and the strides are equal. The makers in folio/kv_cache.hpp
/// fill the strides. Attention only reads through it; cache writes write.
struct KvCacheView {
  KvFormat format = KvFormat::kStrided;
  DType dtype = DType::kUnset;
  void* k = nullptr;
  void* v = nullptr;
  int64_t num_pages = 0;
  int32_t page_size = 0;  ///< tokens per page
  int32_t num_kv_heads = 0;
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  KvStrides k_strides;
  KvStrides v_strides;
  /// int8 caches alone, which need both. Scales lie apart from each other, from k and from v, within the same memory or
  /// not; where V aliases K, both are the same array.
  TokenScales k_token_scales;
  TokenScales v_token_scales;
};

/// Keys and values that do not lie in pages: [tokens, num_kv_heads, head_dim], innermost contiguous, tokens of row r
/// being [indptr[r], indptr[r + 1]). Rows are requests, or the groups of a shared segment.
struct RaggedKvView {
  ConstTensorView k;
  ConstTensorView v;
  const int32_t* indptr = nullptr;  ///< [num_rows + 1], non-decreasing, indptr[0] >= 0
};

enum class PageTableKind : int32_t { kCsr = 0, kDense = 1 };

/// Which pages a row's tokens lie in, in order. Page ids are in [0, cache.num_pages). Entries beyond a row's length are
/// never read. Rows are requests, or the groups of a shared segment. Fields of the other kind stay at their defaults.
struct PageTableView {
  PageTableKind kind = PageTableKind::kCsr;
  const int32_t* indices = nullptr;  ///< CSR: [num_indices]; dense: [num_rows, row_stride]
  int64_t num_indices = 0;           ///< CSR: entries in `indices`; dense: entries addressable from `indices`
  const int32_t* indptr = nullptr;   ///< CSR: [num_rows + 1], offsets into `indices` (absolute; need not start at 0)
  int64_t row_stride = 0;            ///< dense: entries from a row to the next
  int32_t first_column = 0;          ///< dense: page j of row r is indices[r * row_stride + first_column + j]
  int32_t num_rows = 0;
};

/// How a scale array is indexed; see Scale.
enum class ScaleGranularity : int32_t {
  kPerTensor = 0,          ///< data[0]
  kPerHead = 1,            ///< data[kv_head]
  kPerRequest = 2,         ///< data[request]
  kPerRequestAndHead = 3,  ///< data[request * request_stride + kv_head]; request_stride 0 broadcasts over requests
};

/// A quantisation scale: stored values times the scale are the real ones. Without `data` it is `value` for everything;
/// with `data` it is that array (on the context's device, read when the kernel runs) and `value` must be left at 1.
struct Scale {
  float value = 1.0f;
  const float* data = nullptr;
  ScaleGranularity granularity = ScaleGranularity::kPerTensor;
  int64_t request_stride = 0;  ///< kPerRequestAndHead only, >= 0
};

}  // namespace folio::inline v0
