#include "testing/factors.hpp"

#include <iterator>

#include "folio/types/ds_mla.hpp"

namespace folio::inline v0::verify {
namespace {

using std::string_view;

constexpr DtypeLevel kDtypeLevels[] = {
    {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16},
    {DType::kFloat32, DType::kFloat32, DType::kFloat32},
    {DType::kFloat16, DType::kFloat16, DType::kFloat16},
    {DType::kBFloat16, DType::kFloat8E4M3, DType::kBFloat16},
    {DType::kFloat16, DType::kFloat8E5M2, DType::kFloat16},
    {DType::kFloat8E4M3, DType::kFloat8E4M3, DType::kBFloat16},
    {DType::kFloat8E4M3, DType::kFloat8E4M3, DType::kFloat8E4M3},
    {DType::kBFloat16, DType::kBFloat16, DType::kFloat32},
    {DType::kFloat32, DType::kBFloat16, DType::kFloat8E5M2},
    {DType::kFloat16, DType::kFloat32, DType::kBFloat16},
    {DType::kFloat8E4M3, DType::kFloat16, DType::kFloat16},
    {DType::kFloat8E4M3, DType::kFloat8E4M3, DType::kFloat4E2M1x2},
    {DType::kBFloat16, DType::kInt8, DType::kBFloat16},
    {DType::kFloat32, DType::kInt8, DType::kFloat32},
    {DType::kFloat16, DType::kInt8, DType::kFloat8E5M2},
};
constexpr string_view kDtypeNames[] = {"bf16/bf16/bf16", "f32/f32/f32",    "f16/f16/f16",    "bf16/e4m3/bf16",
                                       "f16/e5m2/f16",   "e4m3/e4m3/bf16", "e4m3/e4m3/e4m3", "bf16/bf16/f32",
                                       "f32/bf16/e5m2",  "f16/f32/bf16",   "e4m3/f16/f16",   "e4m3/e4m3/nvfp4",
                                       "bf16/int8/bf16", "f32/int8/f32",   "f16/int8/e5m2"};
static_assert(std::size(kDtypeLevels) == std::size(kDtypeNames));

constexpr HeadDimLevel kHeadDimLevels[] = {{64, 64}, {128, 128}, {80, 80}, {192, 128}, {256, 256},
                                           {8, 8},   {576, 512}, {40, 72}, {512, 512}};
constexpr string_view kHeadDimNames[] = {"64/64", "128/128", "80/80", "192/128", "256/256",
                                         "8/8",   "576/512", "40/72", "512/512"};
static_assert(std::size(kHeadDimLevels) == std::size(kHeadDimNames));

constexpr int32_t kGroupLevels[] = {1, 3, 4, 7, 8, 16};
constexpr string_view kGroupNames[] = {"1", "3", "4", "7", "8", "16"};
constexpr int32_t kPageLevels[] = {16, 1, 8, 32, 64};
constexpr string_view kPageNames[] = {"16", "1", "8", "32", "64"};
constexpr int32_t kWorkerLevels[] = {0, 1, 5, 13};
constexpr string_view kWorkerNames[] = {"executor", "1", "5", "13"};

constexpr string_view kFormatNames[] = {"nhd",   "hnd",    "interleaved", "concatenated", "padded",
                                        "alias", "packed", "far",         "ds-mla"};
constexpr string_view kMaskNames[] = {"causal", "none", "custom-all", "custom-tail"};
constexpr string_view kWindowNames[] = {"none", "left", "both", "wide"};
constexpr string_view kSwitchNames[] = {"off", "on"};
constexpr string_view kSegmentNames[] = {"paged",  "ragged", "prefix+new", "cascade1",  "cascade2",
                                         "shard1", "shard2", "shardpage",  "truncated", "cross"};
constexpr string_view kQueryNames[] = {"decode", "prefill", "mixed", "verify"};
constexpr string_view kLengthNames[] = {"edges", "medium", "long", "skewed", "empty"};
constexpr string_view kScaleNames[] = {"none", "host", "tensor", "head", "request", "request+head"};
constexpr string_view kLseNames[] = {"e", "none", "2", "strided"};
constexpr string_view kTableNames[] = {"csr", "dense"};
constexpr string_view kDeterminismNames[] = {"run", "none", "batch", "schedule"};
constexpr Determinism kDeterminismLevels[] = {Determinism::kRunToRun, Determinism::kNone, Determinism::kBatchInvariant,
                                              Determinism::kScheduleInvariant};
constexpr string_view kExecutorNames[] = {"pool", "sequential", "shuffled"};

constexpr string_view kFp8ProductsNames[] = {"refused", "allowed"};

constexpr string_view kSpanNames[] = {"off", "clamped", "beyond"};

constexpr FactorInfo kFactors[] = {
    {"dtypes", kDtypeNames},    {"dims", kHeadDimNames},      {"group", kGroupNames},
    {"page", kPageNames},       {"format", kFormatNames},     {"mask", kMaskNames},
    {"window", kWindowNames},   {"cap", kSwitchNames},        {"alibi", kSwitchNames},
    {"sinks", kSwitchNames},    {"rope", kSwitchNames},       {"segments", kSegmentNames},
    {"queries", kQueryNames},   {"lengths", kLengthNames},    {"scales", kScaleNames},
    {"lse", kLseNames},         {"table", kTableNames},       {"determinism", kDeterminismNames},
    {"workers", kWorkerNames},  {"executor", kExecutorNames}, {"fp8-products", kFp8ProductsNames},
    {"spans", kSpanNames},      {"chunks", kSwitchNames},     {"request-causal", kSwitchNames},
    {"kv-start", kSwitchNames},
};
static_assert(std::size(kFactors) == kNumFactors);

template <typename... Levels>
constexpr uint32_t set_of(Levels... levels) {
  return ((1u << static_cast<uint32_t>(levels)) | ...);
}
constexpr uint32_t kAllButFirst = ~1u;

// Levels of kDtypes with float32 KV, of kPageSize below the packed format's least, of kHeadDims with V wider than K.
constexpr uint32_t kFloat32Kv = set_of(1, 9);
constexpr uint32_t kSmallPages = set_of(1, 2);
constexpr uint32_t kWiderV = set_of(7);
constexpr uint32_t kNvfp4Out = set_of(11);
constexpr uint32_t kNoWholeBlocks = set_of(5, 7);  // head_dim_v is no multiple of 16

constexpr Conflict kConflicts[] = {
    {kFormat, set_of(FormatLevel::kPacked), kDtypes, kFloat32Kv, "packed pages hold 16-bit, fp8 and int8 values"},
    {kFormat, set_of(FormatLevel::kPacked), kPageSize, kSmallPages, "packed pages have 16 tokens or more"},
    {kDtypes, kNvfp4Out, kHeadDims, kNoWholeBlocks, "an NVFP4 output has blocks of 16 values"},
    {kFormat, set_of(FormatLevel::kAlias), kHeadDims, kWiderV, "V inside K is no wider than K"},
    {kFormat, set_of(FormatLevel::kDsMla), kHeadDims, kAllButFirst, "rows of fp8_ds_mla are 576/512"},
    {kSegments, set_of(SegmentsLevel::kRagged), kFormat, kAllButFirst, "ragged tensors have no page format"},
    {kSegments, set_of(SegmentsLevel::kRagged), kPageSize, kAllButFirst, "ragged tensors have no pages"},
    {kSegments, set_of(SegmentsLevel::kRagged), kTable, kAllButFirst, "ragged tensors have no table"},
    {kSegments, set_of(SegmentsLevel::kRagged), kDtypes, set_of(3, 4, 12, 13, 14),
     "ragged tensors have q's dtype beside an fp8 or int8 cache"},
    {kSpans, kAllButFirst, kMask, kAllButFirst, "spans show what a causal mask hides"},
    {kRequestCausal, kAllButFirst, kMask, kAllButFirst, "flags of requests lift a causal mask"},
};

}  // namespace

std::span<const FactorInfo> factors() {
  return kFactors;
}

DtypeLevel dtypes_of(const ConformanceCase& c) {
  DtypeLevel dtypes = kDtypeLevels[c.levels[kDtypes]];
  if (level<FormatLevel>(c, kFormat) == FormatLevel::kDsMla) dtypes.kv = DType::kFloat8E4M3;
  return dtypes;
}
HeadDimLevel head_dims_of(const ConformanceCase& c) {
  if (level<FormatLevel>(c, kFormat) == FormatLevel::kDsMla) return {kDsMlaHeadDimQk, kDsMlaLatentDim};
  return kHeadDimLevels[c.levels[kHeadDims]];
}
int32_t group_size_of(const ConformanceCase& c) {
  return kGroupLevels[c.levels[kGroup]];
}
int32_t page_size_of(const ConformanceCase& c) {
  return kPageLevels[c.levels[kPageSize]];
}
int32_t num_workers_of(const ConformanceCase& c) {
  return kWorkerLevels[c.levels[kWorkers]];
}

bool is_sharded(SegmentsLevel segments) {
  return segments == SegmentsLevel::kShard1 || segments == SegmentsLevel::kShard2 ||
         segments == SegmentsLevel::kShardPage;
}

std::span<const Conflict> conflicts() {
  return kConflicts;
}

std::string invalid_reason(const ConformanceCase& c) {
  for (int32_t i = 0; i < kNumFactors; ++i) {
    const FactorInfo& factor = kFactors[i];
    if (c.levels[static_cast<size_t>(i)] >= factor.levels.size()) {
      return std::string(factor.name) + " has no level " + std::to_string(c.levels[static_cast<size_t>(i)]);
    }
  }
  for (const Conflict& conflict : kConflicts) {
    if ((conflict.a_levels >> c.levels[conflict.a] & 1u) == 0 || (conflict.b_levels >> c.levels[conflict.b] & 1u) == 0)
      continue;
    const auto named = [&](Factor factor) {
      return std::string(kFactors[factor].name) + "=" + std::string(kFactors[factor].levels[c.levels[factor]]);
    };
    return named(conflict.a) + " does not go with " + named(conflict.b) + ": " + conflict.why;
  }
  return {};
}

ConformanceCase with_fp8_mma(ConformanceCase c) {
  constexpr uint8_t kAllE4M3[] = {5, 6};  // outputs are bfloat16, e4m3
  if (c.levels[kDtypes] != kAllE4M3[1]) c.levels[kDtypes] = kAllE4M3[c.seed % 2];
  c.levels[kHeadDims] = 1;
  if (level<FormatLevel>(c, kFormat) == FormatLevel::kDsMla) c.levels[kFormat] = 0;
  if (level<MaskLevel>(c, kMask) >= MaskLevel::kCustomAll) c.levels[kMask] = 0;
  for (const Factor factor : {kSoftCap, kAlibi, kRope}) c.levels[factor] = 0;
  c.levels[kFp8Products] = 1;
  return c;
}

AttentionConfig kernel_question(const ConformanceCase& c) {
  AttentionConfig config;
  const DtypeLevel dtypes = dtypes_of(c);
  const HeadDimLevel dims = head_dims_of(c);
  config.num_kv_heads = 1;
  config.num_q_heads = group_size_of(c);
  config.head_dim_qk = dims.qk;
  config.head_dim_v = dims.v;
  config.q = dtypes.q;
  config.kv = dtypes.kv;
  config.out = dtypes.out;
  switch (level<FormatLevel>(c, kFormat)) {
    case FormatLevel::kPacked: config.kv_format = KvFormat::kCpuPacked; break;
    case FormatLevel::kDsMla: config.kv_format = KvFormat::kFp8DsMla; break;
    default: config.kv_format = KvFormat::kStrided; break;
  }
  config.page_size = page_size_of(c);
  switch (level<MaskLevel>(c, kMask)) {
    case MaskLevel::kCausal: config.mask = MaskKind::kCausal; break;
    case MaskLevel::kNone: config.mask = MaskKind::kNone; break;
    case MaskLevel::kCustomAll:
    case MaskLevel::kCustomTail: config.mask = MaskKind::kCustom; break;
  }
  const auto window = level<WindowLevel>(c, kWindow);
  if (window != WindowLevel::kNone) config.window_left = 1;
  if (window == WindowLevel::kBoth || window == WindowLevel::kWide) config.window_right = 1;
  if (is_on(c, kSoftCap)) config.features = config.features | Feature::kSoftCap;
  if (is_on(c, kAlibi)) config.features = config.features | Feature::kAlibi;
  if (is_on(c, kSinks)) config.features = config.features | Feature::kSinks;
  if (is_on(c, kRope)) config.features = config.features | Feature::kRopeLlama;
  const auto spans = level<SpansLevel>(c, kSpans);
  if (spans != SpansLevel::kOff) config.features = config.features | Feature::kSpans;
  if (spans == SpansLevel::kBeyond) config.span_window_left = -1;
  if (is_on(c, kChunks)) config.attention_chunk = 1;
  if (is_on(c, kRequestCausal)) config.features = config.features | Feature::kRequestCausal;
  if (is_on(c, kKvStart)) config.features = config.features | Feature::kKvStart;
  config.determinism = kDeterminismLevels[c.levels[kDeterminism]];
  return config;
}

}  // namespace folio::inline v0::verify
