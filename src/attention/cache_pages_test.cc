#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "attention/cache_test_util.hpp"
#include "core/expect_refused_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

using folio::testing::expect_refused;

const std::vector<int32_t> kSource{3, 0, 3, 7};  // one page may go to several places
const std::vector<int32_t> kDestination{1, 5, 6, 2};

/// The conversion, one element after the other.
void convert_plainly(const KvCacheView& from, const KvCacheView& to, const std::vector<int32_t>& source,
                     const std::vector<int32_t>& destination, const CacheConvertScales& scales) {
  for (size_t i = 0; i < source.size(); ++i) {
    for (int64_t t = 0; t < from.page_size; ++t) {
      for (int64_t h = 0; h < from.num_kv_heads; ++h) {
        for (int64_t d = 0; d < from.head_dim_qk; ++d) {
          move_element(from.k, from.dtype, k_index(from, source[i], t, h, d), scale_of(scales.from_k, 0, h), to.k,
                       to.dtype, k_index(to, destination[i], t, h, d), scale_of(scales.to_k, 0, h));
        }
        for (int64_t d = 0; d < from.head_dim_v; ++d) {
          move_element(from.v, from.dtype, v_index(from, source[i], t, h, d), scale_of(scales.from_v, 0, h), to.v,
                       to.dtype, v_index(to, destination[i], t, h, d), scale_of(scales.to_v, 0, h));
        }
      }
    }
  }
}

TEST(ConvertPages, EveryTypeAndLayout) {
  OrderedExecutor shuffled(OrderedExecutor::Order::kShuffled, 16);
  const Context contexts[] = {Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}}), shuffled.context()};
  uint32_t seed = 1;
  int number = 0;
  for (DType from_type : kCacheDTypes) {
    for (DType to_type : kCacheDTypes) {
      for (Layout from_layout : kLayouts) {
        for (Layout to_layout : kLayouts) {
          for (int32_t page_size : {1, 18}) {
            const KvCacheShape from_shape{8, page_size, 3, 24, 16, from_type};
            const KvCacheShape to_shape{7, page_size, 3, 24, 16, to_type};
            if (!exists(from_layout, from_shape) || !exists(to_layout, to_shape)) continue;
            if (folio::testing::kInstrumented && number++ % 5 != 0) continue;
            Pool from = pool_of_numbers(from_layout, from_shape, seed);
            Pool to(to_layout, to_shape, seed + 1);
            CacheConvertScales scales;
            if (is_fp8(from_type)) scales.from_k.value = 0.25f;
            if (is_fp8(from_type)) scales.from_v = {1.0f, kHeadScales.data(), ScaleGranularity::kPerHead, 0};
            if (is_fp8(to_type)) scales.to_k.value = 0.7f;
            Pool expected = to;
            convert_plainly(from.view(), expected.view(), kSource, kDestination, scales);
            convert_pages(contexts[seed % 2], from.view(), to.view(), kSource, kDestination, scales);
            ASSERT_EQ(to.memory, expected.memory)
                << to_string(from_type) << " layout " << static_cast<int>(from_layout) << " to " << to_string(to_type)
                << " layout " << static_cast<int>(to_layout) << " page size " << page_size;
            ++seed;
          }
        }
      }
    }
  }
  EXPECT_EQ(shuffled.most_items, 0);  // so little is done on the calling thread
}

TEST(ConvertPages, ManyPagesOnAnyExecutor) {
  OrderedExecutor reverse(OrderedExecutor::Order::kReverse, 8);
  const Context contexts[] = {reverse.context(), Context::cpu({.executor = {}, .num_threads = 4, .force_kernel = {}})};
  for (const Context& context : contexts) {
    Pool from = pool_of_numbers(Layout::kNhd, {64, 16, 3, 64, 64, DType::kFloat16}, 1);
    Pool to(Layout::kPacked, {64, 16, 3, 64, 64, DType::kBFloat16}, 2);
    std::vector<int32_t> source(64), destination(64);
    std::iota(source.begin(), source.end(), 0);
    std::iota(destination.rbegin(), destination.rend(), 0);
    Pool expected = to;
    convert_plainly(from.view(), expected.view(), source, destination, {});
    convert_pages(context, from.view(), to.view(), source, destination);
    EXPECT_EQ(to.memory, expected.memory);
  }
  EXPECT_GT(reverse.most_items, 4);
}

