#include "folio/backends/kv_scales.hpp"

#include <array>

namespace folio::inline v0::backends {

AttentionLayerScales calculate_kv_scales(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                                         const KvScaleConstants& constants) {
  std::array<float, 3> scales{};
  ContextOptions options;
  options.num_threads = 1;  // starts none
  calculate_kv_scales(Context::cpu(options), q, k, v, scales, constants);
  AttentionLayerScales made;
  made.q.value = scales[0];
  made.k.value = scales[1];
  made.v.value = scales[2];
  return made;
}

}  // namespace folio::inline v0::backends
