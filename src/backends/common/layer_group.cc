#include "backends/common/layer_group.hpp"

namespace folio::inline v0::backends {

DType resolve_kv_cache_dtype(const AttentionSpec& spec, const EngineConfig& config) {
  const DType dtype = kv_cache_dtype_from_name(config.cache.cache_dtype, config.model.dtype);
  core::require(is_fp8(dtype) || dtype == config.model.dtype, "cache_dtype is ", config.cache.cache_dtype,
                "; with a model of ", config.model.dtype, " the cache is of that dtype or fp8");
  core::require(spec.dtype == dtype, "the layers' spec has dtype ", spec.dtype, "; cache_dtype ",
                config.cache.cache_dtype, " is ", dtype);
  return dtype;
}

}  // namespace folio::inline v0::backends
