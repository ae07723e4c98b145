#include "attention/cache_args.hpp"
#include "attention/split_work.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0 {
namespace {

using core::require;
namespace cuda = kernels::cuda;
namespace generic = kernels::generic;

/// fp8 output gets the cache's values as they are.
bool is_copy(const TensorView& out, const KvCacheView& cache) {
  return out.dtype == cache.dtype && !attention::has_own_scales(cache);
}

void check_output(const char* name, const TensorView& out, const KvCacheView& cache, int64_t dim, int64_t tokens,
                  const Scale& scale, const char* scale_name, int64_t num_rows, bool readable) {
  attention::check_tensor(name, out, cache.num_kv_heads, dim);
  require(out.shape[0] == tokens, name, " has ", out.shape[0], " tokens; the rows have ", tokens);
  require(out.data != nullptr || tokens == 0, name, ".data is null");
  require(!is_fp8(out.dtype) || is_copy(out, cache), name, " is ", to_string(out.dtype), ", the cache ",
          to_string(cache.dtype), " in format ", to_string(cache.format),
          "; fp8 is gathered from a strided or packed cache of the same type only");
  const bool own = attention::has_own_scales(cache);
  const char* why_not = own                   ? attention::own_scales_reason(cache)
                        : is_fp8(cache.dtype) ? "fp8 output is copied as it is"
                                              : "the cache is not fp8";
  attention::check_scale(scale_name, scale, is_fp8(cache.dtype) && !own && out.dtype != cache.dtype, why_not,
                         cache.num_kv_heads, num_rows, readable);
  const kvcache::StridedSet rows = kvcache::rows_set(name, out, tokens);
  require(rows.distinct, name, "'s rows overlap: token stride ", out.strides[0], ", head stride ", out.strides[1]);
  attention::check_apart(name, rows, cache);
}

generic::GatherHalf gather_half(const KvCacheView& cache, const kvcache::CacheHalf& half, const TensorView& out,
                                int64_t dim, const Scale& scale) {
  return {half, attention::tensor_rows<std::byte>(out), dim,
          attention::row_conversion(cache.dtype, cache.format, out.dtype, KvFormat::kStrided, is_copy(out, cache)),
          generic::scale_table(scale)};
}

void gpu_gather(const attention::GpuBackend& gpu, const KvCacheView& cache, const PageTableView& table,
                std::span<const int32_t> kv_len, const TensorView& k_out, const TensorView& v_out, const Scale& k_scale,
                const Scale& v_scale, Stream stream, int32_t* status) {
  attention::check_gpu_aligned("kv_len", kv_len.data(), sizeof(int32_t));
  attention::check_gpu_aligned("table.indices", table.indices, sizeof(int32_t));
  attention::check_gpu_aligned("table.indptr", table.indptr, sizeof(int32_t));
  cuda::GatherParams params;
  params.move = attention::move_of(cache, status);
  params.move.halves[0] = attention::move_half(attention::move_side(cache, true), attention::move_side(k_out),
                                               cache.head_dim_qk, k_scale, {}, is_copy(k_out, cache));
  params.move.halves[1] = attention::move_half(attention::move_side(cache, false), attention::move_side(v_out),
                                               cache.head_dim_v, v_scale, {}, is_copy(v_out, cache));
  params.table = table;
  params.kv_len = kv_len.data();
  params.num_rows = core::checked_cast<int32_t>(kv_len.size());
  params.num_pages = cache.num_pages;
  params.num_tokens = k_out.shape[0];
  gpu.enqueue(params, stream);
}

}  // namespace

void gather_kv(const Context& context, const KvCacheView& cache, const PageTableView& table,
               std::span<const int32_t> kv_len, TensorView k_out, TensorView v_out, const Scale& k_scale,
               const Scale& v_scale, Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) attention::check_device("gather_kv", context, stream);
  attention::check_status(status, gpu != nullptr);
  validate(cache);
  if (gpu != nullptr) attention::check_gpu_cache("gather_kv", cache);
  const auto num_rows = static_cast<int64_t>(kv_len.size());
  const bool readable = gpu == nullptr;
  int64_t tokens = 0;
  if (readable) {
    validate(table, kv_len, cache.page_size, cache.num_pages);
    for (const int32_t length : kv_len) tokens += length;
  } else {
    kvcache::check_table(table, num_rows);
    tokens = k_out.shape[0];
  }
  check_output("k_out", k_out, cache, cache.head_dim_qk, tokens, k_scale, "k_scale", num_rows, readable);
  check_output("v_out", v_out, cache, cache.head_dim_v, tokens, v_scale, "v_scale", num_rows, readable);
  require(kvcache::lie_apart(kvcache::rows_set("k_out", k_out, tokens), kvcache::rows_set("v_out", v_out, tokens)),
          "k_out and v_out overlap");
  if (gpu != nullptr) {
    gpu_gather(*gpu, cache, table, kv_len, k_out, v_out, k_scale, v_scale, stream, status);
    return;
  }

  generic::GatherParams params;
  params.k = gather_half(cache, kvcache::k_half(cache), k_out, cache.head_dim_qk, k_scale);
  params.v = gather_half(cache, kvcache::v_half(cache), v_out, cache.head_dim_v, v_scale);
  params.table = table;
  params.kv_len = kv_len.data();
  params.num_rows = num_rows;
  params.page_size = cache.page_size;
  params.num_heads = cache.num_kv_heads;
  const double token_bytes = static_cast<double>(cache.num_kv_heads) *
                             (static_cast<double>(cache.head_dim_qk) + cache.head_dim_v) *
                             (size_of(cache.dtype) + size_of(k_out.dtype));
  attention::for_ranges(context, tokens, attention::wanted_ranges(context, static_cast<double>(tokens) * token_bytes),
                        [&](int64_t begin, int64_t end) noexcept { generic::gather_tokens(params, begin, end); });
}

}  // namespace folio::inline v0
