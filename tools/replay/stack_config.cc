#include "replay/stack_config.hpp"

namespace folio::replay {

std::string_view to_string(KvLayout layout) {
  switch (layout) {
    case KvLayout::kRecommended: return "recommended";
    case KvLayout::kStridedNhd: return "strided-nhd";
    case KvLayout::kStridedHnd: return "strided-hnd";
    case KvLayout::kCpuPacked: return "cpu-packed";
  }
  return "invalid";
}

std::string_view to_string(ServingBackend backend) {
  switch (backend) {
    case ServingBackend::kNone: return "none";
    case ServingBackend::kFlashInfer: return "flashinfer";
    case ServingBackend::kFlashAttention: return "flash_attn";
    case ServingBackend::kTokenPool: return "token_pool";
  }
  return "invalid";
}

KvFormat choose_format(KvLayout layout, const AttentionConfig& config, const Context& context, const WorkloadMix& mix) {
  constexpr int32_t kLeastPackedPage = 16;  // as KvFormat::kCpuPacked says
  switch (layout) {
    case KvLayout::kRecommended: {
      const KvFormat advice = recommended_kv_format(config, context, mix).format;
      const bool fits =
          advice != KvFormat::kCpuPacked || (config.page_size >= kLeastPackedPage && config.page_size % 2 == 0);
      return fits ? advice : KvFormat::kStrided;
    }
    case KvLayout::kCpuPacked: return KvFormat::kCpuPacked;
    case KvLayout::kStridedNhd:
    case KvLayout::kStridedHnd: break;
  }
  return KvFormat::kStrided;
}

}  // namespace folio::replay
