#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "folio/types/device.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0 {

/// Which keys are visible to a query, before the window. Positions are global: those of the request's whole sequence.
enum class MaskKind : int32_t {
  kNone = 0,    ///< all keys
  kCausal = 1,  ///< keys at or before the query's position
  kCustom = 2,  ///< bits given per request (CustomMask); replaces causal
};

/// What must not change a result's bits. Each level contains the ones above it.
enum class Determinism : int32_t {
  kNone = 0,               ///< nothing promised
  kRunToRun = 1,           ///< same inputs, same executor concurrency: same bits
  kBatchInvariant = 2,     ///< nor the other requests of the batch, padding, concurrency or graph replay
  kScheduleInvariant = 3,  ///< nor how a request's tokens were divided over steps (chunked prefill, decode)
};

/// Features that an op must be prepared for. `run` and `plan` refuse an argument whose feature was not declared.
enum class Feature : uint32_t {
  kSoftCap = 1u << 0,        ///< logits_soft_cap
  kAlibi = 1u << 1,          ///< alibi_slopes
  kSinks = 1u << 2,          ///< sinks
  kRopeLlama = 1u << 3,      ///< in-kernel rotary embedding of q and K
  kSpans = 1u << 4,          ///< BatchView::spans; MaskKind::kCausal only
  kRequestCausal = 1u << 5,  ///< BatchView::causal; MaskKind::kCausal only
  kKvStart = 1u << 6,        ///< BatchView::kv_start
};

/// A set of Feature.
struct Features {
  uint32_t bits = 0;
  constexpr Features() = default;
  constexpr Features(Feature feature) : bits(static_cast<uint32_t>(feature)) {}  // NOLINT(google-explicit-constructor)
  constexpr bool has(Feature feature) const { return (bits & static_cast<uint32_t>(feature)) != 0; }
  friend constexpr Features operator|(Features a, Features b) {
    Features both;
    both.bits = a.bits | b.bits;
    return both;
  }
  friend bool operator==(const Features&, const Features&) = default;
};
constexpr Features operator|(Feature a, Feature b) {
  return Features(a) | Features(b);
}

/// What an attention op is prepared for: everything that picks a kernel and none of what changes per step or per layer.
struct AttentionConfig {
  int32_t num_q_heads = 0;   ///< a multiple of num_kv_heads
  int32_t num_kv_heads = 0;  ///< q head h reads KV head h / (num_q_heads / num_kv_heads)
  int32_t head_dim_qk = 0;   ///< a multiple of 8
  int32_t head_dim_v = 0;    ///< a multiple of 8; may differ from head_dim_qk
  DType q = DType::kBFloat16;
  DType kv = DType::kBFloat16;      ///< of paged segments
  DType ragged_kv = DType::kUnset;  ///< of ragged segments; kUnset = that of `kv`, or of `q` where kv is fp8, int8
  DType out = DType::kUnset;        ///< kUnset = that of `q`, or bfloat16 where q is fp8
  KvFormat kv_format = KvFormat::kStrided;
  int32_t page_size = 16;  ///< tokens per page of paged segments
  MaskKind mask = MaskKind::kCausal;
  int32_t window_left =
      -1;  ///< visible to a query at p: keys at >= p - window_left (w + 1 with its own); -1: unbounded
  /// ... and at <= p + window_right; -1: unbounded. Under kCausal it bounds what spans and requests that are not causal
  /// (BatchView) show beyond p.
  int32_t window_right = -1;
  /// Attention chunks (Llama 4): a query sees keys of its own chunk alone. Chunks have so many positions and begin at
  /// 0, or at the request's kv_start. 0: there are none.
  int32_t attention_chunk = 0;
  /// How far back a query sees its span (BatchView::spans): keys at >= p - span_window_left; -1: from the span's begin.
  /// At 0 the window clamps the span (Gemma 4); at -1 the span goes beyond it (Gemma 3).
  int32_t span_window_left = 0;
  Features features;
  Determinism determinism = Determinism::kRunToRun;
};

/// Upper bounds of every batch of an op, so that its grid and plan image can be fixed (CUDA graphs).
struct GraphBounds {
  int32_t max_requests = 0;
  int32_t max_tokens = 0;
  int32_t max_q_len = 0;
  int32_t max_kv_len = 0;
  int32_t max_shared_levels =
      0;  ///< shared segments (KvSegment::group_indptr) of a batch; counted in workspace_size(op)
};

/// The tokens of an engine's work: those of decode, where a request has one token a step, and those of prefill. Units
/// cancel: means of a request or counts of a day. Kernels and cache formats are ranked by what both take together. Both
/// 0: not known; then four tokens of prefill to one of decode are assumed. Negative, infinite and NaN are refused.
struct WorkloadMix {
  double decode_tokens = 0.0;
  double prefill_tokens = 0.0;
  friend bool operator==(const WorkloadMix&, const WorkloadMix&) = default;
};

