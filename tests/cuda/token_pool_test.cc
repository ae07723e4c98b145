#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "device_array.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/page_table.hpp"
#include "folio/pools.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::cuda_test {
namespace {

using namespace folio::backends;
using Ints = std::vector<int32_t>;
using Bits = std::vector<uint16_t>;

constexpr int32_t kRequests = 8, kContext = 600, kHeads = 8, kKvHeads = 2, kDim = 64, kDrafts = 3;
constexpr size_t kTreeBytes = (kDrafts * kDrafts + 7) / 8;  // of a request
constexpr int32_t kMaxTokens = kRequests * 40;
constexpr int32_t kSlots = (kRequests + 1) * kContext;

/// A step as a scheduler would have it, with its inputs.
struct HostStep {
  ForwardMode mode = ForwardMode::kDecode;
  Ints rows, seq_lens, prefix_lens;
  std::vector<int64_t> slots;
  Bits q, k, v;
  int32_t num_tokens = 0;
  std::vector<uint8_t> tree;    ///< who sees whom among the drafts; empty: chains
  int32_t num_live_tokens = 0;  ///< padding comes behind; what it reads is whatever of it was written last
};

/// A pool, a request table and a backend, on the CPU or on a GPU.
template <typename Memory, typename Slots, typename Lengths, typename Bytes>
struct Server {
  Server(const Context& context, const Ints& table, std::optional<int32_t> window, ExtendPath path)
      : table_memory(table),
        k_pool(size_t{kSlots + 1} * kKvHeads * kDim),
        v_pool(size_t{kSlots + 1} * kKvHeads * kDim),
        q(size_t{kMaxTokens} * kHeads * kDim),
        k(size_t{kMaxTokens} * kKvHeads * kDim),
        v(size_t{kMaxTokens} * kKvHeads * kDim),
        out(size_t{kMaxTokens} * kHeads * kDim),
        slots(kMaxTokens),
        tree(kRequests * kTreeBytes),
        rows(kRequests),
        seq_lens(kRequests),
        prefix_lens(kRequests),
        pool(pool_config(), std::vector<void*>{k_pool.data()}, std::vector<void*>{v_pool.data()}),
        backend(context, config(table_memory.data(), window, path)) {}

  static KvPoolConfig pool_config() {
    KvPoolConfig config;
    config.num_slots = kSlots;
    config.num_layers = 1;
    config.num_kv_heads = kKvHeads;
    config.head_dim_qk = config.head_dim_v = kDim;
    config.dtype = DType::kBFloat16;
    return config;
  }
  static TokenPoolConfig config(const int32_t* table, std::optional<int32_t> window, ExtendPath path) {
    TokenPoolConfig config;
    config.num_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim = kDim;
    config.q_dtype = config.kv_cache_dtype = DType::kBFloat16;
    config.max_context_len = kContext;
    config.req_to_token = dense_table({table, size_t{kRequests + 1} * kContext}, kRequests + 1, kContext);
    config.max_req_pool_size = kRequests;
    config.sliding_window_size = window;
    config.extend_path = path;
    config.determinism = Determinism::kBatchInvariant;
    return config;
  }

  void set(const HostStep& step) {
    const auto padded = [](auto values, size_t size) {
      values.resize(size);
      return values;
    };
    rows.set(padded(step.rows, kRequests));
    seq_lens.set(padded(step.seq_lens, kRequests));
    prefix_lens.set(padded(step.prefix_lens, kRequests));
    slots.set(padded(step.slots, kMaxTokens));
    tree.set(padded(step.tree, kRequests * kTreeBytes));
    q.set(padded(step.q, size_t{kMaxTokens} * kHeads * kDim));
    k.set(padded(step.k, size_t{kMaxTokens} * kKvHeads * kDim));
    v.set(padded(step.v, size_t{kMaxTokens} * kKvHeads * kDim));
  }

