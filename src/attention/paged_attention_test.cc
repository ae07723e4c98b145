// PagedAttention against prepare, plan and run bit for bit, and against the oracle; its plans, its memory, its
// refusals.
#include "folio/paged_attention.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "attention/cache_test_util.hpp"
#include "attention/device_test_util.hpp"
#include "core/allocation_test_util.hpp"
#include "core/expect_refused_test_util.hpp"
#include "folio/folio.hpp"
#include "folio/reference.hpp"

namespace folio::inline v0::attention {
namespace {

using folio::testing::device_context;
using folio::testing::expect_refused;

struct Variant {
  std::string name;
  DType q = DType::kFloat32;
  DType kv = DType::kFloat32;
  DType out = DType::kFloat32;
  Layout layout = Layout::kNhd;
  int32_t num_q_heads = 6;
  int32_t num_kv_heads = 2;
  bool decode = false;
  bool csr = false;
  bool causal = true;
  int32_t window_left = -1;
  int32_t window_right = -1;
  float sm_scale = 0.0f;
  float soft_cap = 0.0f;
  bool alibi = false;
  bool sinks = false;
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  Determinism determinism = Determinism::kRunToRun;
};

/// Memory of `operator new`, which both devices reach.
struct Scratch {
  explicit Scratch(size_t size) : bytes(size), data(::operator new (size, std::align_val_t{256})) {}
  ~Scratch() { ::operator delete (data, std::align_val_t{256}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  size_t bytes;
  void* data;
};

/// A batch of requests over a cache full of noise, its pages in no order.
class Scene {
 public:
  static constexpr int32_t kDim = 64, kPage = 16;

  Scene(const Variant& s, std::vector<int32_t> q_lens, std::vector<int32_t> kv_lens)
      : variant(s),
        seq_lens(std::move(kv_lens)),
        requests(static_cast<int32_t>(seq_lens.size())),
        columns(pages_for(*std::ranges::max_element(seq_lens), kPage) + 1),
        shape{int64_t{requests} * columns, kPage, s.num_kv_heads, kDim, kDim, s.kv},
        pool(s.layout, shape, 1),
        scales(s.kv == DType::kInt8 ? static_cast<size_t>(2 * token_scale_elements(shape)) : 0),
        q(s.q, std::accumulate(q_lens.begin(), q_lens.end(), 0), s.num_q_heads, kDim, 32, 2),
        out(static_cast<size_t>(q.tokens * s.num_q_heads * kDim * size_of(s.out)), std::byte{0x5a}),
        lse(static_cast<size_t>(q.tokens * s.num_q_heads), -1.0f),
        slopes(static_cast<size_t>(s.num_q_heads), 0.125f),
        sinks(static_cast<size_t>(s.num_q_heads), 1.5f) {
    for (const int32_t q_len : q_lens) cu_q.push_back(cu_q.back() + q_len);
    for (int32_t r = 0; r < requests; ++r) {
      indptr.push_back(indptr.back() + pages_for(seq_lens[static_cast<size_t>(r)], kPage));
    }
    table.resize(static_cast<size_t>(requests * columns));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(3));
    for (int32_t r = 0; r < requests; ++r) {
      const auto row = table.begin() + r * columns;
      indices.insert(indices.end(), row, row + (indptr[static_cast<size_t>(r) + 1] - indptr[static_cast<size_t>(r)]));
    }
    fill_cache();
  }

  PagedAttentionArgs args() {
    PagedAttentionArgs a;
    a.q = q.view();
    a.cache = cache();
    a.page_table = variant.csr ? csr_table(indices, indptr) : dense_table(table, requests, columns);
    a.seq_lens = seq_lens;
    if (!variant.decode) a.cu_q = cu_q;
    a.out = TensorView(out.data(), variant.out, {q.tokens, variant.num_q_heads, kDim});
    a.lse = {lse.data(), variant.num_q_heads, 1, LseBase::kE};
    a.sm_scale = variant.sm_scale;
    a.causal = variant.causal;
    a.window_left = variant.window_left;
    a.window_right = variant.window_right;
    a.logits_soft_cap = variant.soft_cap;
    a.alibi_slopes = variant.alibi ? slopes.data() : nullptr;
    a.sinks = variant.sinks ? sinks.data() : nullptr;
    a.k_scale.value = variant.k_scale;
    a.v_scale.value = variant.v_scale;
    a.determinism = variant.determinism;
    return a;
  }

  AttentionConfig config() const {
    AttentionConfig c;
    c.num_q_heads = variant.num_q_heads;
    c.num_kv_heads = variant.num_kv_heads;
    c.head_dim_qk = c.head_dim_v = kDim;
    c.q = variant.q;
    c.kv = variant.kv;
    c.out = variant.out;
    c.kv_format = is_packed(variant.layout) ? KvFormat::kCpuPacked : KvFormat::kStrided;
    c.page_size = kPage;
    c.mask = variant.causal ? MaskKind::kCausal : MaskKind::kNone;
    c.window_left = variant.window_left;
    c.window_right = variant.window_right;
    if (variant.soft_cap != 0.0f) c.features = c.features | Feature::kSoftCap;
    if (variant.alibi) c.features = c.features | Feature::kAlibi;
    if (variant.sinks) c.features = c.features | Feature::kSinks;
    c.determinism = variant.determinism;
    return c;
  }

  /// Forgets what was written.
  void clear() {
    std::ranges::fill(out, std::byte{0x5a});
    std::ranges::fill(lse, -1.0f);
  }
  bool untouched() const {
    return std::ranges::all_of(out, [](std::byte b) { return b == std::byte{0x5a}; }) &&
           std::ranges::all_of(lse, [](float x) { return x == -1.0f; });
  }

  /// What prepare, plan and run write.
  std::pair<std::vector<std::byte>, std::vector<float>> by_the_core(const Context& context) {
    clear();
    const AttentionOp op = prepare(context, config());
    PlanBuffer buffer = make_plan_buffer(op);
    const CoreArgs core(*this);
    const AttentionPlan plan = folio::plan(op, core.batch, buffer);
    const Scratch memory(std::max<size_t>(workspace_size(plan), 256));
    const Workspace workspace{memory.data, memory.bytes};
    init_workspace(op, workspace);
    run(plan, core.args, workspace);
    return {out, lse};
  }

  /// The largest distance of `out` and `lse` from the oracle, in units of what rounding explains.
  double distance_from_oracle(const AttentionOp& op) {
    const CoreArgs core(*this);
    double largest_v = 0.0;
    for (int64_t i = 0; i < v_elements(shape); ++i) largest_v = std::max(largest_v, std::fabs(double{value_at(i)}));
    // p and the output are rounded to their types; a float32 logit of size 100 moves p by 100 * 2^-23 of itself and
    // more for every sum on its way.
    const double tolerance = largest_v * (half_ulp(op.p_dtype()) + half_ulp(variant.out) + 1e-4);
    double worst = 0.0;
    std::vector<double> row(kDim);
    for (int32_t token = 0; token < q.tokens; ++token) {
      for (int32_t head = 0; head < variant.num_q_heads; ++head) {
        const double sum = verify::reference_row(op.config(), core.batch, core.args, token, head, row);
        const size_t at =
            static_cast<size_t>(token) * static_cast<size_t>(variant.num_q_heads) + static_cast<size_t>(head);
        worst = std::max(worst, std::fabs(double{lse[at]} - sum) / 1e-3);
        for (size_t d = 0; d < row.size(); ++d) {
          const double got = load_as_float(out.data(), variant.out, static_cast<int64_t>(at * kDim + d));
          worst = std::max(worst, std::fabs(got - row[d]) / tolerance);
        }
      }
    }
    return worst;
  }

  KvCacheView cache() {
    if (scales.empty()) return pool.view();
    std::byte* const k = pool.memory.data() + Pool::kMargin;
    std::byte* const v = k + k_elements(shape);
    float* const v_scales = scales.data() + token_scale_elements(shape);
    return is_packed(variant.layout) ? make_cpu_packed_view(shape, k, v, scales.data(), v_scales)
                                     : make_nhd_view(shape, k, v, scales.data(), v_scales);
  }

  Variant variant;
  std::vector<int32_t> seq_lens;
  int32_t requests, columns;
  KvCacheShape shape;
  Pool pool;
  std::vector<float> scales;
  Rows q;
  std::vector<std::byte> out;
  std::vector<float> lse, slopes, sinks;
  std::vector<int32_t> cu_q{0}, table, indptr{0}, indices;

 private:
  /// The batch as the core takes it.
  struct CoreArgs {
    explicit CoreArgs(Scene& scene) {
      keys.kv_len = scene.seq_lens.data();
      batch.num_requests = scene.requests;
      batch.num_tokens = static_cast<int32_t>(scene.q.tokens);
      batch.cu_q = scene.cu_q.data();
      batch.segments = {&keys, 1};
      const PagedAttentionArgs given = scene.args();
      pages.cache = given.cache;
      pages.table = given.page_table;
      pages.k_scale = given.k_scale;
      pages.v_scale = given.v_scale;
      args.q = given.q;
      args.out = given.out;
      args.lse = given.lse;
      args.segments = {&pages, 1};
      args.sm_scale = given.sm_scale != 0.0f ? given.sm_scale : 1.0f / std::sqrt(static_cast<float>(kDim));
      args.logits_soft_cap = given.logits_soft_cap;
      args.alibi_slopes = given.alibi_slopes;
      args.sinks = given.sinks;
    }
    CoreArgs(const CoreArgs&) = delete;
    CoreArgs& operator=(const CoreArgs&) = delete;
    KvSegment keys;
    BatchView batch;
    SegmentArgs pages;
    AttentionArgs args;
  };

  static double half_ulp(DType dtype) {
    switch (dtype) {
      case DType::kFloat16: return 0x1p-11;
      case DType::kBFloat16: return 0x1p-8;
      default: return 0x1p-24;
    }
  }

  /// By the host: what pages hold is not what this tests.
  void fill_cache() {
    const int64_t slots = shape.num_pages * kPage;
    Rows k(DType::kFloat32, slots, variant.num_kv_heads, kDim, 0, 4),
        v(DType::kFloat32, slots, variant.num_kv_heads, kDim, 0, 5);
    std::vector<int64_t> slot_mapping(static_cast<size_t>(slots));
    std::iota(slot_mapping.begin(), slot_mapping.end(), int64_t{0});
    CacheWriteArgs write;
    write.k = k.view();
    write.v = v.view();
    write.slot_mapping = slot_mapping.data();
    write.num_slots = slots;
    write.cache = cache();
    if (is_fp8(variant.kv)) {
      write.k_scale.value = variant.k_scale;
      write.v_scale.value = variant.v_scale;
    }
    write_kv_cache(Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}}), write);
    values_.assign(v.memory.begin(), v.memory.end());
  }
  float value_at(int64_t i) const { return load_as_float(values_.data(), DType::kFloat32, i); }

