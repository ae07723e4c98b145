#include "emulated_prefill.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

template void launch_prefill<__half, 128, 128, Fp8::kE4M3>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__half, 128, 128, Fp8::kE5M2>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__half, 128, 128, Fp8::kE4M3, true>(const AttentionParams&, Variant, int32_t, Stream);

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
