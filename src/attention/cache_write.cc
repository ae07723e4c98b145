#include <algorithm>
#include <vector>

#include "attention/cache_args.hpp"
#include "attention/split_work.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/kv_cache.hpp"

namespace folio::inline v0 {
namespace {

using core::require;
namespace cuda = kernels::cuda;
namespace generic = kernels::generic;

constexpr int64_t kMinSlotsPerGroup = 64;

/// fp8 input is taken as it is, by the same fp8 type only: requantising it would need the scale it was made with.
bool is_copy(DType input, const KvCacheView& cache) {
  return input == cache.dtype && !attention::has_own_scales(cache);
}

void check_input(const char* name, const ConstTensorView& input, const CacheWriteArgs& args, int64_t dim,
                 const Scale& scale, const char* scale_name, bool readable) {
  const KvCacheView& cache = args.cache;
  attention::check_tensor(name, input, cache.num_kv_heads, dim);
  require(!is_fp8(input.dtype) || is_copy(input.dtype, cache), name, " is ", to_string(input.dtype), ", the cache ",
          to_string(cache.dtype), " in format ", to_string(cache.format),
          "; fp8 input is copied into a strided or packed cache of the same type only");
  require(input.shape[0] >= args.num_slots, name, " has ", input.shape[0], " tokens for ", args.num_slots, " slots");
  require(input.data != nullptr || args.num_slots == 0, name, ".data is null");
  const bool own = attention::has_own_scales(cache);
  const char* why_not = own                   ? attention::own_scales_reason(cache)
                        : is_fp8(cache.dtype) ? "fp8 input is copied as it is"
                                              : "the cache is not fp8";
  attention::check_scale(scale_name, scale, is_fp8(cache.dtype) && !own && !is_copy(input.dtype, cache), why_not,
                         cache.num_kv_heads, -1, readable);
  const kvcache::StridedSet rows = kvcache::rows_set(name, input, args.num_slots);
  attention::check_apart(name, rows, cache);
}

void check_aliased_v(const CacheWriteArgs& args) {
  require(args.v.data == nullptr, "v is given, but the cache's V is a part of its K; pass v with a null data pointer");
  require(attention::is_default(args.v_scale) || attention::same_scale(args.v_scale, args.k_scale),
          "v_scale differs from k_scale, but the cache's V is a part of its K; leave it at its default");
}

void check_slot_values(const int64_t* slots, const CacheWriteArgs& args) {
  const int64_t limit = core::checked_mul(args.cache.num_pages, int64_t{args.cache.page_size});
  for (int64_t token = 0; token < args.num_slots; ++token) {
    require(slots[token] < limit, "slot_mapping[", token, "] is ", slots[token], "; the cache has ", limit, " slots (",
            args.cache.num_pages, " pages of ", args.cache.page_size, ")");
  }
}

/// ContextOptions::validate_tables of a GPU's write without a status. A captured one cannot be looked at.
void check_device_slots(const attention::GpuBackend& gpu, const CacheWriteArgs& args, Stream stream) {
  if (gpu.is_capturing(stream)) return;
  std::vector<int64_t> slots(static_cast<size_t>(args.num_slots));
  gpu.download(slots.data(), args.slot_mapping, slots.size() * sizeof(int64_t), stream);
  check_slot_values(slots.data(), args);
}

void check_slots(const CacheWriteArgs& args, bool readable) {
  require(args.num_slots >= 0, "num_slots is ", args.num_slots, "; it must not be negative");
  require(args.slot_mapping != nullptr || args.num_slots == 0, "slot_mapping is null");
  attention::check_status(args.status, !readable);
  if (readable) check_slot_values(args.slot_mapping, args);
}

generic::WriteHalf write_half(const ConstTensorView& input, const KvCacheView& cache, const kvcache::CacheHalf& half,
                              int64_t dim, const Scale& scale) {
  return {attention::tensor_rows<const std::byte>(input), half, dim,
          attention::row_conversion(input.dtype, KvFormat::kStrided, cache.dtype, cache.format,
                                    is_copy(input.dtype, cache)),
          generic::scale_table(scale)};
}

void gpu_write(const attention::GpuBackend& gpu, const CacheWriteArgs& args, bool v_aliases_k, Stream stream) {
  const KvCacheView& cache = args.cache;
  attention::check_gpu_aligned("slot_mapping", args.slot_mapping, sizeof(int64_t));
  cuda::WriteParams params;
  params.move = attention::move_of(cache, args.status);
  params.move.halves[0] = attention::move_half(attention::move_side(args.k), attention::move_side(cache, true),
                                               cache.head_dim_qk, {}, args.k_scale, is_copy(args.k.dtype, cache));
  params.move.num_halves = v_aliases_k ? 1 : 2;
  if (!v_aliases_k) {
    params.move.halves[1] = attention::move_half(attention::move_side(args.v), attention::move_side(cache, false),
                                                 cache.head_dim_v, {}, args.v_scale, is_copy(args.v.dtype, cache));
  }
  params.slots = args.slot_mapping;
  params.num_slots = args.num_slots;
  params.slot_limit = core::checked_mul(cache.num_pages, int64_t{cache.page_size});
  gpu.enqueue(params, stream);
}

}  // namespace

void write_kv_cache(const Context& context, const CacheWriteArgs& args, Stream stream) {
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) attention::check_device("write_kv_cache", context, stream);
  const KvCacheView& cache = args.cache;
  validate(cache);
  if (gpu != nullptr) attention::check_gpu_cache("write_kv_cache", cache);
  check_slots(args, gpu == nullptr);
  const bool aliased = kvcache::v_aliases_k(cache);
  check_input("k", args.k, args, cache.head_dim_qk, args.k_scale, "k_scale", gpu == nullptr);
  if (aliased) {
    check_aliased_v(args);
  } else {
    check_input("v", args.v, args, cache.head_dim_v, args.v_scale, "v_scale", gpu == nullptr);
  }
  if (args.num_slots == 0) return;
  if (gpu != nullptr) {
    if (context.state().validate_tables && args.status == nullptr) check_device_slots(*gpu, args, stream);
    gpu_write(*gpu, args, aliased, stream);
    return;
  }

