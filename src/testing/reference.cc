#include "folio/reference.hpp"

#include "testing/reference_attention.hpp"

namespace folio::inline v0::verify {

double reference_row(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args, int32_t token,
                     int32_t q_head, std::span<double> out) {
  return kernels::reference_row(config, batch, args, token, q_head, out);
}

}  // namespace folio::inline v0::verify
