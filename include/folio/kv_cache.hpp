#pragma once

#include <cstdint>
#include <span>

#include "folio/context.hpp"
#include "folio/types/kv_cache.hpp"

namespace folio::inline v0 {

/// The sizes of one layer's paged KV cache.
struct KvCacheShape {
  int64_t num_pages = 0;
  int32_t page_size = 0;  ///< tokens per page
  int32_t num_kv_heads = 0;
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  DType dtype = DType::kBFloat16;
};

/// Elements of the K or the V half of such a cache, packed without gaps; 64-bit. Throws kInvalidArgument on negative
/// sizes and on overflow.
FOLIO_API int64_t k_elements(const KvCacheShape& shape);
FOLIO_API int64_t v_elements(const KvCacheShape& shape);

/// Views over packed memory that the caller owns. K and V lie apart:
/// NHD [page][token][head][dim], HND [page][head][token][dim], kCpuPacked as KvFormat says.
/// Throw kInvalidArgument for sizes that no cache has, kUnsupported for a packed format of an odd or small page.
FOLIO_API KvCacheView make_nhd_view(const KvCacheShape& shape, void* k, void* v);
FOLIO_API KvCacheView make_hnd_view(const KvCacheShape& shape, void* k, void* v);
FOLIO_API KvCacheView make_cpu_packed_view(const KvCacheShape& shape, void* k, void* v);

/// The same for int8 caches, with the scales of their tokens: NHD [page][token][head], HND and kCpuPacked
/// [page][head][token]; as many as token_scale_elements says. Throw kInvalidArgument for other dtypes.
FOLIO_API KvCacheView make_nhd_view(const KvCacheShape& shape, void* k, void* v, float* k_token_scales,
                                    float* v_token_scales);
FOLIO_API KvCacheView make_hnd_view(const KvCacheShape& shape, void* k, void* v, float* k_token_scales,
                                    float* v_token_scales);
FOLIO_API KvCacheView make_cpu_packed_view(const KvCacheShape& shape, void* k, void* v, float* k_token_scales,
                                           float* v_token_scales);

/// Scales of the K or the V half of an int8 cache, packed without gaps. Throws like k_elements.
FOLIO_API int64_t token_scale_elements(const KvCacheShape& shape);

/// A view over rows of KvFormat::kFp8DsMla, [num_pages][page_size][kDsMlaRowBytes] (folio/types/ds_mla.hpp), at an
/// address that is a multiple of 16. Throws kInvalidArgument otherwise.
FOLIO_API KvCacheView make_fp8_ds_mla_view(int64_t num_pages, int32_t page_size, void* data);

/// Checks a view on its own, O(1): sizes, dtype, strides (not negative; innermost contiguous is implied; each dimension
/// inside the stride of the next larger one, in any order), pointers (aligned to elements; null only without pages). K
/// and V must lie apart, interleaved or not, or each token's V inside the same token's K with equal strides (V aliases
/// K). int8 caches, and no others, have token scales. Throws kInvalidArgument naming the field; kUnsupported as
/// make_cpu_packed_view does.
FOLIO_API void validate(const KvCacheView& cache);

/// New tokens for a paged cache.
struct CacheWriteArgs {
  ConstTensorView k;  ///< [>= num_slots, num_kv_heads, head_dim_qk], any token stride, each head contiguous
  ConstTensorView v;  ///< [>= num_slots, num_kv_heads, head_dim_v]; float32, float16, bfloat16 or the cache's fp8 type,
                      ///< which is copied as it is: its scale must be left at 1
  const int64_t* slot_mapping =
      nullptr;            ///< [num_slots]: token i goes to page slot / page_size, offset slot % page_size
  int64_t num_slots = 0;  ///< how many tokens are written; k and v may be longer (padding)
  KvCacheView cache;
  Scale k_scale;  ///< fp8 caches: stored = saturate(round_to_nearest_even(x / scale)); per tensor or per head; finite
                  ///< and above 0. Other caches take no scale, nor do kFp8DsMla and int8 caches, which get their own
  Scale v_scale;
  int32_t* status = nullptr;  ///< GPUs only, in device memory: becomes 1 if a slot lies beyond the cache
};

/// Writes tokens into their slots. A negative slot is skipped. Slots are checked first (host): one at or beyond
/// num_pages * page_size throws kInvalidArgument and nothing is written. Of several tokens with one slot, one wins
/// whole (on a CPU the last). A cache whose V aliases K takes v with a null data pointer (K's write covers it), and
/// v_scale at its default or equal to k_scale. k and v must not overlap the cache. Nothing is allocated.
/// Into an int8 cache (CPU contexts only; others throw kUnsupported) float tokens are quantized, each token and head by
/// itself: scale = the largest finite |x| / 127, stored = x / scale rounded to the nearest even. Infinities become -127
/// and 127, NaN becomes 0; without a finite value other than 0 the scale and all components are 0.
/// On a GPU everything lies in device memory, and the call is enqueued on `stream` and may be captured. Slots are read
/// when the kernel runs: one beyond the cache is skipped like a negative one, and `status` says so. Scale arrays are
/// not checked. Slots must be distinct: of several tokens with one slot, parts of each may stay.
FOLIO_API void write_kv_cache(const Context& context, const CacheWriteArgs& args, Stream stream = {});

/// Copies whole pages within or between caches of equal sizes, format and dtype, token scales included: page source[i]
/// to page destination[i].
/// Numbers of pages and strides may differ. Destinations must be distinct and disjoint from sources of the same cache;
/// caches that share memory without being the same are refused. Checked before anything is written; O(n log n) and one
/// allocation of 4 n bytes for n pages.
/// On a GPU everything, the lists of pages included, lies in device memory; the call allocates nothing, is enqueued on
/// `stream` and may be captured. Pages are read when the kernel runs: a pair with a page out of range is left out and
/// makes `status`, if given, 1; nothing sets it back. That destinations are distinct and disjoint from sources is not
/// checked.
FOLIO_API void copy_pages(const Context& context, const KvCacheView& from, const KvCacheView& to,
                          std::span<const int32_t> source, std::span<const int32_t> destination, Stream stream = {},
                          int32_t* status = nullptr);

/// Converts pages to another format or dtype (equal sizes): page source[i] of `from` becomes page destination[i] of
/// `to`. fp8 values are multiplied by the `from` scales (per tensor or head) on reading and divided by the `to` scales
/// on writing; int8 values have their tokens' scales, which take no others, and are quantized as write_kv_cache does it
/// (int8 caches: CPU contexts and strided or packed formats only); equal dtypes with equal scales keep every bit. Page
/// ids, sharing and GPUs as in copy_pages. Where V aliases K in `to`, it must be the same part of K in `from`.
struct CacheConvertScales {
  Scale from_k, from_v, to_k, to_v;
};
FOLIO_API void convert_pages(const Context& context, const KvCacheView& from, const KvCacheView& to,
                             std::span<const int32_t> source, std::span<const int32_t> destination,
                             const CacheConvertScales& scales = {}, Stream stream = {}, int32_t* status = nullptr);

/// Gathers rows of a paged cache into dense tensors: row r's first kv_len[r] tokens, one row after the other, converted
/// to the outputs' dtype: float32, float16, bfloat16 (fp8 values times the scales, of any granularity: requests are
/// rows; int8 values times their tokens' scales, on CPU contexts only), or the cache's fp8 type, which is copied as it
/// is and takes no scale. k_out: [sum of kv_len, num_kv_heads, head_dim_qk]; v_out likewise; they must not overlap the
/// cache or each other. Page ids are checked first. On a GPU everything, `kv_len` included, lies in device memory, the
/// call is enqueued on `stream` and may be captured, and what is out of range is found when the kernel runs: tokens of
/// pages that the table or the cache does not have, and those beyond k_out, are left out; k_out may be longer than the
/// rows, and the rest of it stays as it is. Each of these makes `status`, if given, 1; nothing sets it back.
FOLIO_API void gather_kv(const Context& context, const KvCacheView& cache, const PageTableView& table,
                         std::span<const int32_t> kv_len, TensorView k_out, TensorView v_out, const Scale& k_scale = {},
                         const Scale& v_scale = {}, Stream stream = {}, int32_t* status = nullptr);

/// Pages of a cache that dequantize_pages fills: one for every page in use, and page 0, which stays unwritten. O(R).
FOLIO_API int64_t num_dequantized_pages(std::span<const int32_t> seq_lens, int32_t page_size);

/// Copies the pages of an fp8 cache that some requests use into a 16-bit cache, for kernels of others that do not read
/// fp8: every token in use becomes stored * scale, rounded to the other cache's dtype. The scales are then part of the
/// keys and values and must not be applied again.
/// - from: fp8, any strides. table: dense, a row a request (it may have more); seq_lens: [R]. Entries beyond a
/// request's
///   length are not looked at.
/// - to: float16 or bfloat16, the same sizes but for num_pages >= num_dequantized_pages.
/// - new_table: [R * columns], row-major: pages numbered from 1, request after request; 0 beyond their pages.
/// Tokens beyond a request's length are neither read nor written. O(tokens in use). Throws kInvalidArgument naming the
/// request, before anything is written.
/// On a GPU everything, lengths and tables included, lies in device memory, the call is enqueued on `stream` and may be
/// captured. Pages are looked at when the kernel runs: one that the cache does not have is not copied, one that finds
/// no room in `to` is 0 in the table, a length beyond the columns ends with them; each makes `status`, if given, 1, and
/// nothing sets it back.
FOLIO_API void dequantize_pages(const Context& context, const KvCacheView& from, const PageTableView& table,
                                int32_t columns, std::span<const int32_t> seq_lens, float k_scale, float v_scale,
                                const KvCacheView& to, std::span<int32_t> new_table, Stream stream = {},
                                int32_t* status = nullptr);

/// Puts together the keys of multi-head latent attention in host memory: k[t, h] = k_nope[t, h] followed by k_pe[t, 0],
/// the rotary part that all heads share. k [tokens, heads, nope + rope], k_nope [tokens, heads, nope], k_pe [tokens, 1,
/// rope]: one dtype of 8, 16 or 32 bits, any token and head strides, innermost contiguous; rows of k must not overlap.
/// k_nope may be the part of k where it is copied to. O(elements of k). Throws kInvalidArgument before anything is
/// written.
FOLIO_API void concat_mla_k(const TensorView& k, const ConstTensorView& k_nope, const ConstTensorView& k_pe);

/// The same on a context's device: on a GPU the memory is the device's, and the call is enqueued on `stream` and may be
/// captured. There, a k_nope that overlaps k must be the part of it where it would be copied to.
FOLIO_API void concat_mla_k(const Context& context, const TensorView& k, const ConstTensorView& k_nope,
                            const ConstTensorView& k_pe, Stream stream = {});

}  // namespace folio::inline v0
