#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/cache_test_util.hpp"
#include "core/expect_refused_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

using folio::testing::expect_refused;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Write {
  Rows k, v;
  std::vector<int64_t> slots;
  Scale k_scale, v_scale;

  CacheWriteArgs args(const KvCacheView& cache) {
    CacheWriteArgs a;
    a.k = k.view();
    a.v = v.view();
    a.slot_mapping = slots.data();
    a.num_slots = static_cast<int64_t>(slots.size());
    a.cache = cache;
    a.k_scale = k_scale;
    a.v_scale = v_scale;
    return a;
  }

  /// The write, one element after the other.
  void write_plainly(const KvCacheView& c) const {
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) continue;
      const int64_t page = slots[i] / c.page_size;
      const int64_t token = slots[i] % c.page_size;
      const auto t = static_cast<int64_t>(i);
      const auto scale = [&](const Scale& s, int64_t h) { return is_fp8(k.dtype) ? 1.0f : scale_of(s, 0, h); };
      for (int64_t h = 0; h < c.num_kv_heads; ++h) {
        for (int64_t d = 0; d < c.head_dim_qk; ++d) {
          move_element(k.memory.data(), k.dtype, k.index(t, h, d), 1.0f, c.k, c.dtype, k_index(c, page, token, h, d),
                       scale(k_scale, h));
        }
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          move_element(v.memory.data(), v.dtype, v.index(t, h, d), 1.0f, c.v, c.dtype, v_index(c, page, token, h, d),
                       scale(v_scale, h));
        }
      }
    }
  }
};

/// Slots in random order: some twice, some negative, runs of neighbours among them.
std::vector<int64_t> random_slots(size_t n, int64_t limit, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> slots;
  while (slots.size() < n) {
    const auto slot = static_cast<int64_t>(random() % static_cast<uint32_t>(limit));
    switch (random() % 4) {
      case 0: slots.push_back(-1 - static_cast<int64_t>(random() % 3)); break;
      case 1: slots.push_back(slot); break;
      default:
        for (int64_t i = slot; i < std::min(slot + 5, limit) && slots.size() < n; ++i) slots.push_back(i);
    }
  }
  return slots;
}

void expect_written(const Context& context, Pool pool, Write& write) {
  Pool expected = pool;
  write.write_plainly(expected.view());
  ASSERT_NE(pool.memory, expected.memory);
  write_kv_cache(context, write.args(pool.view()));
  // The whole pool and its margins: what was not to be written still holds its noise.
  ASSERT_EQ(pool.memory, expected.memory);
}

const std::vector<float> kFourHeadScales{0.5f, 0.037f, 3.0f, 1.0f};

TEST(WriteKvCache, EveryTypeAndLayout) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
  uint32_t seed = 1;
  int number = 0;
  for (DType cache_type : kCacheDTypes) {
    for (Layout layout : kLayouts) {
      for (int32_t page_size : {1, 7, 16, 32}) {
        const KvCacheShape shape{9, page_size, 3, 24, 16, cache_type};
        if (!exists(layout, shape)) continue;
        for (DType input : kCacheDTypes) {
          if (is_fp8(input) && input != cache_type) continue;
          if (folio::testing::kInstrumented && number++ % 3 != 0) continue;
          SCOPED_TRACE(std::string(to_string(input)) + " to " + std::string(to_string(cache_type)) + " layout " +
                       std::to_string(static_cast<int>(layout)) + " page size " + std::to_string(page_size));
          const size_t n = 40;
          Write write{Rows(input, n + 2, 3, 24, 5, seed),
                      Rows(input, n, 3, 16, 0, seed + 1),
                      random_slots(n, int64_t{9} * page_size, seed + 2),
                      {},
                      {}};
          if (is_fp8(cache_type) && !is_fp8(input)) {
            write.k_scale.value = 0.3f;
            write.v_scale.data = kFourHeadScales.data();
            write.v_scale.granularity = ScaleGranularity::kPerHead;
          }
          expect_written(context, Pool(layout, shape, seed + 3), write);
          ++seed;
        }
      }
    }
  }
}

