#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "backends/token_pool/pool_test_util.hpp"
#include "backends/token_pool/refusal_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using ::testing::HasSubstr;
using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;
using testing::refusal;
using Ints = std::vector<int32_t>;

const PoolLengths kExtends{.mode = ForwardMode::kExtend, .prefix = {2, 4, 0, 9}, .fresh = {3, 1, 5, 7}};
const PoolLengths kDecodes{.mode = ForwardMode::kDecode, .prefix = {14, 3, 0, 70}, .fresh = {1, 1, 1, 1}};

/// Extends by either path.
std::vector<PoolSetup> by_path(PoolSetup setup) {
  setup.extend_path = ExtendPath::kPaged;
  PoolSetup ragged = setup;
  ragged.extend_path = ExtendPath::kRagged;
  return {setup, ragged};
}

/// Schedulers need not make extends two tokens long: the ragged side is exact with one query and one key.
TEST(TokenPoolForward, ExtendsOfOneTokenAreExact) {
  for (const PoolSetup& setup : by_path({})) {
    for (const int32_t prefix : {0, 1, 2, 63, 64, 65}) {
      PoolFixture fixture(setup, {.mode = ForwardMode::kExtend, .prefix = {prefix}, .fresh = {1}});
      EXPECT_EQ(fixture.wrong_step(), "") << prefix;
    }
  }
}

/// New tokens are not read twice, nor those behind a query, and the window holds on both sides.
TEST(TokenPoolForward, WindowsHoldOnBothSidesOfAnExtend) {
  for (PoolSetup setup : by_path({})) {
    for (const int32_t window : {0, 1, 3, 8, 100}) {
      setup.window = window;
      PoolFixture fixture(setup, kExtends);
      EXPECT_EQ(fixture.wrong_step(), "") << window;
      EXPECT_EQ(fixture.wrong_step(fixture.full_layer()), "") << window;
      PoolFixture fresh(setup, {.mode = ForwardMode::kExtend, .prefix = {0}, .fresh = {20}});
      EXPECT_EQ(fresh.wrong_step(), "") << window;
    }
  }
}

TEST(TokenPoolForward, SoftCapsHoldWithWindowsAndPrefixes) {
  for (PoolSetup setup : by_path({})) {
    setup.logit_cap = 0.7f;
    setup.window = 3;
    PoolFixture fixture(setup, kExtends);
    EXPECT_EQ(fixture.wrong_step(), "");
    PoolFixture decodes(setup, kDecodes);
    EXPECT_EQ(decodes.wrong_step(), "");
  }
  PoolSetup other_layers;
  other_layers.logit_caps = true;
  PoolFixture fixture(other_layers, kDecodes);
  EXPECT_EQ(fixture.wrong_step(), "") << "a layer without cap beside layers with one";
}

TEST(TokenPoolForward, ValuesMayHaveAnotherHeadDim) {
  for (PoolSetup setup : by_path({})) {
    setup.head_dim = 24;
    setup.v_head_dim = 40;
    PoolFixture fixture(setup, kExtends);
    EXPECT_EQ(fixture.wrong_step(), "");
    PoolFixture decodes(setup, kDecodes);
    EXPECT_EQ(decodes.wrong_step(), "");
  }
}

/// Quantised when stored, by the layer's scales, and multiplied by them when read; new tokens handed over are exact.
TEST(TokenPoolForward, Fp8CachesHaveScalesOnEveryPath) {
  for (PoolSetup setup : by_path({})) {
    setup.q_dtype = DType::kBFloat16;
    setup.k_scale = 0.5f;
    setup.v_scale = 0.125f;
    for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      setup.kv_dtype = dtype;
      PoolFixture fixture(setup, kExtends);
      EXPECT_EQ(fixture.wrong_step(), "");
      PoolFixture decodes(setup, kDecodes);
      EXPECT_EQ(decodes.wrong_step(), "");
    }
  }
}