  ForwardBatch batch(const HostStep& step) const {
    const auto count = step.rows.size();
    ForwardBatch batch;
    batch.forward_mode = step.mode;
    batch.batch_size = static_cast<int32_t>(count);
    batch.req_pool_indices = {rows.data(), count};
    batch.seq_lens = {seq_lens.data(), count};
    batch.seq_lens_cpu = step.seq_lens;
    batch.out_cache_loc = {slots.data(), step.slots.size()};
    if (is_extend(step.mode)) {
      batch.extend_prefix_lens = {prefix_lens.data(), count};
      batch.extend_prefix_lens_cpu = step.prefix_lens;
    }
    if (is_target_verify(step.mode)) batch.spec_info = spec_info(step);
    batch.token_to_kv_pool = &pool;
    return batch;
  }

  SpecInfo spec_info(const HostStep& step) const {
    SpecInfo spec;
    spec.draft_token_num = kDrafts;
    spec.tree_mask = {tree.data(), step.tree.size()};
    return spec;
  }

  void forward(const HostStep& step, std::optional<int32_t> window, Stream stream) {
    RadixAttention layer;
    layer.num_heads = kHeads;
    layer.num_kv_heads = kKvHeads;
    layer.head_dim = kDim;
    layer.sliding_window_size = window.value_or(-1);
    const int64_t tokens = step.num_tokens;
    const auto view = [tokens](uint16_t* data, int64_t heads) {
      return TensorView(data, DType::kBFloat16, {tokens, heads * kDim});
    };
    const auto read = [&](uint16_t* data, int64_t heads) {
      return ConstTensorView(data, DType::kBFloat16, {tokens, heads * kDim});
    };
    layer.forward(backend, read(q.data(), kHeads), read(k.data(), kKvHeads), read(v.data(), kKvHeads), batch(step),
                  view(out.data(), kHeads), true, stream);
  }

  Bits output(const HostStep& step) const {
    Bits values = out.get();
    values.resize(static_cast<size_t>(step.num_live_tokens) * kHeads * kDim);
    return values;
  }