/// Items in any order, one after the other or on threads: slots given twice, and two tokens of one pair, included.
TEST(WriteKvCache, AnyExecutor) {
  OrderedExecutor forward(OrderedExecutor::Order::kForward, 1);
  OrderedExecutor reverse(OrderedExecutor::Order::kReverse, 7);
  OrderedExecutor shuffled(OrderedExecutor::Order::kShuffled, 64);
  const Context contexts[] = {forward.context(), reverse.context(), shuffled.context(),
                              Context::cpu({.executor = {}, .num_threads = 4, .force_kernel = {}})};
  uint32_t seed = 1000;
  for (const Context& context : contexts) {
    for (Layout layout : {Layout::kNhd, Layout::kInterleavedHnd, Layout::kPacked}) {
      for (int32_t heads : {1, 4}) {
        if (folio::testing::kInstrumented && (heads == 1) != (layout == Layout::kNhd)) continue;
        const KvCacheShape shape{40, 16, heads, 64, 48, DType::kBFloat16};
        const size_t n = heads == 1 ? 1600 : 600;
        Write write{Rows(DType::kFloat32, n, heads, 64, 0, seed),
                    Rows(DType::kFloat32, n, heads, 48, 3, seed + 1),
                    random_slots(n, 640, seed + 2),
                    {},
                    {}};
        expect_written(context, Pool(layout, shape, seed + 3), write);
        ++seed;
      }
    }
  }
  EXPECT_EQ(forward.most_items, 0);  // one thread: nothing is divided
  EXPECT_GT(reverse.most_items, 8);  // more than heads: slots are divided too
  EXPECT_GT(shuffled.most_items, 8);
}

TEST(WriteKvCache, Float8IsExactlyTheContract) {
  const float tricky[] = {0.0f,     -0.0f,         448.0f,
                          449.0f,   1e30f,         -1e30f,
                          kNaN,     -kNaN,         std::numeric_limits<float>::infinity(),
                          1e-40f,   0.0009765625f, 0.0029296875f,
                          57344.0f, 61440.0f,      16.5f,
                          17.5f};
  const Context context = Context::cpu();
  for (DType type : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (float scale : {1.0f, 0.1f, 3.0f, 448.0f}) {
      Write write{Rows(DType::kFloat32, 3, 1, 16, 0, 8), Rows(DType::kFloat32, 3, 1, 16, 0, 9), {2, 0, 1}, {}, {}};
      std::memcpy(write.k.memory.data(), tricky, sizeof(tricky));
      std::memcpy(write.v.memory.data(), tricky, sizeof(tricky));
      write.k_scale.value = scale;
      write.v_scale.value = scale;
      Pool pool(Layout::kNhd, {1, 4, 1, 16, 16, type}, 4);
      write_kv_cache(context, write.args(pool.view()));
      const auto* row = static_cast<const uint8_t*>(pool.view().k) + 2 * 16;
      for (size_t i = 0; i < 16; ++i) {
        const float x = tricky[i] / scale;
        const uint8_t expected = type == DType::kFloat8E4M3 ? float_to_fp8_e4m3(x) : float_to_fp8_e5m2(x);
        EXPECT_EQ(row[i], expected) << tricky[i] << " / " << scale;
        EXPECT_EQ(std::isnan(load_as_float(row, type, static_cast<int64_t>(i))), std::isnan(tricky[i]));
      }
    }
  }
}

