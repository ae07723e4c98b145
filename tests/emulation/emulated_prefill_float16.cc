#include "emulated_prefill.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

void launch_float16_64_64(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 64, 64>(params, variant, num_workers);
}
void launch_float16_96_96(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 96, 96>(params, variant, num_workers);
}
void launch_float16_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 128, 128>(params, variant, num_workers);
}
void launch_float16_192_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 192, 128>(params, variant, num_workers);
}
void launch_float16_256_256(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 256, 256>(params, variant, num_workers);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