  Lengths table_memory;
  Memory k_pool, v_pool, q, k, v, out;
  Slots slots;
  Bytes tree;
  Lengths rows, seq_lens, prefix_lens;
  KvPool pool;
  TokenPoolBackend backend;
};

/// A host's array with a device array's functions.
template <typename T>
struct HostArray {
  explicit HostArray(size_t size) : values(size) {}
  explicit HostArray(const std::vector<T>& given) : values(given) {}
  T* data() const { return values.data(); }
  void set(const std::vector<T>& given) { std::copy(given.begin(), given.end(), values.begin()); }
  const std::vector<T>& get() const { return values; }
  mutable std::vector<T> values;
};

using HostServer = Server<HostArray<uint16_t>, HostArray<int64_t>, HostArray<int32_t>, HostArray<uint8_t>>;
using GpuServer = Server<DeviceArray<uint16_t>, DeviceArray<int64_t>, DeviceArray<int32_t>, DeviceArray<uint8_t>>;

/// A captured run of the layer.
class LayerGraph {
 public:
  LayerGraph(GpuServer& gpu, const HostStep& shape, std::optional<int32_t> window, const TestStream& stream) {
    check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal));
    gpu.forward(shape, window, stream.get());
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream.native(), &graph));
    check(cudaGraphInstantiate(&executable_, graph, 0));
    check(cudaGraphDestroy(graph));
  }
  ~LayerGraph() { static_cast<void>(cudaGraphExecDestroy(executable_)); }
  LayerGraph(const LayerGraph&) = delete;
  LayerGraph& operator=(const LayerGraph&) = delete;
  void launch(const TestStream& stream) const { check(cudaGraphLaunch(executable_, stream.native())); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

/// Trees are for kernels that take custom masks.
bool trees_are_taken() {
  AttentionConfig config;
  config.num_q_heads = kHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim_qk = config.head_dim_v = kDim;
  config.q = config.kv = DType::kBFloat16;
  config.mask = MaskKind::kCustom;
  const std::vector<KernelAnswer> answers = explain(Context::cuda(0), config);
  return std::ranges::any_of(answers, [](const KernelAnswer& answer) { return answer.refusal.empty(); });
}

class TokenPoolOnGpu : public CudaTest, public testing::WithParamInterface<std::optional<int32_t>> {
 protected:
  TokenPoolOnGpu() {
    slots_.resize(kSlots);
    std::iota(slots_.begin(), slots_.end(), 1);
    std::shuffle(slots_.begin(), slots_.end(), random_);
    table_.assign(kContext, 0);  // the dummy row
    table_.insert(table_.end(), slots_.begin(), slots_.begin() + std::ptrdiff_t{kRequests} * kContext);
  }

  int32_t between(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(random_); }

  HostStep step(ForwardMode mode, int32_t padded_bs, bool tree = false) {
    HostStep step;
    step.mode = mode;
    const int32_t live = between(1, kRequests);
    for (int32_t r = 0; r < std::max(live, padded_bs); ++r) {
      const bool padding = r >= live;
      const int32_t fresh = mode == ForwardMode::kDecode ? 1 : mode == ForwardMode::kExtend ? between(1, 40) : kDrafts;
      const int32_t prefix = padding ? 0 : between(0, kContext - 41);
      step.rows.push_back(padding ? 0 : r + 1);
      step.prefix_lens.push_back(prefix);
      step.seq_lens.push_back(padding ? 1 : is_target_verify(mode) ? prefix : prefix + fresh);
      for (int32_t i = 0; i < fresh; ++i) {
        step.slots.push_back(padding ? 0 : table_[static_cast<size_t>((r + 1) * kContext + prefix + i)]);
      }
      step.num_tokens += fresh;
      if (tree) append_tree(step.tree);
      if (!padding) step.num_live_tokens += fresh;
    }
    const auto values = [&](int32_t heads) {
      std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
      Bits bits(static_cast<size_t>(step.num_tokens) * static_cast<size_t>(heads) * kDim);
      for (uint16_t& value : bits) value = float_to_bfloat16(uniform(random_));
      return bits;
    };
    step.q = values(kHeads);
    step.k = values(kKvHeads);
    step.v = values(kKvHeads);
    return step;
  }

  /// Every draft sees itself and its ancestors: parents are drawn.
  void append_tree(std::vector<uint8_t>& bits) {
    const size_t first = bits.size();
    bits.resize(first + kTreeBytes);
    std::array<int32_t, kDrafts> parents{};
    for (int32_t row = 0; row < kDrafts; ++row) {
      parents[static_cast<size_t>(row)] = row == 0 ? -1 : between(0, row - 1);
      for (int32_t seen = row; seen >= 0; seen = parents[static_cast<size_t>(seen)]) {
        const int32_t bit = row * kDrafts + seen;
        uint8_t& byte = bits[first + static_cast<size_t>(bit / 8)];
        byte = static_cast<uint8_t>(byte | 1 << bit % 8);
      }
    }
  }

  /// Captures a batch of the mode once and replays it with other lengths, rows, slots, trees and padding: the bits of
  /// an eager step of the same batch.
  void expect_replays_equal_eager_steps(ForwardMode mode, bool tree, int replays) {
    GpuServer gpu(Context::cuda(0), table_, GetParam(), ExtendPath::kPaged);
    fill_pools(gpu);
    const TestStream stream;
    gpu.backend.init_cuda_graph_state(kRequests, kRequests * kDrafts);
    const HostStep shape = step(mode, kRequests, tree);
    gpu.set(shape);
    const ForwardBatch captured = gpu.batch(shape);
    GraphBatchExtras extras;
    extras.spec_info = captured.spec_info;
    gpu.backend.init_forward_metadata_capture_cuda_graph(kRequests, shape.num_tokens, captured.req_pool_indices,
                                                         captured.seq_lens, mode, extras, {}, stream.get());
    stream.wait();
    const LayerGraph graph(gpu, shape, GetParam(), stream);
    for (int i = 0; i < replays; ++i) {
      const HostStep next = step(mode, kRequests, tree);
      gpu.set(next);
      gpu.out.fill(0xff);
      const int64_t sum = std::accumulate(next.seq_lens.begin(), next.seq_lens.end(), int64_t{0});
      const ForwardBatch batch = gpu.batch(next);
      gpu.backend.init_forward_metadata_replay_cuda_graph(kRequests, batch.req_pool_indices, batch.seq_lens, sum, mode,
                                                          next.seq_lens, extras, stream.get());
      graph.launch(stream);
      stream.wait();
      const Bits replayed = gpu.output(next);
      gpu.out.fill(0xff);
      gpu.backend.init_forward_metadata(batch, stream.get());
      gpu.forward(next, GetParam(), stream.get());
      stream.wait();
      ASSERT_TRUE(replayed == gpu.output(next)) << "replay " << i << ", mode " << to_string(mode);
    }
  }

  void fill_pools(GpuServer& gpu, HostServer* host = nullptr) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    Bits values(size_t{kSlots + 1} * kKvHeads * kDim);
    for (uint16_t& value : values) value = float_to_bfloat16(uniform(random_));
    gpu.k_pool.set(values);
    if (host != nullptr) host->k_pool.set(values);
    std::reverse(values.begin(), values.end());
    gpu.v_pool.set(values);
    if (host != nullptr) host->v_pool.set(values);
  }

  std::mt19937 random_{11};
  Ints slots_, table_;
};

