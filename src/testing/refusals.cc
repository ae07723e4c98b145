#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>

#include "core/error.hpp"
#include "folio/attention.hpp"
#include "folio/verify.hpp"
#include "testing/batch_memory.hpp"
#include "testing/executors.hpp"
#include "testing/kv_memory.hpp"
#include "testing/level_space.hpp"
#include "testing/problem.hpp"

namespace folio::inline v0::verify {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// The case of `levels` for a kernel; factors that it leaves at level 0 take the level that the kernel wants.
ConformanceCase case_for(const std::string& kernel, const char* levels) {
  const std::string kernels[] = {kernel};
  const LevelSpace space(kernels);
  const ConformanceCase plainest = space.to_case(space.plainest(0), 1);
  ConformanceCase out = parse_case(levels);
  out.kernel = kernel;
  for (size_t i = 0; i < kNumFactors; ++i) {
    if (out.levels[i] == 0) out.levels[i] = plainest.levels[i];
  }
  return out;
}

/// A well-formed problem, and calls that each spoil one thing about it.
class Refusals {
 public:
  explicit Refusals(const ConformanceCase& well_formed) : case_(well_formed), context_(pool_context(2)) {
    problem_ = make_problem(case_);
    kv_ = std::make_unique<KvMemory>(case_, problem_);
  }

  /// `call` must throw `code`.
  void expect(const std::string& what, ErrorCode code, const std::function<void()>& call) {
    try {
      call();
      failures_.push_back(what + ": was accepted");
    } catch (const Error& error) {
      if (error.code() == code) return;
      failures_.push_back(core::message(what, ": error code ", static_cast<int32_t>(error.code()), " in place of ",
                                        static_cast<int32_t>(code), " (", error.what(), ")"));
    }
  }

  /// Preparing with a spoilt configuration.
  void prepared(const std::string& what, ErrorCode code,
                const std::function<void(AttentionConfig&, PrepareOptions&)>& spoil) {
    AttentionConfig config = problem_.config;
    PrepareOptions options = problem_.options;
    spoil(config, options);
    expect("prepare: " + what, code, [&] { static_cast<void>(prepare(context_, config, options)); });
  }

  /// Planning a spoilt batch. A failed call leaves the buffer without a plan: the one before is stale.
  void planned(const std::string& what, const std::function<void(BatchView&)>& spoil,
               std::optional<GraphBounds> bounds = {}) {
    PrepareOptions options = problem_.options;
    options.bounds = bounds;
    const AttentionOp op = prepare(context_, problem_.config, options);
    PlanBuffer buffer = make_plan_buffer(op);
    const BatchMemory batch(case_, problem_, *kv_, whole_problem(problem_));
    BatchView view = batch.view();
    spoil(view);
    expect("plan: " + what, ErrorCode::kInvalidArgument, [&] { static_cast<void>(folio::plan(op, view, buffer)); });
  }

  /// Running with spoilt arguments: nothing may be written.
  void run_with(const std::string& what, ErrorCode code,
                const std::function<void(AttentionArgs&, std::vector<SegmentArgs>&, Workspace&)>& spoil) {
    const AttentionOp op = prepare(context_, problem_.config, problem_.options);
    PlanBuffer buffer = make_plan_buffer(op);
    const BatchMemory batch(case_, problem_, *kv_, whole_problem(problem_));
    const AttentionPlan plan = folio::plan(op, batch.view(), buffer);
    GuardedBuffer memory(std::max(workspace_size(op), workspace_size(plan)) + 256);
    Workspace workspace{memory.data(), workspace_size(plan)};
    AttentionArgs args = batch.args();
    std::vector<SegmentArgs> segments(args.segments.begin(), args.segments.end());
    spoil(args, segments, workspace);
    args.segments = segments;
    expect("run: " + what, code, [&] { folio::run(plan, args, workspace); });
    if (batch.written()) failures_.push_back("run: " + what + ": wrote to the outputs");
  }

  void stale_plans();
  void bad_page_ids();

  const Problem& problem() const { return problem_; }
  std::vector<std::string> take() { return std::move(failures_); }