TEST(TokenPoolForward, PoolsOfAnyLayoutAndPageSize) {
  for (const KvPoolLayout layout : {KvPoolLayout::kTokenMajor, KvPoolLayout::kHeadMajor, KvPoolLayout::kCpuPacked}) {
    if (layout == KvPoolLayout::kCpuPacked && folio::testing::on_gpu()) continue;
    for (PoolSetup setup : by_path({})) {
      setup.q_dtype = setup.kv_dtype = DType::kBFloat16;
      setup.page_size = 16;
      setup.pool_layout = layout;
      setup.window = 18;
      PoolFixture fixture(setup, {.mode = ForwardMode::kExtend, .prefix = {40, 0, 17}, .fresh = {3, 20, 1}});
      EXPECT_EQ(fixture.wrong_step(), "") << static_cast<int>(layout);
      PoolFixture decodes(setup, kDecodes);
      EXPECT_EQ(decodes.wrong_step(), "") << static_cast<int>(layout);
    }
  }
}

/// Layers that share another's cache give no k and v: the new tokens are read from their slots, not from slots 0 to n.
TEST(TokenPoolForward, WithoutKAndVReadTheCache) {
  for (PoolSetup setup : by_path({})) {
    setup.window = 5;
    PoolFixture fixture(setup, kExtends);
    TokenPoolBackend backend(fixture.context, fixture.config());
    backend.init_forward_metadata(fixture.batch);
    for (const RadixAttention& layer : {fixture.layer(), fixture.full_layer()}) {
      fixture.forward(backend, layer);
      fixture.clear_output();
      layer.forward(backend, fixture.q, {}, {}, fixture.batch, fixture.out);
      EXPECT_EQ(fixture.wrong_output(layer, false), "");
      fixture.clear_output();
      fixture.forward(backend, layer);  // and layers behind it read as before
      EXPECT_EQ(fixture.wrong_output(layer, setup.extend_path == ExtendPath::kRagged), "");
    }
  }
}

/// The same where kv_indptr lies in a buffer that was given: what such a layer reads is in memory of its own.
TEST(TokenPoolForward, ReadingTheCacheLeavesGivenBuffersAlone) {
  PoolSetup setup;
  setup.extend_path = ExtendPath::kRagged;
  PoolFixture fixture(setup, kExtends);
  TokenPoolConfig config = fixture.config();
  Ints indptr(static_cast<size_t>(config.max_req_pool_size) + 1);
  config.kv_indptr_buf = indptr;
  TokenPoolBackend backend(fixture.context, config);
  backend.init_forward_metadata(fixture.batch);
  const Ints before = indptr;
  EXPECT_EQ(before[4], 15) << "the prefixes";
  fixture.forward(backend, fixture.layer());
  fixture.layer().forward(backend, fixture.q, {}, {}, fixture.batch, fixture.out);
  EXPECT_EQ(fixture.wrong_output(fixture.layer(), false), "");
  EXPECT_EQ(indptr, before);
  fixture.clear_output();
  fixture.forward(backend, fixture.layer());
  EXPECT_EQ(fixture.wrong_output(fixture.layer(), true), "");
}

TEST(TokenPoolForward, StoresOnlyWhereItIsAskedTo) {
  for (const PoolSetup& setup : by_path({})) {
    PoolFixture fixture(setup, kExtends);
    TokenPoolBackend backend(fixture.context, fixture.config());
    backend.init_forward_metadata(fixture.batch);
    fixture.forward(backend, fixture.layer(), /*save_kv_cache=*/false);
    EXPECT_NE(fixture.wrong_cache(), "") << "nothing was to be stored";
    fixture.forward(backend, fixture.layer());
    EXPECT_EQ(fixture.wrong_cache(), "");
    fixture.clear_output();
    fixture.forward(backend, fixture.layer(), /*save_kv_cache=*/false);
    EXPECT_EQ(fixture.wrong_output(fixture.layer(), setup.extend_path == ExtendPath::kRagged), "");
  }
}