/// Both round weights and outputs to bfloat16 by themselves: values are means of numbers up to 1.
void expect_alike(const Bits& a, const Bits& b) {
  ASSERT_EQ(a.size(), b.size());
  float worst = 0.0f;
  for (size_t i = 0; i < a.size(); ++i) {
    const float difference = std::abs(bfloat16_to_float(a[i]) - bfloat16_to_float(b[i]));
    ASSERT_FALSE(std::isnan(difference)) << i;
    worst = std::max(worst, difference);
  }
  EXPECT_LE(worst, 0x1p-6f);
}

TEST_P(TokenPoolOnGpu, EagerStepsEqualTheCpus) {
  for (const ExtendPath path : {ExtendPath::kPaged, ExtendPath::kRagged}) {
    HostServer host(Context::cpu(), table_, GetParam(), path);
    GpuServer gpu(Context::cuda(0), table_, GetParam(), path);
    fill_pools(gpu, &host);
    const TestStream stream;
    for (int i = 0; i < 30; ++i) {
      const ForwardMode mode = i % 3 == 0   ? ForwardMode::kDecode
                               : i % 3 == 1 ? ForwardMode::kExtend
                                            : ForwardMode::kTargetVerify;
      const HostStep next = step(mode, 0);
      host.set(next);
      gpu.set(next);
      host.backend.init_forward_metadata(host.batch(next));
      gpu.backend.init_forward_metadata(gpu.batch(next), stream.get());
      host.forward(next, GetParam(), {});
      gpu.forward(next, GetParam(), stream.get());
      stream.wait();
      expect_alike(gpu.output(next), host.output(next));
    }
  }
}

TEST_P(TokenPoolOnGpu, AThousandReplaysEqualEagerSteps) {
  for (const ForwardMode mode : {ForwardMode::kDecode, ForwardMode::kTargetVerify}) {
    expect_replays_equal_eager_steps(mode, /*tree=*/false, 1000);
  }
}