  std::vector<std::byte> values_;
};

std::vector<Variant> variants() {
  constexpr DType kBf16 = DType::kBFloat16, kF16 = DType::kFloat16;
  constexpr DType kE4m3 = DType::kFloat8E4M3;
  return {
      {.name = "plain"},
      {.name = "decode", .decode = true},
      {.name = "decode, CSR", .decode = true, .csr = true},
      {.name = "one head a group", .num_q_heads = 2},
      {.name = "all keys", .causal = false},
      {.name = "windows", .causal = false, .window_left = 9, .window_right = 3},
      {.name = "window", .layout = Layout::kHnd, .window_left = 20},
      {.name = "scale", .sm_scale = 0.25f},
      {.name = "soft cap", .csr = true, .soft_cap = 20.0f},
      {.name = "slopes and sinks", .alibi = true, .sinks = true},
      {.name = "batch invariant", .decode = true, .determinism = Determinism::kBatchInvariant},
      {.name = "bfloat16", .q = kBf16, .kv = kBf16, .out = kBf16, .num_q_heads = 8},
      {.name = "bfloat16 to float32", .q = kBf16, .kv = kBf16, .decode = true},
      {.name = "float16", .q = kF16, .kv = kF16, .out = kF16, .layout = Layout::kInterleavedHnd},
      {.name = "fp8", .q = kBf16, .kv = kE4m3, .out = kBf16, .k_scale = 0.03f, .v_scale = 0.05f},
  };
}

