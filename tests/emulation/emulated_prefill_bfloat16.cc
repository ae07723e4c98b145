#include "emulated_prefill.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

template void launch_prefill<__nv_bfloat16, 64, 64>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__nv_bfloat16, 96, 96>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__nv_bfloat16, 128, 128>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__nv_bfloat16, 192, 128>(const AttentionParams&, Variant, int32_t, Stream);
template void launch_prefill<__nv_bfloat16, 256, 256>(const AttentionParams&, Variant, int32_t, Stream);

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