/// vLLM's test shapes: 42 tokens, 8 heads, scales of a 64th of the largest value; error bounded by the format's
/// rounding.
TEST(WriteKvCache, Float8ErrorIsItsRounding) {
  const Context context = Context::cpu();
  for (int32_t dim : {64, 80, 256}) {
    Write write{Rows(DType::kBFloat16, 42, 8, dim, 0, 1), Rows(DType::kBFloat16, 42, 8, dim, 0, 2), {}, {}, {}};
    for (int64_t i = 0; i < 42; ++i) write.slots.push_back((i * 11) % 128);
    float largest = 0.0f;
    for (int64_t i = 0; i < 42 * 8 * dim; ++i) {
      largest = std::max(largest, std::fabs(load_as_float(write.k.memory.data(), DType::kBFloat16, i)));
    }
    write.k_scale.value = largest / 64.0f;
    Pool pool(Layout::kHnd, {8, 16, 8, dim, dim, DType::kFloat8E4M3}, 4);
    const KvCacheView cache = pool.view();
    write_kv_cache(context, write.args(cache));
    for (int64_t t = 0; t < 42; ++t) {
      const int64_t slot = write.slots[static_cast<size_t>(t)];
      for (int64_t h = 0; h < 8; ++h) {
        for (int64_t d = 0; d < dim; ++d) {
          const float x = load_as_float(write.k.memory.data(), DType::kBFloat16, write.k.index(t, h, d));
          const float stored = load_as_float(cache.k, cache.dtype, k_index(cache, slot / 16, slot % 16, h, d));
          // Half a unit in the last place of three mantissa bits; 2^-10 is half the smallest subnormal.
          const float bound = std::max(std::fabs(x) / 16.0f, write.k_scale.value / 1024.0f) * 1.0001f;
          ASSERT_LE(std::fabs(stored * write.k_scale.value - x), bound);
        }
      }
    }
  }
}

TEST(WriteKvCache, LatentAttentionWritesKOnly) {
  const Context context = Context::cpu();
  std::vector<std::byte> memory(8 * 4 * 576 * 2, std::byte{0x5a});
  KvCacheView cache;
  cache.dtype = DType::kBFloat16;
  cache.k = cache.v = memory.data();
  cache.num_pages = 8;
  cache.page_size = 4;
  cache.num_kv_heads = 1;
  cache.head_dim_qk = 576;
  cache.head_dim_v = 512;
  cache.k_strides = cache.v_strides = {4 * 576, 576, 576};
  Rows k(DType::kBFloat16, 2, 1, 576, 0, 3);
  const std::vector<int64_t> slots{30, 5};
  CacheWriteArgs args;
  args.k = k.view();
  args.slot_mapping = slots.data();
  args.num_slots = 2;
  args.cache = cache;
  auto expected = memory;
  std::memcpy(expected.data() + 30 * 1152, k.memory.data(), 1152);
  std::memcpy(expected.data() + 5 * 1152, k.memory.data() + 1152, 1152);
  write_kv_cache(context, args);
  EXPECT_EQ(memory, expected);

  Rows v(DType::kBFloat16, 2, 1, 512, 0, 4);
  args.v = v.view();
  expect_refused("v is given", [&] { write_kv_cache(context, args); });
  args.v = {};
  args.v_scale.value = 2.0f;
  expect_refused("v_scale", [&] { write_kv_cache(context, args); });
  EXPECT_EQ(memory, expected);
}

struct Refusals : ::testing::Test {
  Context context = Context::cpu();
  Pool pool{Layout::kNhd, {4, 16, 2, 16, 8, DType::kFloat8E4M3}, 1};
  Write write{Rows(DType::kFloat32, 5, 2, 16, 0, 2), Rows(DType::kFloat32, 5, 2, 8, 0, 3), {1, 2, -1, 63, 0}, {}, {}};

  template <typename Change>
  void refused(const std::string& text, Change change) {
    SCOPED_TRACE(text);
    CacheWriteArgs args = write.args(pool.view());
    change(args);
    const auto before = pool.memory;
    expect_refused(text, [&] { write_kv_cache(context, args); });
    EXPECT_EQ(pool.memory, before);
  }
};

TEST_F(Refusals, OfSlots) {
  EXPECT_NO_THROW(write_kv_cache(context, write.args(pool.view())));
  const std::vector<int64_t> beyond{0, 1, 2, 3, 64};
  refused("slot_mapping[4] is 64; the cache has 64 slots", [&](auto& a) { a.slot_mapping = beyond.data(); });
  const std::vector<int64_t> far{0, std::numeric_limits<int64_t>::max(), 2, 3, 4};
  refused("slot_mapping[1]", [&](auto& a) { a.slot_mapping = far.data(); });
  refused("num_slots is -1", [](auto& a) { a.num_slots = -1; });
  refused("slot_mapping is null", [](auto& a) { a.slot_mapping = nullptr; });
  const std::vector<int64_t> six(6, -1);
  refused("k has 5 tokens for 6 slots", [&](auto& a) {
    a.slot_mapping = six.data();
    a.num_slots = 6;
  });
  const std::vector<int64_t> least{std::numeric_limits<int64_t>::min()};
  CacheWriteArgs none = write.args(pool.view());
  none.slot_mapping = least.data();
  none.num_slots = 1;
  const auto before = pool.memory;
  write_kv_cache(context, none);
  none.num_slots = 0;
  none.slot_mapping = nullptr;
  write_kv_cache(context, none);
  EXPECT_EQ(pool.memory, before);
}