/// What only CPUs read.
std::vector<Variant> cpu_variants() {
  constexpr DType kBf16 = DType::kBFloat16;
  return {
      {.name = "packed", .q = kBf16, .kv = kBf16, .out = kBf16, .layout = Layout::kPacked},
      {.name = "int8", .q = kBf16, .kv = DType::kInt8, .out = kBf16},
      {.name = "int8, packed, scaled", .kv = DType::kInt8, .layout = Layout::kPacked, .k_scale = 0.5f, .v_scale = 2.0f},
  };
}

Scene scene_of(const Variant& variant) {
  if (variant.decode) return Scene(variant, {1, 1, 1, 1}, {20, 7, 48, 100});
  return Scene(variant, {1, 5, 0, 33, 1},
               {20, 7, 3, 40, 90});  // decodes, an append, a request without queries, a prefill
}

void expect_the_cores_results(PagedAttention& attention, const Context& context, const Variant& variant) {
  SCOPED_TRACE(variant.name);
  Scene scene = scene_of(variant);
  const auto expected = scene.by_the_core(context);
  scene.clear();
  attention(scene.args());
  EXPECT_EQ(scene.out, expected.first);
  EXPECT_EQ(scene.lse, expected.second);
  EXPECT_LT(scene.distance_from_oracle(attention.plan().op()), 1.0);
}