/// Few enough to be watched by compute-sanitizer.
TEST_P(TokenPoolOnGpu, AFewReplaysEqualEagerSteps) {
  for (const ForwardMode mode : {ForwardMode::kDecode, ForwardMode::kTargetVerify}) {
    expect_replays_equal_eager_steps(mode, /*tree=*/false, 4);
  }
}

TEST_P(TokenPoolOnGpu, AThousandReplaysOfTreesEqualEagerSteps) {
  if (!trees_are_taken()) GTEST_SKIP() << "no kernel here takes custom masks";
  if (GetParam()) GTEST_SKIP() << "trees with a window are a CPU's";
  expect_replays_equal_eager_steps(ForwardMode::kTargetVerify, /*tree=*/true, 1000);
}

TEST_P(TokenPoolOnGpu, TreesEqualTheCpus) {
  if (!trees_are_taken()) GTEST_SKIP() << "no kernel here takes custom masks";
  HostServer host(Context::cpu(), table_, GetParam(), ExtendPath::kPaged);
  GpuServer gpu(Context::cuda(0), table_, GetParam(), ExtendPath::kPaged);
  fill_pools(gpu, &host);
  const TestStream stream;
  for (int i = 0; i < 5; ++i) {
    const HostStep next = step(ForwardMode::kTargetVerify, 0, /*tree=*/true);
    host.set(next);
    gpu.set(next);
    if (GetParam()) {
      EXPECT_THROW(gpu.backend.init_forward_metadata(gpu.batch(next), stream.get()), Error);
      continue;
    }
    host.backend.init_forward_metadata(host.batch(next));
    gpu.backend.init_forward_metadata(gpu.batch(next), stream.get());
    host.forward(next, GetParam(), {});
    gpu.forward(next, GetParam(), stream.get());
    stream.wait();
    expect_alike(gpu.output(next), host.output(next));
  }
}

/// What a replay finds on the device may be anything: a request whose row does not exist, or ends before its length
/// does, has no keys, and the others have theirs.
TEST_P(TokenPoolOnGpu, RequestsBeyondTheTableHaveNoKeys) {
  GpuServer gpu(Context::cuda(0), table_, GetParam(), ExtendPath::kPaged);
  fill_pools(gpu);
  const TestStream stream;
  gpu.backend.init_cuda_graph_state(kRequests, kRequests);
  HostStep next = step(ForwardMode::kDecode, kRequests);
  while (next.num_live_tokens < 3) next = step(ForwardMode::kDecode, kRequests);
  gpu.set(next);
  const ForwardBatch batch = gpu.batch(next);
  gpu.backend.init_forward_metadata_capture_cuda_graph(kRequests, kRequests, batch.req_pool_indices, batch.seq_lens,
                                                       ForwardMode::kDecode, {}, {}, stream.get());
  const int64_t sum = std::accumulate(next.seq_lens.begin(), next.seq_lens.end(), int64_t{0});
  const auto replay = [&] {
    gpu.out.fill(0xff);
    gpu.backend.init_forward_metadata_replay_cuda_graph(kRequests, batch.req_pool_indices, batch.seq_lens, sum,
                                                        ForwardMode::kDecode, next.seq_lens, {}, stream.get());
    gpu.forward(next, GetParam(), stream.get());
    stream.wait();
    return gpu.output(next);
  };
  Bits expected = replay();
  HostStep wrong = next;
  wrong.rows[0] = kRequests + 1;
  wrong.seq_lens[2] = kContext + 1;
  gpu.set(wrong);
  for (const size_t request : {size_t{0}, size_t{2}}) {
    std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(request * kHeads * kDim), kHeads * kDim, uint16_t{0});
  }
  EXPECT_TRUE(replay() == expected);
}

INSTANTIATE_TEST_SUITE_P(Windows, TokenPoolOnGpu, testing::Values(std::optional<int32_t>(), std::optional<int32_t>(37)),
                         [](const auto& window) { return std::string(window.param ? "Window" : "Full"); });

}  // namespace
}  // namespace folio::cuda_test