TEST(ConvertPages,
     EqualTypesAndScalesKeepEveryBit) {  // infinities and NaN payloads of fp8_e5m2 would not survive a float
  const Context context = Context::cpu();
  const KvCacheShape shape{8, 16, 3, 24, 16, DType::kFloat8E5M2};
  Pool from(Layout::kHnd, shape, 1);
  Pool to(Layout::kPacked, shape, 2);
  CacheConvertScales scales;
  scales.from_k.value = scales.to_k.value = 0.3f;
  Pool expected = to;
  convert_plainly(from.view(), expected.view(), kSource, kDestination, scales);
  convert_pages(context, from.view(), to.view(), kSource, kDestination, scales);
  EXPECT_EQ(to.memory, expected.memory);
}

TEST(CopyPages, BetweenAndWithinCaches) {
  const Context context = Context::cpu();
  for (DType dtype : kCacheDTypes) {
    for (Layout layout : kLayouts) {
      const KvCacheShape shape{8, 16, 3, 24, 16, dtype};
      if (!exists(layout, shape)) continue;
      const Pool original(layout, shape, 1);
      Pool from = original;
      Pool to(layout, shape, 2);
      Pool expected = to;
      convert_plainly(from.view(), expected.view(), kSource, kDestination, {});
      copy_pages(context, from.view(), to.view(), kSource, kDestination);
      EXPECT_EQ(to.memory, expected.memory);
      EXPECT_EQ(from.memory, original.memory);

      expected = from;
      convert_plainly(from.view(), expected.view(), kSource, kDestination, {});
      copy_pages(context, from.view(), from.view(), kSource, kDestination);
      EXPECT_EQ(from.memory, expected.memory);
    }
  }
}

TEST(CopyPages, StridesMayDiffer) {
  const Context context = Context::cpu();
  Pool from(Layout::kNhd, {8, 4, 3, 24, 16, DType::kFloat16}, 1);
  Pool to(Layout::kSideBySide, {20, 4, 3, 24, 16, DType::kFloat16}, 2);
  Pool expected = to;
  convert_plainly(from.view(), expected.view(), {7}, {19}, {});
  copy_pages(context, from.view(), to.view(), std::vector<int32_t>{7}, std::vector<int32_t>{19});
  EXPECT_EQ(to.memory, expected.memory);
}

TEST(CopyPages, LayersOfOnePool) {  // interleaved with each other, but apart: any pages will do
  const Context context = Context::cpu();
  Pool pool(Layout::kNhd, {16, 4, 1, 8, 8, DType::kFloat16}, 1);
  KvCacheView first = pool.view();
  first.num_pages = 8;
  first.k_strides.page *= 2;
  first.v_strides.page *= 2;
  KvCacheView second = first;
  second.k = static_cast<std::byte*>(first.k) + first.k_strides.page;  // half of the stride, in 2-byte elements
  second.v = static_cast<std::byte*>(first.v) + first.v_strides.page;
  Pool expected = pool;
  KvCacheView expected_first = first;
  KvCacheView expected_second = second;
  const std::ptrdiff_t moved = expected.memory.data() - pool.memory.data();
  for (KvCacheView* view : {&expected_first, &expected_second}) {
    view->k = static_cast<std::byte*>(view->k) + moved;
    view->v = static_cast<std::byte*>(view->v) + moved;
  }
  convert_plainly(expected_first, expected_second, {2, 3}, {2, 0}, {});
  copy_pages(context, first, second, std::vector<int32_t>{2, 3}, std::vector<int32_t>{2, 0});
  EXPECT_EQ(pool.memory, expected.memory);
}

KvCacheView latent_view(std::vector<std::byte>& memory, DType dtype, int32_t first_component) {
  KvCacheView cache = make_nhd_view({4, 2, 1, 40, 32, dtype}, memory.data(), memory.data() + memory.size() / 2);
  cache.v = memory.data() + first_component * size_of(dtype);
  cache.v_strides = cache.k_strides;
  return cache;
}