/// One object takes them all, one after the other and then again.
TEST(PagedAttention, EveryConfiguration_IsPrepareThenPlanThenRun) {
  const Context context = device_context();
  PagedAttention attention(context);
  for (int round = 0; round < 2; ++round) {
    for (const Variant& variant : variants()) expect_the_cores_results(attention, context, variant);
  }
}

TEST(PagedAttention, CachesOfCpus_ArePrepareThenPlanThenRun) {
  FOLIO_CPU_ONLY("GPUs read no packed pages and no int8 caches");
  const Context context = device_context();
  PagedAttention attention(context);
  for (const Variant& variant : cpu_variants()) expect_the_cores_results(attention, context, variant);
}

TEST(PagedAttention, LayersOfOneStep_ShareAPlan) {
  PagedAttention attention(device_context());
  Scene full(variants()[0], {1, 3}, {20, 40});
  Variant windowed = variants()[0];
  windowed.window_left = 5;
  Scene window(windowed, {1, 3}, {20, 40});
  attention(full.args());
  const AttentionPlan of_full = attention.plan();
  attention(window.args());
  const AttentionPlan of_window = attention.plan();
  EXPECT_EQ(of_window.op().config().window_left, 5);
  attention(full.args());  // the next layers
  EXPECT_EQ(&attention.plan().buffer(), &of_full.buffer());
  EXPECT_EQ(attention.plan().generation(), of_full.generation());
  attention(window.args());
  EXPECT_EQ(attention.plan().generation(), of_window.generation());

  uint64_t planned = of_full.generation();
  const auto expect_planned = [&](Scene& scene) {
    const auto expected = scene.by_the_core(attention.plan().op().context());
    scene.clear();
    attention(scene.args());
    EXPECT_EQ(attention.plan().generation(), ++planned);
    EXPECT_EQ(scene.out, expected.first);
  };
  ++full.seq_lens[1];  // the next step
  expect_planned(full);
  full.cu_q = {0, 2, 4};
  expect_planned(full);
  full.cu_q = {0, 2, 3};  // a token of padding
  expect_planned(full);
  Scene fewer(variants()[0], {2}, {20});
  expect_planned(fewer);
}

TEST(PagedAttention, PaddingIsNotWritten) {
  PagedAttention attention(device_context());
  Scene scene(variants()[0], {1, 3}, {20, 40});
  scene.cu_q = {0, 1, 3};
  attention(scene.args());
  const auto row = static_cast<std::ptrdiff_t>(scene.out.size() / 4);
  EXPECT_FALSE(scene.untouched());
  EXPECT_TRUE(std::all_of(scene.out.end() - row, scene.out.end(), [](std::byte b) { return b == std::byte{0x5a}; }));
}

TEST(PagedAttention, GrowsWithTheBatch) {
  const Context context = device_context();
  PagedAttention attention(context);
  for (const int32_t requests : {1, 3, 40, 2}) {
    std::vector<int32_t> q_lens(static_cast<size_t>(requests), 1), kv_lens;
    for (int32_t r = 0; r < requests; ++r) kv_lens.push_back(1 + 37 * r % 300);
    q_lens.back() = kv_lens.back();
    Scene scene(variants()[11], q_lens, kv_lens);
    const auto expected = scene.by_the_core(context);
    scene.clear();
    attention(scene.args());
    EXPECT_EQ(scene.out, expected.first) << requests;
  }
}

