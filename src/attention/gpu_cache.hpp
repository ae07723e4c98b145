#pragma once

#include "attention/gpu_kernels.hpp"
#include "folio/kv_cache.hpp"

/// The cache functions on a GPU, arguments checked before.
namespace folio::inline v0::attention {

void gpu_write(const GpuKernels& gpu, const CacheWriteArgs& args, bool v_aliases_k, Stream stream);

struct GpuGather {
  const KvCacheView& cache;
  const PageTableView& table;
  std::span<const int32_t> kv_len;
  const TensorView& k_out;
  const TensorView& v_out;
  const Scale& k_scale;
  const Scale& v_scale;
  int32_t* status;
};
void gpu_gather(const GpuKernels& gpu, const GpuGather& gather, Stream stream);

struct GpuConvert {
  const KvCacheView& from;
  const KvCacheView& to;
  std::span<const int32_t> source;
  std::span<const int32_t> destination;
  const CacheConvertScales& scales;
  int32_t* status;
};
void gpu_convert_pages(const GpuKernels& gpu, const GpuConvert& convert, Stream stream);

/// One half of a move between two caches, or a cache and a tensor.
kernels::cuda::MoveSide move_side(const KvCacheView& cache, bool is_k);
kernels::cuda::MoveSide move_side(const ConstTensorView& tensor);

/// A misaligned address is an error that takes the whole CUDA context with it; so all are looked at.
void check_gpu_aligned(const char* name, const void* data, int32_t bytes);

}  // namespace folio::inline v0::attention