TEST(TokenPoolForward, TakesHeadsApart) {
  PoolFixture fixture({}, kDecodes);
  TokenPoolBackend backend(fixture.context, fixture.config());
  backend.init_forward_metadata(fixture.batch);
  const auto apart = [](auto tensor, int64_t heads, int64_t dim) {
    return decltype(tensor)(tensor.data, tensor.dtype, {tensor.shape[0], heads, dim});
  };
  backend.forward_decode(apart(fixture.q, 4, 16), apart(fixture.k, 2, 16), apart(fixture.v, 2, 16), fixture.layer(),
                         fixture.batch, apart(fixture.out, 4, 16));
  EXPECT_EQ(fixture.wrong_output(fixture.layer(), false), "");
}

TEST(TokenPoolForward, IdleBatchesGiveZeros) {
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {3, 4}, .fresh = {1, 1}});
  TokenPoolBackend backend(fixture.context, fixture.config());
  ForwardBatch idle;
  idle.forward_mode = ForwardMode::kIdle;
  backend.init_forward_metadata(idle);
  fixture.layer().forward(backend, fixture.q, {}, {}, idle, fixture.out);
  folio::testing::wait_for_device();
  EXPECT_TRUE(std::ranges::all_of(fixture.out_memory, [](std::byte byte) { return byte == std::byte{0}; }));
  const TensorView none(nullptr, fixture.setup.q_dtype, {0, 64});
  fixture.layer().forward(backend, none, {}, {}, idle, none);
}

/// Requests of length 0 are padding as well as requests of length 1: their outputs are zeros.
TEST(TokenPoolForward, EmptyRequestsGiveZeros) {
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {3, 0}, .fresh = {1, 1}});
  fixture.seq_lens[1] = 0;
  fixture.batch.seq_lens_sum = -1;
  TokenPoolBackend backend(fixture.context, fixture.config());
  backend.init_forward_metadata(fixture.batch);
  fixture.forward(backend, fixture.layer());
  const auto row = fixture.out_memory.size() / 2;
  for (size_t i = row; i < 2 * row; ++i) ASSERT_EQ(fixture.out_memory[i], std::byte{0});
}

TEST(TokenPoolForward, EmptyBatchesAreTaken) {
  PoolFixture fixture({}, {.mode = ForwardMode::kExtend});
  EXPECT_EQ(fixture.wrong_step(), "");
  PoolFixture decodes({}, {.mode = ForwardMode::kDecode});
  EXPECT_EQ(decodes.wrong_step(), "");
}

TEST(TokenPoolCrossAttention, SeesTheEncoderAndSelfAttentionDoesNot) {
  for (PoolSetup setup : by_path({})) {
    setup.encoder_decoder = true;
    for (const int32_t page_size : {1, 4}) {
      setup.page_size = page_size;
      for (PoolLengths lengths : {kExtends, kDecodes}) {
        lengths.encoder = {8, 4, 12, 0};
        PoolFixture fixture(setup, lengths);
        TokenPoolBackend backend(fixture.context, fixture.config());
        EXPECT_EQ(backend.dispatch_reason(), WrapperDispatch::kCrossAttention);
        backend.init_forward_metadata(fixture.batch);
        const bool ragged = lengths.mode == ForwardMode::kExtend && setup.extend_path == ExtendPath::kRagged;
        fixture.forward(backend, fixture.layer());
        EXPECT_EQ(fixture.wrong_output(fixture.layer(), ragged), "");
        const RadixAttention cross = fixture.cross_layer();
        fixture.clear_output();
        fixture.forward(backend, cross);
        EXPECT_EQ(fixture.wrong_output(cross, false), "");
        fixture.clear_output();
        cross.forward(backend, fixture.q, {}, {}, fixture.batch, fixture.out);  // later steps: encoded already
        EXPECT_EQ(fixture.wrong_output(cross, false), "");
      }
    }
  }
}