TEST(PagedAttention, ForgetsTheConfigurationUnusedLongest) {
  PagedAttention attention(device_context());
  Variant variant = variants()[1];
  Scene scene(variant, {1, 1}, {20, 40});
  const auto plan_with = [&](int32_t window_left) {
    scene.variant.window_left = window_left;
    attention(scene.args());
    return attention.plan();
  };
  const AttentionPlan first = plan_with(0);
  const auto op_of_first = first.op().shared_state();
  for (int32_t window = 1; window < PagedAttention::kMaxConfigs; ++window) plan_with(window);
  EXPECT_EQ(plan_with(0).op().shared_state(), op_of_first);
  const auto op_of_second = plan_with(1).op().shared_state();
  plan_with(PagedAttention::kMaxConfigs);  // takes the place of 2
  EXPECT_EQ(plan_with(0).op().shared_state(), op_of_first);
  EXPECT_EQ(plan_with(1).op().shared_state(), op_of_second);
  for (int32_t window = 3; window <= PagedAttention::kMaxConfigs; ++window) plan_with(100 + window);
  plan_with(200), plan_with(201);
  EXPECT_NE(plan_with(0).op().shared_state(), op_of_first);
  const auto expected = scene.by_the_core(device_context());
  scene.clear();
  plan_with(0);
  EXPECT_EQ(scene.out, expected.first);
}

TEST(PagedAttention, AWarmCall_AllocatesNothing) {
  FOLIO_CPU_ONLY("kernels' memory is operator new's there");
  PagedAttention attention(device_context());
  Scene prefill = scene_of(variants()[0]);
  Scene decode(variants()[1], {1, 1, 1}, {20, 40, 100});
  PagedAttentionArgs of_prefill = prefill.args(), of_decode = decode.args();
  attention(of_prefill);
  attention(of_decode);
  const uint64_t planned = attention.plan().generation();
  decode.clear();
  const int64_t before = folio::testing::num_allocations();
  attention(of_prefill);
  attention(of_decode);
  EXPECT_EQ(folio::testing::num_allocations(), before);
  EXPECT_EQ(attention.plan().generation(), planned + 2);  // their lengths differ: each call planned
  EXPECT_FALSE(decode.untouched());
}

TEST(PagedAttention, MovesWithItsPlans) {
  const Context context = device_context();
  PagedAttention first(context);
  Scene scene(variants()[0], {1, 3}, {20, 40});
  first(scene.args());
  const AttentionPlan plan = first.plan();
  PagedAttention second(std::move(first));
  second(scene.args());
  EXPECT_EQ(&second.plan().buffer(), &plan.buffer());
  EXPECT_EQ(second.plan().generation(), plan.generation());
}