TEST_F(Refusals, OfTensors) {
  refused("k has rank 2", [](auto& a) { a.k.rank = 2; });
  refused("k is unset", [](auto& a) { a.k.dtype = DType::kUnset; });
  refused("v is fp4_e2m1x2", [](auto& a) { a.v.dtype = DType::kFloat4E2M1x2; });
  refused("k is fp8_e5m2, the cache fp8_e4m3", [](auto& a) { a.k.dtype = DType::kFloat8E5M2; });
  refused("k is [5, 3, 16]", [](auto& a) { a.k.shape[1] = 3; });
  refused("v is [5, 2, 16]", [](auto& a) { a.v.shape[2] = 16; });
  refused("v's innermost stride is 2", [](auto& a) { a.v.strides[2] = 2; });
  refused("k's token stride is -32", [](auto& a) { a.k.strides[0] = -32; });
  refused("k.data is null", [](auto& a) { a.k.data = nullptr; });
  refused("v.data is null", [](auto& a) { a.v.data = nullptr; });
  refused("k is not aligned", [](auto& a) { a.k.data = static_cast<const std::byte*>(a.k.data) + 1; });
  refused("k overlaps the cache", [](auto& a) { a.k.data = a.cache.k; });
  refused("v overlaps the cache", [](auto& a) { a.v.data = a.cache.k; });
  refused("k is null", [](auto& a) { a.cache.k = nullptr; });
}

TEST_F(Refusals, OfScales) {
  static const std::vector<float> good{1.0f, 2.0f};
  static const std::vector<float> bad{1.0f, kNaN};
  refused("k_scale.value is 0", [](auto& a) { a.k_scale.value = 0.0f; });
  refused("k_scale.value is -1", [](auto& a) { a.k_scale.value = -1.0f; });
  refused("v_scale.value is nan", [](auto& a) { a.v_scale.value = kNaN; });
  refused("v_scale.value is inf", [](auto& a) { a.v_scale.value = std::numeric_limits<float>::infinity(); });
  refused("k_scale has data and a value of 2", [](auto& a) {
    a.k_scale.value = 2.0f;
    a.k_scale.data = good.data();
  });
  refused("k_scale.data of request 0, head 1 is nan", [](auto& a) {
    a.k_scale.data = bad.data();
    a.k_scale.granularity = ScaleGranularity::kPerHead;
  });
  refused("per tensor (0) and per head (1) are taken here", [](auto& a) {
    a.k_scale.data = good.data();
    a.k_scale.granularity = ScaleGranularity::kPerRequest;
  });
  refused("k_scale is per head or request, but has no data",
          [](auto& a) { a.k_scale.granularity = ScaleGranularity::kPerHead; });
  refused("k_scale.granularity is 9", [](auto& a) { a.k_scale.granularity = static_cast<ScaleGranularity>(9); });
  refused("fp8 input is copied as it is", [](auto& a) {
    a.k.dtype = DType::kFloat8E4M3;
    a.k_scale.value = 2.0f;
  });
  Pool plain(Layout::kNhd, {4, 16, 2, 16, 8, DType::kFloat16}, 1);
  refused("k_scale is given, but the cache is not fp8", [&](auto& a) {
    a.cache = plain.view();
    a.k_scale.value = 2.0f;
  });
}

TEST_F(Refusals, OfStreams) {
  int handle = 0;
  expect_refused("takes no stream", [&] { write_kv_cache(context, write.args(pool.view()), Stream{&handle}); });
}

}  // namespace
}  // namespace folio::inline v0::attention
