#include "attention/gpu_cache.hpp"

#include "attention/cache_args.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::attention {
namespace {

namespace cuda = kernels::cuda;

/// Data that kernels do not write is const in the views that come in, and not in MoveSide, which is both.
std::byte* bytes_of(const void* data) {
  return static_cast<std::byte*>(const_cast<void*>(data));
}

cuda::MoveHalf half_of(const cuda::MoveSide& from, const cuda::MoveSide& to, int32_t head_dim, const Scale& from_scale,
                       const Scale& to_scale, bool bitwise) {
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

}  // namespace

void check_gpu_aligned(const char* name, const void* data, int32_t bytes) {
  core::require(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0, name,
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

void gpu_write(const GpuKernels& gpu, const CacheWriteArgs& args, bool v_aliases_k, Stream stream) {
  const KvCacheView& cache = args.cache;
  check_gpu_aligned("slot_mapping", args.slot_mapping, sizeof(int64_t));
  cuda::WriteParams params;
  params.move = move_of(cache, args.status);
  params.move.halves[0] = half_of(move_side(args.k), move_side(cache, true), cache.head_dim_qk, {}, args.k_scale,
                                  args.k.dtype == cache.dtype);
  params.move.num_halves = v_aliases_k ? 1 : 2;
  if (!v_aliases_k) {
    params.move.halves[1] = half_of(move_side(args.v), move_side(cache, false), cache.head_dim_v, {}, args.v_scale,
                                    args.v.dtype == cache.dtype);
  }
  params.slots = args.slot_mapping;
  params.num_slots = args.num_slots;
  params.slot_limit = core::checked_mul(cache.num_pages, int64_t{cache.page_size});
  gpu.enqueue(params, stream);
}

void gpu_gather(const GpuKernels& gpu, const GpuGather& gather, Stream stream) {
  const KvCacheView& cache = gather.cache;
  check_gpu_aligned("kv_len", gather.kv_len.data(), sizeof(int32_t));
  check_gpu_aligned("table.indices", gather.table.indices, sizeof(int32_t));
  check_gpu_aligned("table.indptr", gather.table.indptr, sizeof(int32_t));
  cuda::GatherParams params;
  params.move = move_of(cache, gather.status);
  params.move.halves[0] = half_of(move_side(cache, true), move_side(gather.k_out), cache.head_dim_qk, gather.k_scale,
                                  {}, gather.k_out.dtype == cache.dtype);
  params.move.halves[1] = half_of(move_side(cache, false), move_side(gather.v_out), cache.head_dim_v, gather.v_scale,
                                  {}, gather.v_out.dtype == cache.dtype);
  params.table = gather.table;
  params.kv_len = gather.kv_len.data();
  params.num_rows = core::checked_cast<int32_t>(gather.kv_len.size());
  params.num_pages = cache.num_pages;
  params.num_tokens = gather.k_out.shape[0];
  gpu.enqueue(params, stream);
}

void gpu_convert_pages(const GpuKernels& gpu, const GpuConvert& convert, Stream stream) {
  const KvCacheView& from = convert.from;
  const KvCacheView& to = convert.to;
  const CacheConvertScales& scales = convert.scales;
  check_gpu_aligned("source", convert.source.data(), sizeof(int32_t));
  check_gpu_aligned("destination", convert.destination.data(), sizeof(int32_t));
  const auto bitwise = [&](const Scale& from_scale, const Scale& to_scale) {
    return from.dtype == to.dtype && same_scale(from_scale, to_scale);
  };
  cuda::PagesParams params;
  params.move = move_of(from, convert.status);
  params.move.halves[0] = half_of(move_side(from, true), move_side(to, true), from.head_dim_qk, scales.from_k,
                                  scales.to_k, bitwise(scales.from_k, scales.to_k));
  params.move.halves[1] = half_of(move_side(from, false), move_side(to, false), from.head_dim_v, scales.from_v,
                                  scales.to_v, bitwise(scales.from_v, scales.to_v));
  params.move.num_halves = kvcache::v_aliases_k(to) ? 1 : 2;
  params.source = convert.source.data();
  params.destination = convert.destination.data();
  params.num_pairs = core::checked_cast<int64_t>(convert.source.size());
  params.from_pages = from.num_pages;
  params.to_pages = to.num_pages;
  gpu.enqueue(params, stream);
}

}  // namespace folio::inline v0::attention
