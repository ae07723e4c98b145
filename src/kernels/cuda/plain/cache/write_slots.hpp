#pragma once

#include <cstdint>

#include "folio/types/device.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/kv_cache.hpp"

/// The cache write on a GPU. All addresses are the device's.
namespace folio::inline v0::kernels::cuda::plain {

/// The K or the V half of a write. Strides are in elements.
struct WriteHalf {
  const void* input = nullptr;
  DType input_dtype = DType::kUnset;
  int64_t input_token_stride = 0;
  int64_t input_head_stride = 0;
  void* cache = nullptr;
  KvStrides strides;
  int32_t head_dim = 0;
  Scale scale;              ///< fp8 caches: stored = input / scale; per tensor or per head
  int32_t piece_bytes = 1;  ///< set by write_slots: copies move pieces of so many bytes
};

struct WriteParams {
  WriteHalf k;
  WriteHalf v;
  bool has_v = true;  ///< false: V aliases K
  DType cache_dtype = DType::kUnset;
  const int64_t* slots = nullptr;  ///< [num_slots]; those below 0 or not below limit are skipped
  int64_t num_slots = 0;
  int64_t slot_limit = 0;
  int32_t page_size = 1;
  int32_t num_kv_heads = 0;
};

/// Enqueues the write. Throws Error(kDeviceError) where the launch fails.
void write_slots(const WriteParams& params, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::plain