/// Nothing is written, and the next call with right arguments works.
TEST(PagedAttention, WrongArguments_AreRefused) {
  const Context context = device_context();
  PagedAttention attention(context);
  expect_refused("nothing was called yet", [&] { attention.plan(); });
  Scene scene(variants()[0], {1, 3}, {20, 40});
  attention(scene.args());
  const std::vector<std::byte> right = scene.out;
  const auto refused = [&](const std::string& text, const std::function<void(PagedAttentionArgs&)>& change,
                           ErrorCode code = ErrorCode::kInvalidArgument) {
    scene.clear();
    PagedAttentionArgs args = scene.args();
    change(args);
    expect_refused(
        text, [&] { attention(args); }, code);
    EXPECT_TRUE(scene.untouched()) << text;
    attention(scene.args());
    EXPECT_EQ(scene.out, right) << text;
  };
  using Args = PagedAttentionArgs;
  const std::vector<int32_t> one{20}, negative{20, -3}, huge{20, 2147483647}, three{0, 1, 4, 4}, late{1, 1, 4},
      falling{0, 3, 2}, beyond{0, 1, 5};
  refused("q has rank 2; it must be [tokens, num_q_heads, head_dim_qk]", [](Args& a) { a.q.rank = 2; });
  refused("q has -1 tokens", [](Args& a) { a.q.shape[0] = -1; });
  refused("q has 0 heads", [](Args& a) { a.q.shape[1] = 0; });
  refused("q has head_dim 32; the cache's keys have 64", [](Args& a) { a.q.shape[2] = 32; });
  refused("num_q_heads is 5, which is no multiple of num_kv_heads (2)", [](Args& a) { a.q.shape[1] = 5; });
  refused("q.dtype is unset", [](Args& a) { a.q.dtype = DType::kUnset; });
  refused("q.data is null", [](Args& a) { a.q.data = nullptr; });
  refused("out.dtype is unset", [](Args& a) { a.out.dtype = DType::kUnset; });
  refused("out is [3, 6, 64]; it must be [4, 6, 64]", [](Args& a) { a.out.shape[0] = 3; });
  refused(
      "out is fp4_e2m1x2, which needs block scales", [](Args& a) { a.out.dtype = DType::kFloat4E2M1x2; },
      ErrorCode::kUnsupported);
  refused("out overlaps q", [](Args& a) { a.out.data = const_cast<void*>(a.q.data); });
  refused("seq_lens[1] is -3", [&](Args& a) { a.seq_lens = negative; });
  refused("seq_lens[1] is 2147483647", [&](Args& a) { a.seq_lens = huge; });
  refused("cu_q has 3 entries; seq_lens has 1 requests", [&](Args& a) { a.seq_lens = one; });
  refused("cu_q has 4 entries; seq_lens has 2 requests", [&](Args& a) { a.cu_q = three; });
  refused("q has 4 tokens and seq_lens 2 requests; without cu_q every request has one token",
          [](Args& a) { a.cu_q = {}; });
  refused("cu_q[0] is 1", [&](Args& a) { a.cu_q = late; });
  refused("cu_q falls from 3 to 2 at request 1", [&](Args& a) { a.cu_q = falling; });
  refused("cu_q ends at 5; q has 4 tokens", [&](Args& a) { a.cu_q = beyond; });
  refused("page_table has 1 rows; seq_lens has 2 requests", [](Args& a) { a.page_table.num_rows = 1; });
  refused("window_right is 2 with causal", [](Args& a) { a.window_right = 2; });
  refused("window_left is -7", [](Args& a) { a.window_left = -7; });
  refused("logits_soft_cap is -1", [](Args& a) { a.logits_soft_cap = -1.0f; });
  refused("sm_scale is ", [](Args& a) { a.sm_scale = std::numeric_limits<float>::quiet_NaN(); });
  refused("k_scale.value is 0", [](Args& a) { a.k_scale.value = 0.0f; });
  refused("q_scale", [](Args& a) { a.q_scale.value = 2.0f; });
  refused("out_scale", [](Args& a) { a.out_scale.value = 2.0f; });
  refused("determinism is 9", [](Args& a) { a.determinism = static_cast<Determinism>(9); });
  refused("num_kv_heads", [](Args& a) { a.cache.num_kv_heads = -2; });
  refused("k is null", [](Args& a) { a.cache.k = nullptr; });
  refused(
      "q is int8", [](Args& a) { a.q.dtype = a.out.dtype = DType::kInt8; }, ErrorCode::kUnsupported);
}

TEST(PagedAttention, PageIds_AreCheckedOnACpu) {
  FOLIO_CPU_ONLY("a GPU's are trusted, or checked where the context says so");
  PagedAttention attention(Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}}));
  Scene scene(variants()[0], {1, 3}, {20, 40});
  scene.table[1] = static_cast<int32_t>(scene.shape.num_pages);
  expect_refused("row 0, column 1 of the table is page", [&] { attention(scene.args()); });
  EXPECT_TRUE(scene.untouched());
  scene.table[1] = -1;
  expect_refused("row 0, column 1 of the table is page -1", [&] { attention(scene.args()); });
  scene.table[1] = 0;
  PagedAttentionArgs args = scene.args();
  args.page_table.row_stride = 2;  // 40 keys need 3 pages
  expect_refused("row", [&] { attention(args); });
  EXPECT_TRUE(scene.untouched());
  args.page_table = {};
  args.page_table.num_rows = 2;
  args.page_table.kind = PageTableKind::kDense;
  expect_refused("", [&] { attention(args); });
}

TEST(PagedAttention, AStreamOfACpu_IsRefused) {
  int stream = 0;
  expect_refused("a stream is given with a CPU's context", [&] { PagedAttention(Context::cpu(), Stream{&stream}); });
}

TEST(PagedAttention, NoRequests_WriteNothing) {
  PagedAttention attention(device_context());
  Scene scene(variants()[0], {1}, {20});
  PagedAttentionArgs args = scene.args();
  args.seq_lens = {};
  args.cu_q = {};
  args.q.shape[0] = args.out.shape[0] = 0;
  attention(args);
  EXPECT_TRUE(scene.untouched());
}

}  // namespace
}  // namespace folio::inline v0::attention