  generic::WriteParams params;
  params.k = write_half(args.k, cache, kvcache::k_half(cache), cache.head_dim_qk, args.k_scale);
  if (!aliased) params.v = write_half(args.v, cache, kvcache::v_half(cache), cache.head_dim_v, args.v_scale);
  params.has_v = !aliased;
  params.slots = args.slot_mapping;
  params.num_slots = args.num_slots;
  params.page_size = cache.page_size;

  // By slots where there are many: heads of one token lie side by side in the input, and walking it once per head is
  // two to three times slower. Every group reads the whole slot mapping, and hashing fills groups of few slots
  // unevenly.
  const double token_bytes = static_cast<double>(cache.num_kv_heads) *
                             (static_cast<double>(cache.head_dim_qk) + cache.head_dim_v) *
                             (size_of(args.k.dtype) + size_of(cache.dtype));
  const int64_t ranges = attention::wanted_ranges(context, static_cast<double>(args.num_slots) * token_bytes);
  params.num_groups = std::clamp<int64_t>(args.num_slots / kMinSlotsPerGroup, 1, ranges);
  const int64_t head_ranges = std::min<int64_t>(core::ceil_div(ranges, params.num_groups), cache.num_kv_heads);
  attention::for_ranges(context, head_ranges * params.num_groups, head_ranges * params.num_groups,
                        [&](int64_t begin, int64_t end) noexcept {
                          for (int64_t range = begin; range < end; ++range) {
                            const int64_t head_range = range % head_ranges;
                            generic::write_slots(params, range / head_ranges,
                                                 cache.num_kv_heads * head_range / head_ranges,
                                                 cache.num_kv_heads * (head_range + 1) / head_ranges);
                          }
                        });
}

}  // namespace folio::inline v0