struct PrepareOptions {
  std::optional<GraphBounds>
      bounds;                ///< given: larger batches are refused by `plan`; on a GPU the op is graph-capturable
  std::string force_kernel;  ///< a kernel's name: it runs or `prepare` fails. Empty: the cheapest that can
  int32_t num_workers = 0;   ///< workers to plan for; 0 = the executor's concurrency (CPU), the grid (GPU)
  /// A permission, for speed before accuracy: a kernel may multiply fp8 q by fp8 k, and p by fp8 v, with FP8 MMA, which
  /// does not dequantize them. AttentionOp::fp8_mma says whether the op does; other ops compute as without it.
  /// FP8 MMA keeps 13 bits below the largest of 32 terms and their accumulator. A logit errs by up to 34 * 2^-13 of the
  /// sum, over each 32 components, of the largest term or partial sum (normal q and k at head_dim 128: 6e-4 measured),
  /// and an LSE by as much as its logits. p is rounded to e4m3: an output moves by up to 2^-4 of the mean of |v|
  /// weighted by p for that, and by 2^-6 of it for its sums; typically by 2 % of its own size.
  bool allow_fp8_mma = false;
  /// Most KV splits of a query in a plan, those of a shared segment apart. 0: as many as the work
  /// needs. Work lists stay as many. Refused at kBatchInvariant and above, whose splits are fixed.
  int32_t max_kv_splits = 0;
  /// What a CPU's kernels are ranked by. Zeros: below kBatchInvariant decode alone if bounds->max_q_len is 1, else as
  /// WorkloadMix says. A row's bits are its kernel's: ops that serve the same requests take the same mix.
  WorkloadMix mix = {};
};

/// Where a segment's keys and values lie.
enum class KvSource : int32_t { kPaged = 0, kRagged = 1 };

/// Whether the config's mask and window apply to a segment.
enum class SegmentMask : int32_t { kAsConfig = 0, kAllVisible = 1 };

/// A token-wise shard of a segment over `world` ranks: the segment's token g (counted from its first position) lies on
/// rank (g / interleave) % world. Local token j of rank r is token (j / I) * (W * I) + r * I + j % I.
struct KvShard {
  int32_t world = 1;
  int32_t rank = 0;
  int32_t interleave = 1;
  friend bool operator==(const KvShard&, const KvShard&) = default;
};

/// One part of the keys and values of every request of a batch. A request's KV is the ordered list of its segments.
/// Rows of a segment are the requests, or, with `group_indptr`, groups of neighbouring requests that share the row.
struct KvSegment {
  KvSource source = KvSource::kPaged;
  const int32_t* kv_len = nullptr;  ///< [rows], tokens held here (of a shard: local): 0 to 2^31 - 4096
  /// [rows], global position of the segment's first token (of a shard: of the whole segment's). Null: a request's keys
  /// begin where those of its segment before end, the first segment's at 0. `plan` refuses null where that is not
  /// known: behind a shard, and for a row whose requests' keys before it end at different positions (requests without
  /// queries do not count).
  const int32_t* first_pos = nullptr;
  const int32_t* group_indptr =
      nullptr;             ///< [num_groups + 1], requests of row g: [indptr[g], indptr[g+1]); null = one a request
  int32_t num_groups = 0;  ///< rows when group_indptr is given; ranges must ascend, not overlap, may leave gaps
  SegmentMask mask = SegmentMask::kAsConfig;
  KvShard shard;
};

/// Which keys a custom mask's columns stand for.
enum class CustomMaskScope : int32_t {
  kAll = 0,   ///< all keys of the request, its segments in order
  kTail = 1,  ///< its last tail_len[r] keys; earlier keys are visible (trees of speculative tokens)
};

/// The shape of a batch's custom masks; the bits are a run argument. Request r's block is row-major [q_len, columns],
/// packed little-endian, and starts on a byte: block r begins at byte sum over earlier requests of ceil(q_len * columns
/// / 8).
struct CustomMask {
  CustomMaskScope scope = CustomMaskScope::kAll;
  const int32_t* tail_len = nullptr;  ///< [R], kTail only: columns of each request, in [0, its keys]
};