/// Whisper's 1500 tokens are 93 pages of 16 and 12 tokens: what stands behind begins inside a page, or with one of its
/// own inside a page of columns.
TEST(TokenPoolCrossAttention, EncodersThatEndInsideAPage_GiveAttention) {
  for (PoolSetup setup : by_path({})) {
    setup.encoder_decoder = true;
    setup.page_size = 16;
    for (const bool joint : {false, true}) {
      setup.joint_pages = joint;
      for (PoolLengths lengths : {kExtends, kDecodes}) {
        lengths.encoder = {20, 48, 100, 0};
        PoolFixture fixture(setup, lengths);
        TokenPoolBackend backend(fixture.context, fixture.config());
        backend.init_forward_metadata(fixture.batch);
        const bool ragged = lengths.mode == ForwardMode::kExtend && setup.extend_path == ExtendPath::kRagged;
        fixture.forward(backend, fixture.layer());
        EXPECT_EQ(fixture.wrong_output(fixture.layer(), ragged), "");
        const RadixAttention cross = fixture.cross_layer();
        fixture.clear_output();
        fixture.forward(backend, cross);
        EXPECT_EQ(fixture.wrong_output(cross, false), "");
      }
    }
  }
}

/// Pages that cannot be read slot by slot: refused, not misread.
TEST(TokenPoolCrossAttention, EncodersThatEndInsideAPageOfHeadMajorPools_AreRefused) {
  PoolSetup setup;
  setup.encoder_decoder = true;
  setup.page_size = 16;
  setup.pool_layout = KvPoolLayout::kHeadMajor;
  PoolLengths lengths{.mode = ForwardMode::kDecode, .prefix = {5, 9}, .fresh = {1, 1}, .encoder = {16, 20}};
  PoolFixture fixture(setup, lengths);
  TokenPoolBackend backend(fixture.context, fixture.config());
  EXPECT_THAT(refusal([&] { backend.init_forward_metadata(fixture.batch); }),
              HasSubstr("request 1 starts at position 20; pages of 16 tokens start at its multiples"));
  lengths.encoder = {16, 32};
  PoolFixture whole(setup, lengths);
  EXPECT_EQ(whole.wrong_step(), "");
}

/// What the host knows is refused on the host, on a GPU too.
TEST(TokenPoolForward, PositionsBeyondTheRow_AreRefused) {
  PoolSetup setup;
  setup.encoder_decoder = true;
  PoolFixture fixture(setup, {.mode = ForwardMode::kDecode, .prefix = {5, 9}, .fresh = {1, 1}, .encoder = {3, 2}});
  TokenPoolBackend backend(fixture.context, fixture.config());
  const std::vector<int32_t> encoders{3, 6};
  fixture.batch.encoder_lens = encoders;
  if (folio::testing::on_gpu()) fixture.batch.encoder_lens_cpu = encoders;
  EXPECT_THAT(refusal([&] { backend.init_forward_metadata(fixture.batch); }),
              HasSubstr("request 1 reads positions up to 16 of its row; rows have 15"));
}

TEST(TokenPoolAttentionTypes, BidirectionalLayersSeeWhatIsBehindThem) {
  for (PoolSetup setup : by_path({})) {
    PoolFixture fixture(setup, kExtends);
    TokenPoolBackend backend(fixture.context, fixture.config());
    backend.init_forward_metadata(fixture.batch);
    RadixAttention layer = fixture.layer();
    layer.attn_type = RadixAttentionType::kDecoderBidirectional;
    const bool ragged = setup.extend_path == ExtendPath::kRagged;
    fixture.forward(backend, layer);
    EXPECT_EQ(fixture.wrong_output(layer, ragged), "");
    EXPECT_EQ(fixture.wrong_cache(), "");
    fixture.clear_output();
    fixture.forward(backend, fixture.layer());
    EXPECT_EQ(fixture.wrong_output(fixture.layer(), ragged), "");
  }
  PoolFixture decodes({}, kDecodes);
  RadixAttention layer = decodes.layer();
  layer.attn_type = RadixAttentionType::kDecoderBidirectional;
  EXPECT_EQ(decodes.wrong_step(layer), "") << "a decode has nothing behind it";
}