 private:
  ConformanceCase case_;
  Context context_;
  Problem problem_;
  std::unique_ptr<KvMemory> kv_;
  std::vector<std::string> failures_;
};

void Refusals::stale_plans() {
  const AttentionOp op = prepare(context_, problem_.config, problem_.options);
  const AttentionOp other = prepare(context_, problem_.config, problem_.options);
  PlanBuffer buffer = make_plan_buffer(op);
  const BatchMemory batch(case_, problem_, *kv_, whole_problem(problem_));
  expect("plan: a buffer of another op", ErrorCode::kInvalidArgument,
         [&] { static_cast<void>(folio::plan(other, batch.view(), buffer)); });
  const AttentionPlan old = folio::plan(op, batch.view(), buffer);
  const AttentionPlan current = folio::plan(op, batch.view(), buffer);
  GuardedBuffer memory(std::max(workspace_size(op), workspace_size(current)));
  const Workspace workspace{memory.data(), memory.size()};
  expect("run: a plan whose buffer was planned into again", ErrorCode::kStalePlan,
         [&] { folio::run(old, batch.args(), workspace); });
  expect("summary: a stale plan", ErrorCode::kStalePlan, [&] { static_cast<void>(summary(old)); });
  expect("workspace_size: a stale plan", ErrorCode::kStalePlan, [&] { static_cast<void>(workspace_size(old)); });
  BatchView bad = batch.view();
  bad.num_tokens = -1;
  expect("plan: num_tokens of -1", ErrorCode::kInvalidArgument,
         [&] { static_cast<void>(folio::plan(op, bad, buffer)); });
  expect("run: a plan before a failed one", ErrorCode::kStalePlan,
         [&] { folio::run(current, batch.args(), workspace); });
  if (batch.written()) failures_.push_back("run: a stale plan wrote to the outputs");
}

void Refusals::bad_page_ids() {
  const AttentionOp op = prepare(context_, problem_.config, problem_.options);
  PlanBuffer buffer = make_plan_buffer(op);
  const BatchMemory batch(case_, problem_, *kv_, whole_problem(problem_));
  const AttentionPlan plan = folio::plan(op, batch.view(), buffer);
  const SegmentArgs& segment = batch.args().segments[0];
  for (const int64_t id : {int64_t{-1}, segment.cache.num_pages}) {
    std::vector<int32_t> indices(segment.table.indices, segment.table.indices + segment.table.num_indices);
    std::replace_if(
        indices.begin(), indices.end(), [&](int32_t page) { return page >= 0 && page < segment.cache.num_pages; },
        static_cast<int32_t>(id));
    std::vector<SegmentArgs> segments{segment};
    segments[0].table.indices = indices.data();
    AttentionArgs args = batch.args();
    args.segments = segments;
    expect(core::message("validate: page id ", id), ErrorCode::kInvalidArgument, [&] { validate(plan, args); });
  }
}

void prepare_refusals(Refusals& refusals) {
  constexpr auto kInvalid = ErrorCode::kInvalidArgument;
  constexpr auto kUnsupported = ErrorCode::kUnsupported;
  using Config = AttentionConfig;
  using Options = PrepareOptions;
  refusals.prepared("an unknown kernel", kInvalid, [](Config&, Options& o) { o.force_kernel = "no-such-kernel"; });
  refusals.prepared("num_workers of -1", kInvalid, [](Config&, Options& o) { o.num_workers = -1; });
  refusals.prepared("negative bounds", kInvalid,
                    [](Config&, Options& o) { o.bounds = GraphBounds{.max_requests = -1}; });
  refusals.prepared("num_q_heads no multiple", kInvalid,
                    [](Config& c, Options&) { c.num_kv_heads = 4, c.num_q_heads = 6; });
  refusals.prepared("no KV heads", kInvalid, [](Config& c, Options&) { c.num_kv_heads = 0; });
  refusals.prepared("page_size of 0", kInvalid, [](Config& c, Options&) { c.page_size = 0; });
  refusals.prepared("window_left of -2", kInvalid, [](Config& c, Options&) { c.window_left = -2; });
  refusals.prepared("window_right of -2", kInvalid, [](Config& c, Options&) { c.window_right = -2; });
  refusals.prepared("attention_chunk of -1", kInvalid, [](Config& c, Options&) { c.attention_chunk = -1; });
  refusals.prepared("span_window_left of -2", kInvalid,
                    [](Config& c, Options&) { c.features = Feature::kSpans, c.span_window_left = -2; });
  refusals.prepared("a span's window without spans", kInvalid, [](Config& c, Options&) { c.span_window_left = 3; });
  refusals.prepared("spans without a causal mask", kInvalid,
                    [](Config& c, Options&) { c.features = Feature::kSpans, c.mask = MaskKind::kNone; });
  refusals.prepared("flags of requests without a causal mask", kInvalid,
                    [](Config& c, Options&) { c.features = Feature::kRequestCausal, c.mask = MaskKind::kCustom; });
  refusals.prepared("unknown features", kInvalid, [](Config& c, Options&) { c.features.bits = 1u << 7; });
  refusals.prepared("no dtype", kInvalid, [](Config& c, Options&) { c.kv = DType::kUnset; });
  refusals.prepared("head_dim_qk of 100", kUnsupported, [](Config& c, Options&) { c.head_dim_qk = 100; });
  refusals.prepared("head_dim_v of 12", kUnsupported, [](Config& c, Options&) { c.head_dim_v = 12; });
  refusals.prepared("fp4 keys", kUnsupported, [](Config& c, Options&) { c.kv = DType::kFloat4E2M1x2; });
  refusals.prepared("packed pages of 8", kUnsupported,
                    [](Config& c, Options&) { c.kv_format = KvFormat::kCpuPacked, c.page_size = 8; });
  refusals.prepared("packed pages of 17", kUnsupported,
                    [](Config& c, Options&) { c.kv_format = KvFormat::kCpuPacked, c.page_size = 17; });
  refusals.prepared("packed float32", kUnsupported,
                    [](Config& c, Options&) { c.kv_format = KvFormat::kCpuPacked, c.kv = DType::kFloat32; });
}

void plan_refusals(Refusals& refusals) {
  std::vector<int32_t> spoilt(64, 0);
  refusals.planned("cu_q that begins at 1", [&](BatchView& b) {
    std::copy_n(b.cu_q, b.num_requests + 1, spoilt.begin());
    spoilt[0] = 1;
    b.cu_q = spoilt.data();
  });
  refusals.planned("cu_q that falls", [&](BatchView& b) {
    std::copy_n(b.cu_q, b.num_requests + 1, spoilt.begin());
    std::swap(spoilt[1], spoilt[2]);
    b.cu_q = spoilt.data();
  });
  refusals.planned("fewer tokens than cu_q", [](BatchView& b) { b.num_tokens = b.cu_q[b.num_requests] - 1; });
  refusals.planned("no cu_q", [](BatchView& b) { b.cu_q = nullptr; });
  refusals.planned("undeclared spans", [&](BatchView& b) { b.spans = spoilt.data(); });
  refusals.planned("an undeclared kv_start", [&](BatchView& b) { b.kv_start = spoilt.data(); });
  refusals.planned("undeclared flags of requests",
                   [&](BatchView& b) { b.causal = reinterpret_cast<const uint8_t*>(spoilt.data()); });
  refusals.planned("device lengths on a CPU", [](BatchView& b) { b.where = Where::kDevice; });
  std::vector<KvSegment> segments;
  const auto spoil_segment = [&](const std::string& what, const std::function<void(KvSegment&)>& spoil) {
    refusals.planned(what, [&](BatchView& b) {
      segments.assign(b.segments.begin(), b.segments.end());
      spoil(segments[0]);
      b.segments = segments;
    });
  };
  spoil_segment("a negative kv_len", [&](KvSegment& s) {
    std::fill(spoilt.begin(), spoilt.end(), -1);
    s.kv_len = spoilt.data();
  });
  spoil_segment("no kv_len", [](KvSegment& s) { s.kv_len = nullptr; });
  spoil_segment("a shard beyond its world", [](KvSegment& s) { s.shard = {2, 2, 1}; });
  spoil_segment("an interleave of 0", [](KvSegment& s) { s.shard = {2, 0, 0}; });
  refusals.planned("a shard without q_first_pos", [&](BatchView& b) {
    segments.assign(b.segments.begin(), b.segments.end());
    segments[0].shard = {2, 0, 1};
    b.segments = segments;
    b.q_first_pos = nullptr;
  });
  GraphBounds bounds{100, 10000, 1000, 1000, 0};
  bounds.max_requests = 1;
  refusals.planned(
      "more requests than the bounds", [](BatchView&) {}, bounds);
  bounds = {100, 1, 1000, 1000, 0};
  refusals.planned(
      "more tokens than the bounds", [](BatchView&) {}, bounds);
  bounds = {100, 10000, 1, 1000, 0};
  refusals.planned(
      "longer queries than the bounds", [](BatchView&) {}, bounds);
  bounds = {100, 10000, 1000, 1, 0};
  refusals.planned(
      "longer keys than the bounds", [](BatchView&) {}, bounds);
}

void run_refusals(Refusals& refusals) {
  using Args = AttentionArgs;
  using Segments = std::vector<SegmentArgs>;
  const auto invalid = [&](const std::string& what, const std::function<void(Args&, Segments&)>& spoil) {
    refusals.run_with(what, ErrorCode::kInvalidArgument, [&](Args& a, Segments& s, Workspace&) { spoil(a, s); });
  };
  static const float kOnes[64] = {1.0f};
  static const uint8_t kBits[4096] = {};
  invalid("an undeclared soft cap", [](Args& a, Segments&) { a.logits_soft_cap = 30.0f; });
  invalid("undeclared ALiBi slopes", [](Args& a, Segments&) { a.alibi_slopes = kOnes; });
  invalid("undeclared sinks", [](Args& a, Segments&) { a.sinks = kOnes; });
  invalid("an undeclared rope", [](Args& a, Segments&) { a.rope.theta = 5e5f; });
  invalid("an uncalled-for custom mask", [](Args& a, Segments&) { a.custom_mask = kBits, a.custom_mask_bytes = 4096; });
  invalid("a q scale for 16-bit q", [](Args& a, Segments&) { a.q_scale.value = 2.0f; });
  invalid("an out scale for 16-bit out", [](Args& a, Segments&) { a.out_scale.value = 2.0f; });
  invalid("sm_scale NaN", [](Args& a, Segments&) { a.sm_scale = kNan; });
  invalid("a NaN k_scale", [](Args&, Segments& s) { s[0].k_scale.value = kNan; });
  invalid("a v_scale given twice", [](Args&, Segments& s) { s[0].v_scale.value = 2.0f, s[0].v_scale.data = kOnes; });
  invalid("a scale per head without data",
          [](Args&, Segments& s) { s[0].k_scale.granularity = ScaleGranularity::kPerHead; });
  invalid("an LSE base of 7", [](Args& a, Segments&) { a.lse.base = static_cast<LseBase>(7); });
  invalid("no q", [](Args& a, Segments&) { a.q.data = nullptr; });
  invalid("q of another dtype", [](Args& a, Segments&) { a.q.dtype = DType::kFloat16; });
  invalid("out of another dtype", [](Args& a, Segments&) { a.out.dtype = DType::kFloat16; });
  invalid("q with a token less", [](Args& a, Segments&) { --a.q.shape[0]; });
  invalid("out with a token less", [](Args& a, Segments&) { --a.out.shape[0]; });
  invalid("q of another head_dim", [](Args& a, Segments&) { a.q.shape[2] -= 8; });
  invalid("q with components apart", [](Args& a, Segments&) { a.q.strides[2] = 2; });
  invalid("out whose rows overlap", [](Args& a, Segments&) { a.out.strides[0] = 0; });
  invalid("an LSE whose rows overlap", [](Args& a, Segments&) { a.lse.token_stride = 0; });
  invalid("out over q", [](Args& a, Segments&) { a.q.data = a.out.data; });
  invalid("out over a cache", [](Args& a, Segments& s) { a.out.data = s[0].cache.k; });
  invalid("an LSE over out", [](Args& a, Segments&) {
    a.lse = {static_cast<float*>(a.out.data), a.q.shape[1], 1, LseBase::kE};
  });
  invalid("a custom mask's size without its bits", [](Args& a, Segments&) { a.custom_mask_bytes = 1; });
  invalid("a negative k_scale", [](Args&, Segments& s) { s[0].k_scale.value = -1.0f; });
  invalid("a cache without pages", [](Args&, Segments& s) { s[0].cache.num_pages = 0; });
  invalid("no segments", [](Args&, Segments& s) { s.clear(); });
  invalid("a segment too many", [](Args&, Segments& s) { s.push_back(s[0]); });
  invalid("a cache of another dtype", [](Args&, Segments& s) { s[0].cache.dtype = DType::kFloat16; });
  invalid("a cache of another page size", [](Args&, Segments& s) { s[0].cache.page_size *= 2; });
  invalid("a cache of another head count", [](Args&, Segments& s) { ++s[0].cache.num_kv_heads; });
  invalid("a cache of another format", [](Args&, Segments& s) {
    KvFormat& format = s[0].cache.format;
    format = format == KvFormat::kCpuPacked ? KvFormat::kStrided : KvFormat::kCpuPacked;
  });
  invalid("no cache", [](Args&, Segments& s) { s[0].cache.k = nullptr; });
  invalid("no table", [](Args&, Segments& s) { s[0].table.indices = nullptr; });
  invalid("a table with a row less", [](Args&, Segments& s) { --s[0].table.num_rows; });
  invalid("a table with a page less", [](Args&, Segments& s) { --s[0].table.num_indices; });
  invalid("ragged tensors for a paged segment", [](Args& a, Segments& s) { s[0].ragged.k = a.q; });
  refusals.run_with("a workspace of 0 bytes", ErrorCode::kWorkspaceTooSmall,
                    [](Args&, Segments&, Workspace& w) { w.bytes = 0; });
  refusals.run_with("a workspace 256 bytes too small", ErrorCode::kWorkspaceTooSmall,
                    [](Args&, Segments&, Workspace& w) { w.bytes -= 256; });
  refusals.run_with("no workspace", ErrorCode::kInvalidArgument,
                    [](Args&, Segments&, Workspace& w) { w.data = nullptr; });
  refusals.run_with("a workspace out of alignment", ErrorCode::kInvalidArgument,
                    [](Args&, Segments&, Workspace& w) { w.data = static_cast<std::byte*>(w.data) + 64; });
}

void append(std::vector<std::string>& all, std::vector<std::string> more) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace

std::vector<std::string> check_refusals(const std::string& kernel) {
  std::vector<std::string> failures;
  Refusals plain(case_for(kernel, "seed=3 lengths=edges queries=mixed"));
  prepare_refusals(plain);
  plan_refusals(plain);
  run_refusals(plain);
  plain.stale_plans();
  plain.bad_page_ids();
  append(failures, plain.take());

  Refusals custom(case_for(kernel, "seed=5 mask=custom-tail queries=verify lengths=medium"));
  using Segments = std::vector<SegmentArgs>;
  custom.run_with("no custom mask", ErrorCode::kInvalidArgument,
                  [](AttentionArgs& a, Segments&, Workspace&) { a.custom_mask = nullptr; });
  custom.run_with("a custom mask a byte short", ErrorCode::kInvalidArgument,
                  [](AttentionArgs& a, Segments&, Workspace&) { --a.custom_mask_bytes; });
  std::vector<int32_t> tails(64, std::numeric_limits<int32_t>::max());
  custom.planned("a tail longer than the keys", [&](BatchView& b) { b.custom_mask.tail_len = tails.data(); });
  custom.planned("no tail lengths", [](BatchView& b) { b.custom_mask.tail_len = nullptr; });
  append(failures, custom.take());

  const ConformanceCase only_ragged = case_for(kernel, "seed=7 segments=ragged lengths=medium");
  if (!invalid_reason(only_ragged).empty()) return failures;  // the kernel wants a page format
  Refusals ragged(only_ragged);
  ragged.run_with("a ragged tensor of another dtype", ErrorCode::kInvalidArgument,
                  [](AttentionArgs&, Segments& s, Workspace&) { s[0].ragged.k.dtype = DType::kFloat32; });
  ragged.run_with("no ragged indptr", ErrorCode::kInvalidArgument,
                  [](AttentionArgs&, Segments& s, Workspace&) { s[0].ragged.indptr = nullptr; });
  ragged.run_with("ragged tensors a token short", ErrorCode::kInvalidArgument,
                  [](AttentionArgs&, Segments& s, Workspace&) { --s[0].ragged.k.shape[0], --s[0].ragged.v.shape[0]; });
  append(failures, ragged.take());
  return failures;
}

}  // namespace folio::inline v0::verify