/// One step's batch: lengths only. Every array is borrowed until `plan` returns (CPU) or the stream has passed (GPU).
/// Lengths on a device must keep their values meanwhile: several CTAs read them, and a plan from two states of them may
/// read outside of the cache. R = num_requests. Requests may be empty (q_len 0 and kv_len 0): padding. Tokens from
/// cu_q[R] on are padding: they are neither read nor written.
///
/// More queries than keys are taken, and positions decide: without q_first_pos the last query stands at the last key,
/// so the first ones stand below position 0. Under kCausal they see nothing (out = 0, LSE = -infinity).
struct BatchView {
  Where where = Where::kHost;
  int32_t num_requests = 0;
  int32_t num_tokens = 0;         ///< rows of q and out; >= cu_q[R]
  int32_t max_q_len = 0;          ///< an upper bound, needed with device lengths; 0 on the host = computed
  int32_t max_kv_len = 0;         ///< likewise, of any request's keys
  const int32_t* cu_q = nullptr;  ///< [R + 1], non-decreasing, cu_q[0] == 0
  const int32_t* q_first_pos =
      nullptr;  ///< [R], global position of each first query; null = end of the last segment - q_len
  std::span<const KvSegment> segments;  ///< in the order of the keys
  CustomMask custom_mask;               ///< read only under MaskKind::kCustom
  /// Masks as rules (decision 0066): null, or arrays whose feature the config has. They lie where the lengths do.
  /// Positions are the sequence's, any int32. Segments with SegmentMask::kAllVisible are not masked by them.
  /// [R], Feature::kKvStart: keys at positions below are invisible (left padding). Chunks begin there.
  const int32_t* kv_start = nullptr;
  const uint8_t* causal = nullptr;  ///< [R], Feature::kRequestCausal: 0 = all keys of the request, within the window
  /// [cu_q[R], 2], on a device [num_tokens, 2], Feature::kSpans: begin and end of the key positions that the query sees
  /// besides those of the mask, up to p + window_right and back to p - span_window_left, in its chunk (an image around
  /// the query). Empty where begin >= end. Keys between the mask's and the span's are visible, too.
  const int32_t* spans = nullptr;
};

/// The logarithm's base in which LSE values are written or read.
enum class LseBase : int32_t { kE = 0, k2 = 1 };

/// Log-sum-exp of every row: element (t, h) at data[t * token_stride + h * head_stride].
struct LseView {
  float* data = nullptr;  ///< null = not wanted
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  LseBase base = LseBase::kE;
};

/// Where one segment's keys and values lie in this layer: `cache` and `table` for a paged one, `ragged` for a ragged
/// one; the others stay empty. Real keys and values are the stored ones times the scales, whatever their dtype. Scales
/// are finite and above 0; on a GPU those in memory are not checked.
struct SegmentArgs {
  KvCacheView cache;
  PageTableView table;
  RaggedKvView ragged;
  Scale k_scale;
  Scale v_scale;
};

/// Rotary embedding inside the kernel (Feature::kRopeLlama): components d and d + head_dim_qk / 2 of queries and keys
/// are turned by position / scale * theta^(-2 d / head_dim_qk) radians (NeoX halves; Su et al., "RoFormer",
/// arXiv:2104.09864). Positions are the sequence's, of queries and keys alike; the cache holds keys that are not
/// turned. The generic kernels and cuda-plain apply it, in float32 from float64 angles; others refuse.
struct RopeArgs {
  float theta = 1e4f;  ///< finite, positive
  float scale = 1.0f;  ///< divides positions; finite, positive
};

/// Scale factors of an NVFP4 output: one e4m3 per 16 values of a head, in tiles of 128 x 4 (folio/types/nvfp4.hpp). Row
/// t of `out` is row first_row + t of a matrix with num_q_heads * head_dim_v / 16 blocks a row. Only the factors of
/// rows that the batch owns are written.
struct BlockScaleArgs {
  void* data = nullptr;   ///< nvfp4_scale_bytes of the whole matrix
  int64_t first_row = 0;  ///< the row of the whole matrix that the first token of `out` is
};

/// One layer's arguments. Element types and head counts must be the config's; the innermost dimension contiguous.
struct AttentionArgs {
  ConstTensorView q;  ///< [num_tokens, num_q_heads, head_dim_qk]
  /// [num_tokens, num_q_heads, head_dim_v], NVFP4: head_dim_v / 2 bytes. out, lse, out_block_scale and the workspace
  /// lie apart from one another and from every input; rows of one fused buffer may alternate.
  TensorView out;
  LseView lse;                            ///< [num_tokens, num_q_heads]
  std::span<const SegmentArgs> segments;  ///< as many as the plan has
  float sm_scale = 0.0f;                  ///< multiplies q . k; finite. 0 = 1 / sqrt(head_dim_qk)
  float logits_soft_cap = 0.0f;           ///< c: logits become c * tanh(logits / c); 0 = off
  const float* alibi_slopes = nullptr;    ///< [num_q_heads]: logits get -slope * |q_pos - kv_pos|; null = off
  const float* sinks = nullptr;  ///< [num_q_heads]: an extra logit in the denominator only, natural units; null = off
  Scale q_scale;                 ///< q is fp8: real q = stored * scale
  /// out is fp8: stored = real / scale, per tensor. NVFP4: the global scale factor, real = stored * sf / scale.
  Scale out_scale;
  BlockScaleArgs out_block_scale;
  RopeArgs rope;
  const uint8_t* custom_mask = nullptr;  ///< bits, laid out as CustomMask says; MaskKind::kCustom only
  int64_t custom_mask_bytes = 0;         ///< their size, checked against the plan; 0 without them
};

/// Scratch memory of `run`: workspace_size(plan) bytes or more, for every plan it is run with, 256-byte aligned, on the
/// context's device, passed through init_workspace once. Contents never carry over; runs that may overlap (two streams,
/// two threads) need one each.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

}  // namespace folio::inline v0