TEST(TokenPoolAttentionTypes, EncoderOnlyLayersCacheNothing) {
  for (const PoolSetup& setup : by_path({})) {
    PoolFixture fixture(setup, {.mode = ForwardMode::kExtend, .prefix = {0, 0}, .fresh = {5, 3}});
    TokenPoolBackend backend(fixture.context, fixture.config());
    backend.init_forward_metadata(fixture.batch);
    RadixAttention layer = fixture.layer();
    layer.attn_type = RadixAttentionType::kEncoderOnly;
    fixture.forward(backend, layer);
    EXPECT_EQ(fixture.wrong_output(layer, true), "");
    EXPECT_NE(fixture.wrong_cache(), "");
  }
}

TEST(TokenPoolDispatch, ServesEachLayerByItsWrapper) {
  PoolSetup setup;
  setup.window = 5;
  PoolFixture windowed(setup, kDecodes);
  TokenPoolBackend backend(windowed.context, windowed.config());
  EXPECT_EQ(backend.dispatch_reason(), WrapperDispatch::kSlidingWindow);
  EXPECT_EQ(backend.num_wrappers(), 2);
  EXPECT_EQ(backend.wrapper_index(windowed.layer()), 0);
  EXPECT_EQ(backend.wrapper_index(windowed.full_layer()), 1);
  PoolFixture plain({}, kDecodes);
  TokenPoolBackend single(plain.context, plain.config());
  EXPECT_EQ(single.dispatch_reason(), WrapperDispatch::kNone);
  EXPECT_EQ(single.num_wrappers(), 1);
  EXPECT_EQ(single.wrapper_index(plain.layer()), 0);
  EXPECT_EQ(single.decode_use_tensor_cores(), should_use_tensor_core(plain.setup.q_dtype, 4, 2));
  EXPECT_FALSE(single.kernel_name().empty());
}

/// A request's bits do not depend on the others of its batch.
TEST(TokenPoolDeterminism, BatchInvariantRowsKeepTheirBits) {
  for (const ForwardMode mode : {ForwardMode::kExtend, ForwardMode::kDecode}) {
    PoolSetup setup;
    setup.determinism = Determinism::kBatchInvariant;
    setup.window = 40;
    const int32_t fresh = mode == ForwardMode::kDecode ? 1 : 700;
    const int32_t prefix = mode == ForwardMode::kDecode ? 300 : 0;  // alone, such an extend would cost less ragged
    PoolFixture alone(setup, {.mode = mode, .prefix = {prefix}, .fresh = {fresh}});
    PoolFixture together(setup, {.mode = mode, .prefix = {prefix, 0, 90}, .fresh = {fresh, 1, 1}});
    EXPECT_EQ(alone.wrong_step(), "");
    // The same tokens: the first request's.
    together.q_memory.assign(alone.q_memory.begin(), alone.q_memory.end());
    together.q_memory.resize(static_cast<size_t>(together.num_tokens() * 4 * 16 * size_of(together.setup.q_dtype)));
    together.q.data = together.q_memory.data();
    TokenPoolBackend backend(together.context, together.config());
    backend.init_forward_metadata(together.batch);
    together.forward(backend, together.layer());
    EXPECT_FALSE(mode == ForwardMode::kExtend && std::get<PrefillMetadata>(backend.forward_metadata()).use_ragged);
    EXPECT_EQ(std::memcmp(alone.out_memory.data(), together.out_memory.data(), alone.out_memory.size()), 0);
  }
}