TEST(ConvertPages, LatentAttention) {
  const Context context = Context::cpu();
  std::vector<std::byte> a(4 * 2 * 40 * 4 * 2), b(a.size());
  Rows numbers(DType::kFloat32, 8, 1, 40, 0, 1);
  std::copy(numbers.memory.begin(), numbers.memory.end(), a.begin());
  const std::vector<int32_t> source{1}, destination{3};
  CacheConvertScales scales;
  scales.to_k.value = 0.5f;
  const KvCacheView from = latent_view(a, DType::kFloat32, 4);
  const KvCacheView to = latent_view(b, DType::kFloat8E4M3, 4);
  convert_pages(context, from, to, source, destination, scales);
  for (int64_t i = 0; i < 80; ++i) {
    EXPECT_EQ(load_as_float(b.data(), DType::kFloat8E4M3, 240 + i),
              fp8_e4m3_to_float(float_to_fp8_e4m3(load_as_float(a.data(), DType::kFloat32, 80 + i) / 0.5f)));
  }
  expect_refused("not the same part of K",
                 [&] { convert_pages(context, latent_view(a, DType::kFloat32, 5), to, source, destination, scales); });
  scales.to_v.value = 2.0f;
  expect_refused("its scales must be K's", [&] { convert_pages(context, from, to, source, destination, scales); });
}

TEST(CopyPages, Refuses) {
  const Context context = Context::cpu();
  const KvCacheShape shape{8, 16, 3, 24, 16, DType::kFloat16};
  Pool from(Layout::kNhd, shape, 1);
  Pool to(Layout::kNhd, shape, 2);
  const auto before = to.memory;
  const auto copy = [&](std::vector<int32_t> source, std::vector<int32_t> destination) {
    return [&to, &from, &context, source, destination] {
      copy_pages(context, from.view(), to.view(), source, destination);
    };
  };
  expect_refused("2 source pages and 1 destinations", copy({1, 2}, {1}));
  expect_refused("source[1] is page 8", copy({1, 8}, {1, 2}));
  expect_refused("source[0] is page -1", copy({-1}, {1}));
  expect_refused("destination[1] is page 8", copy({1, 2}, {1, 8}));
  expect_refused("page 4 is given twice", copy({1, 2, 3}, {4, 5, 4}));
  EXPECT_EQ(to.memory, before);
  const auto within = [&](std::vector<int32_t> source, std::vector<int32_t> destination) {
    return [&to, &context, source, destination] { copy_pages(context, to.view(), to.view(), source, destination); };
  };
  expect_refused("page 2 (source[1]) is a destination too", within({1, 2}, {2, 3}));
  KvCacheView shifted = to.view();
  shifted.num_pages = 6;
  shifted.k = static_cast<std::byte*>(shifted.k) + shifted.k_strides.token * 2;
  expect_refused("share memory",
                 [&] { copy_pages(context, shifted, to.view(), std::vector<int32_t>{1}, std::vector<int32_t>{3}); });
  EXPECT_EQ(to.memory, before);
  EXPECT_NO_THROW(copy({}, {})());

  const auto to_shape = [&](KvCacheShape other) {
    Pool pool(Layout::kNhd, other, 3);
    copy_pages(context, from.view(), pool.view(), std::vector<int32_t>{1}, std::vector<int32_t>{1});
  };
  expect_refused("convert_pages does that", [&] { to_shape({8, 16, 3, 24, 16, DType::kBFloat16}); });
  expect_refused("sizes must be equal", [&] { to_shape({8, 8, 3, 24, 16, DType::kFloat16}); });
  expect_refused("sizes must be equal", [&] { to_shape({8, 16, 2, 24, 16, DType::kFloat16}); });
}

TEST(ConvertPages, RefusesScales) {
  const Context context = Context::cpu();
  Pool from(Layout::kNhd, {8, 16, 3, 24, 16, DType::kFloat16}, 1);
  Pool to(Layout::kNhd, {8, 16, 3, 24, 16, DType::kFloat8E4M3}, 2);
  const auto convert = [&](CacheConvertScales scales) {
    convert_pages(context, from.view(), to.view(), kSource, kDestination, scales);
  };
  CacheConvertScales scales;
  scales.from_k.value = 2.0f;
  expect_refused("scales.from_k is given, but that cache is not fp8", [&] { convert(scales); });
  scales = {};
  scales.to_v.value = std::numeric_limits<float>::infinity();
  expect_refused("scales.to_v.value is inf", [&] { convert(scales); });
  scales = {};
  scales.to_k = {1.0f, kHeadScales.data(), ScaleGranularity::kPerRequestAndHead, 3};
  expect_refused("scales.to_k.granularity is 3", [&] { convert(scales); });
}

}  // namespace
}  // namespace folio::inline v0::attention
