#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "folio/types/float_convert.hpp"
#include "token_pool_server.hpp"

namespace folio::cuda_test {
namespace {

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
    const CapturedGraph graph(stream, [&] { gpu.forward(shape, GetParam(), stream.get()); });
    for (int i = 0; i < replays; ++i) {
      const HostStep next = step(mode, kRequests, tree);
      gpu.set(next);
      gpu.out.fill(0xff);
      const int64_t sum = std::accumulate(next.seq_lens.begin(), next.seq_lens.end(), int64_t{0});
      const ForwardBatch batch = gpu.batch(next);
      extras.spec_info = batch.spec_info;
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
    expect_replays_equal_eager_steps(mode, /*tree=*/false, repeats(1000));
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
  expect_replays_equal_eager_steps(ForwardMode::kTargetVerify, /*tree=*/true, repeats(1000));
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
      ForwardBatch bare = gpu.batch(next);
      bare.spec_info.tree_mask_cpu = {};
      EXPECT_THROW(gpu.backend.init_forward_metadata(bare, stream.get()), Error);
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
