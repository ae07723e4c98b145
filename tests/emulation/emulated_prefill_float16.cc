#include "emulated_prefill.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

template void launch_prefill<__half, 64, 64>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__half, 96, 96>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__half, 128, 128>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__half, 192, 128>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__half, 256, 256>(const AttentionParams&, Variant, int32_t, Stream);

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