/// Nor on how its tokens were divided over steps, with a window or without.
TEST(TokenPoolDeterminism, ScheduleInvariantTokensKeepTheirBits) {
  constexpr int32_t kTokens = 700;
  for (const int32_t which : {0, 1, 2, 3}) {
    if (folio::testing::kInstrumented && (which == 0 || which == 3)) continue;
    PoolSetup setup;
    setup.determinism = Determinism::kScheduleInvariant;
    if (which % 2 == 1) setup.window = 75;
    if (which >= 2) setup.q_dtype = setup.kv_dtype = DType::kBFloat16;
    PoolFixture whole(setup, {.mode = ForwardMode::kExtend, .prefix = {0}, .fresh = {kTokens}});
    const DType dtype = whole.setup.q_dtype;
    EXPECT_EQ(whole.wrong_step(), "");
    const auto row = whole.out_memory.size() / kTokens;
    TokenPoolBackend backend(whole.context, whole.config());
    std::vector<std::byte> out(whole.out_memory.size());
    int32_t first = 0;
    for (const int32_t count : {1, 130, 17, 1, 1, 300, 249, 1}) {
      const Ints prefix{first}, seq_lens{first + count};
      ForwardBatch batch = whole.batch;
      batch.forward_mode = count == 1 ? ForwardMode::kDecode : ForwardMode::kExtend;
      batch.seq_lens = batch.seq_lens_cpu = seq_lens;
      batch.seq_lens_sum = -1;
      batch.extend_seq_lens = batch.extend_seq_lens_cpu = {};
      batch.extend_prefix_lens = count == 1 ? std::span<const int32_t>() : std::span<const int32_t>(prefix);
      batch.extend_prefix_lens_cpu = batch.extend_prefix_lens;
      batch.out_cache_loc = batch.out_cache_loc.subspan(static_cast<size_t>(first), static_cast<size_t>(count));
      const auto tokens = [&](auto view) {
        const auto* data = static_cast<const std::byte*>(view.data);
        return ConstTensorView(data + first * view.shape[1] * size_of(dtype), dtype, {count, view.shape[1]});
      };
      backend.init_forward_metadata(batch);
      whole.layer().forward(
          backend, tokens(whole.q), tokens(whole.k), tokens(whole.v), batch,
          TensorView(out.data() + first * static_cast<int64_t>(row), dtype, {count, whole.out.shape[1]}));
      first += count;
    }
    ASSERT_EQ(first, kTokens);
    for (int32_t token = 0; token < kTokens; ++token) {
      const auto at = static_cast<size_t>(token) * row;
      ASSERT_EQ(std::memcmp(out.data() + at, whole.out_memory.data() + at, row), 0)
          << "token " << token << ", case " << which;
    }
  }
}

/// They suffice for whatever is planned: a long decode's keys are divided.
TEST(TokenPoolWorkspaces, AreSharedOrPrivateAndGrowWithBackends) {
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {20000}, .fresh = {1}});
  PoolSetup wide;
  wide.v_head_dim = 256;
  PoolFixture wider(wide, kExtends);
  const auto shared = std::make_shared<TokenPoolWorkspace>(fixture.context);
  TokenPoolConfig config = fixture.config();
  config.workspace = shared;
  TokenPoolBackend first(fixture.context, config), second(fixture.context, config);
  TokenPoolBackend other(fixture.context, fixture.config());
  const size_t small = shared->bytes();
  EXPECT_GT(small, 0u);
  EXPECT_EQ(other.workspace()->bytes(), small);
  config = wider.config();
  config.workspace = shared;
  TokenPoolBackend third(fixture.context, config);
  EXPECT_GT(shared->bytes(), small);
  EXPECT_EQ(first.workspace(), second.workspace());
  EXPECT_NE(first.workspace(), other.workspace());
  for (TokenPoolBackend* backend : {&first, &second, &other}) {
    backend->init_forward_metadata(fixture.batch);
    fixture.clear_output();
    fixture.forward(*backend, fixture.layer());
    EXPECT_EQ(fixture.wrong_output(fixture.layer(), false), "");
  }
  third.init_forward_metadata(wider.batch);
  wider.forward(third, wider.layer());
  EXPECT_EQ(wider.wrong_output(wider.layer(), false), "");
}

}  // namespace
}  // namespace folio::inline v0::backends
