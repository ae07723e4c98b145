// Ties the backends' C structures and values to the C++ ones; see the core's layout.cc.
#include <cstddef>

#include "folio/backends/common.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/c/backends.h"

namespace folio::inline v0::capi {
namespace {

// clang-format off
#define FOLIO_SAME_VALUE(c, cpp) static_assert((c) == static_cast<int64_t>(cpp))
#define FOLIO_SAME_FIELD(c, cpp, field) static_assert(offsetof(c, field) == offsetof(cpp, field) && sizeof(c::field) == sizeof(cpp::field))
#define FOLIO_SIZE(c, bytes) static_assert(sizeof(c) == (bytes) && offsetof(c, struct_size) == 0)
// clang-format on

static_assert(sizeof(folio_bidirectional_range) == sizeof(backends::BidirectionalRange));
FOLIO_SAME_FIELD(folio_bidirectional_range, backends::BidirectionalRange, request);
FOLIO_SAME_FIELD(folio_bidirectional_range, backends::BidirectionalRange, begin);
FOLIO_SAME_FIELD(folio_bidirectional_range, backends::BidirectionalRange, end);
static_assert(sizeof(folio_attention_spec) == 16 && sizeof(folio_block_table) == 24);

// The first version's sizes. A structure may only grow, and only where it starts with struct_size.
FOLIO_SIZE(folio_engine_config, 64);
FOLIO_SIZE(folio_layer_config, 160);
FOLIO_SIZE(folio_step_batch, 184);
FOLIO_SIZE(folio_forward_args, 688);
FOLIO_SIZE(folio_flashinfer_options, 48);
FOLIO_SIZE(folio_flash_attn_options, 40);
FOLIO_SIZE(folio_token_pool_config, 168);
FOLIO_SIZE(folio_radix_attention, 48);
FOLIO_SIZE(folio_forward_batch, 216);

FOLIO_SAME_VALUE(FOLIO_LAYOUT_NHD, backends::KvCacheLayout::kNhd);
FOLIO_SAME_VALUE(FOLIO_LAYOUT_HND, backends::KvCacheLayout::kHnd);
FOLIO_SAME_VALUE(FOLIO_ATTENTION_DECODER, backends::AttentionType::kDecoder);
FOLIO_SAME_VALUE(FOLIO_ATTENTION_ENCODER, backends::AttentionType::kEncoder);
FOLIO_SAME_VALUE(FOLIO_ATTENTION_ENCODER_ONLY, backends::AttentionType::kEncoderOnly);
FOLIO_SAME_VALUE(FOLIO_ATTENTION_ENCODER_DECODER, backends::AttentionType::kEncoderDecoder);
FOLIO_SAME_VALUE(FOLIO_CASCADE_OFF, backends::CascadeMode::kOff);
FOLIO_SAME_VALUE(FOLIO_CASCADE_HEURISTIC, backends::CascadeMode::kHeuristic);
FOLIO_SAME_VALUE(FOLIO_CASCADE_AUTO, backends::CascadeMode::kAuto);
FOLIO_SAME_VALUE(FOLIO_FORWARD_EXTEND, backends::ForwardMode::kExtend);
FOLIO_SAME_VALUE(FOLIO_FORWARD_DECODE, backends::ForwardMode::kDecode);
FOLIO_SAME_VALUE(FOLIO_FORWARD_MIXED, backends::ForwardMode::kMixed);
FOLIO_SAME_VALUE(FOLIO_FORWARD_IDLE, backends::ForwardMode::kIdle);
FOLIO_SAME_VALUE(FOLIO_FORWARD_TARGET_VERIFY, backends::ForwardMode::kTargetVerify);
FOLIO_SAME_VALUE(FOLIO_FORWARD_DRAFT_EXTEND, backends::ForwardMode::kDraftExtend);
FOLIO_SAME_VALUE(FOLIO_EXTEND_AUTO, backends::ExtendPath::kAuto);
FOLIO_SAME_VALUE(FOLIO_EXTEND_RAGGED, backends::ExtendPath::kRagged);
FOLIO_SAME_VALUE(FOLIO_EXTEND_PAGED, backends::ExtendPath::kPaged);
FOLIO_SAME_VALUE(FOLIO_RADIX_DECODER, backends::RadixAttentionType::kDecoder);
FOLIO_SAME_VALUE(FOLIO_RADIX_DECODER_BIDIRECTIONAL, backends::RadixAttentionType::kDecoderBidirectional);
FOLIO_SAME_VALUE(FOLIO_RADIX_ENCODER_ONLY, backends::RadixAttentionType::kEncoderOnly);

}  // namespace
}  // namespace folio::inline v0::capi
