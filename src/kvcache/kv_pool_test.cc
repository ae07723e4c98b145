#include "folio/kvcache/kv_pool.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/error_test_util.hpp"
#include "folio/types/error.hpp"

namespace folio {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

KvPoolConfig small(int32_t page_size = 1) {
  KvPoolConfig config;
  config.num_slots = 48;
  config.page_size = page_size;
  config.num_layers = 2;
  config.num_kv_heads = 3;
  config.head_dim_qk = 16;
  config.head_dim_v = 8;
  return config;
}

TEST(KvPoolTest, HasADummyPageAndZeroedMemory) {
  for (const int32_t page_size : {1, 16}) {
    const KvPool pool(small(page_size));
    EXPECT_EQ(pool.buffer_len(), 48 + page_size);
    for (int32_t layer = 0; layer < 2; ++layer) {
      const KvCacheView& view = pool.view(layer);
      validate(view);
      EXPECT_EQ(view.num_pages, 48 / page_size + 1);
      EXPECT_EQ(view.page_size, page_size);
      EXPECT_EQ(view.dtype, DType::kFloat16);
      const auto* k = static_cast<const uint16_t*>(view.k);
      const auto* v = static_cast<const uint16_t*>(view.v);
      for (int64_t i = 0; i < pool.buffer_len() * 3 * 16; ++i) ASSERT_EQ(k[i], 0);
      for (int64_t i = 0; i < pool.buffer_len() * 3 * 8; ++i) ASSERT_EQ(v[i], 0);
    }
    EXPECT_NE(pool.view(0).k, pool.view(1).k);
  }
}

TEST(KvPoolTest, BuffersAreTheLiveMemory) {
  const KvPool pool(small());
  const TensorView k = pool.key_buffer(1);
  const TensorView v = pool.value_buffer(1);
  EXPECT_EQ(k.data, pool.view(1).k);
  EXPECT_EQ(v.data, pool.view(1).v);
  EXPECT_EQ(k.rank, 3);
  EXPECT_EQ((std::vector<int64_t>{k.shape[0], k.shape[1], k.shape[2]}), (std::vector<int64_t>{49, 3, 16}));
  EXPECT_EQ((std::vector<int64_t>{v.shape[0], v.shape[1], v.shape[2]}), (std::vector<int64_t>{49, 3, 8}));
  EXPECT_EQ(k.dtype, DType::kFloat16);
}

/// Where slot `slot` of K lies in a view.
const void* row(const KvCacheView& view, int64_t slot) {
  const int64_t at = slot / view.page_size * view.k_strides.page + slot % view.page_size * view.k_strides.token;
  return static_cast<const std::byte*>(view.k) + at * size_of(view.dtype);
}

TEST(KvPoolTest, PagesOfAnySizeAreViews) {
  const KvPool pool(small(16));
  for (const int32_t page_size : {1, 2, 4, 8, 16, 32, 64}) {
    const KvCacheView view = pool.view(0, page_size);
    validate(view);
    EXPECT_EQ(view.page_size, page_size);
    EXPECT_EQ(view.num_pages * page_size, 64);
    for (int64_t slot = 0; slot < 64; ++slot) EXPECT_EQ(row(view, slot), row(pool.view(0), slot));
  }
  EXPECT_THAT(message_of([&] { (void)pool.view(0, 3); }),
              HasSubstr("page_size is 3; it must divide the layer's 64 slots"));
  EXPECT_THAT(message_of([&] { (void)pool.view(0, 0); }), HasSubstr("page_size is 0"));
}

TEST(KvPoolTest, OtherLayoutsHaveTheirOwnPagesOnly) {
  KvPoolConfig config = small(16);
  config.layout = KvPoolLayout::kHeadMajor;
  const KvPool head_major(config);
  EXPECT_EQ(head_major.view(0).k_strides.head, 16 * 16);
  EXPECT_EQ(head_major.view(0, 16).k, head_major.view(0).k);
  config.layout = KvPoolLayout::kCpuPacked;
  const KvPool packed(config);
  EXPECT_EQ(packed.view(0).format, KvFormat::kCpuPacked);
  for (const KvPool* pool : {&head_major, &packed}) {
    const auto offered = HasSubstr("token-major pools offer it");
    EXPECT_THAT(message_of([&] { (void)pool->view(0, 1); }, ErrorCode::kUnsupported), offered);
    EXPECT_THAT(message_of([&] { (void)pool->key_buffer(0); }, ErrorCode::kUnsupported), offered);
    EXPECT_THAT(message_of([&] { (void)pool->value_buffer(0); }, ErrorCode::kUnsupported), offered);
  }
  config.page_size = 8;
  EXPECT_THAT(message_of([&] { KvPool{config}; }, ErrorCode::kUnsupported), HasSubstr("page_size 8"));
  config.layout = static_cast<KvPoolLayout>(7);
  EXPECT_THAT(message_of([&] { KvPool{config}; }), HasSubstr("layout is 7"));
}

TEST(KvPoolTest, BorrowsMemory) {
  const KvPoolConfig config = small();
  ASSERT_EQ(KvPool::k_bytes_per_layer(config), 49u * 3 * 16 * 2);
  ASSERT_EQ(KvPool::v_bytes_per_layer(config), 49u * 3 * 8 * 2);
  std::vector<uint16_t> k(2 * KvPool::k_bytes_per_layer(config) / 2, 7);
  std::vector<uint16_t> v(2 * KvPool::v_bytes_per_layer(config) / 2, 7);
  const std::vector<void*> ks{k.data(), k.data() + k.size() / 2};
  const std::vector<void*> vs{v.data(), v.data() + v.size() / 2};
  const KvPool pool(config, ks, vs);
  EXPECT_EQ(pool.view(1).k, ks[1]);
  EXPECT_EQ(pool.view(1).v, vs[1]);
  EXPECT_EQ(k[5], 7);
  EXPECT_THAT(message_of([&] { KvPool(config, ks, std::span(vs).first(1)); }),
              HasSubstr("2 addresses for keys and 1 for values; the pool has 2 layers"));
  const std::vector<void*> nulls(2);
  EXPECT_THAT(message_of([&] { KvPool(config, nulls, nulls); }), HasSubstr("k is null"));
}

TEST(KvPoolTest, ChecksItsConfiguration) {
  const auto refused = [](auto change) {
    KvPoolConfig config = small(4);
    change(config);
    return message_of([&] { KvPool{config}; });
  };
  EXPECT_THAT(refused([](auto& c) { c.num_slots = 50; }),
              HasSubstr("num_slots is 50; it must be a multiple of page_size"));
  EXPECT_THAT(refused([](auto& c) { c.num_slots = -4; }), HasSubstr("num_slots is -4"));
  EXPECT_THAT(refused([](auto& c) { c.page_size = 0; }), HasSubstr("page_size is 0"));
  EXPECT_THAT(refused([](auto& c) { c.num_layers = 0; }), HasSubstr("num_layers is 0"));
  EXPECT_THAT(refused([](auto& c) { c.num_kv_heads = 0; }), HasSubstr("num_kv_heads is 0"));
  EXPECT_THAT(refused([](auto& c) { c.dtype = DType::kFloat4E2M1x2; }), HasSubstr("dtype"));
  EXPECT_THAT(refused([](auto& c) { c.dtype = DType::kInt8; }), HasSubstr("dtype is int8; pools hold no token scales"));
  const KvPool pool(small());
  EXPECT_THAT(message_of([&] { (void)pool.view(2); }), HasSubstr("layer 2 is not of this pool; it has layers 0 to 1"));
  EXPECT_THAT(message_of([&] { (void)pool.k_scale(-1); }), HasSubstr("layer -1"));
}

TEST(KvPoolTest, ScalesBelongToFp8) {
  KvPoolConfig config = small();
  config.dtype = DType::kFloat8E4M3;
  KvPool pool(config);
  EXPECT_EQ(pool.k_scale(0).value, 1.0f);
  Scale k;
  k.value = 0.5f;
  const std::vector<float> heads{1, 2, 3};
  Scale v;
  v.data = heads.data();
  v.granularity = ScaleGranularity::kPerHead;
  pool.set_scales(1, k, v);
  EXPECT_EQ(pool.k_scale(0).value, 1.0f);
  EXPECT_EQ(pool.k_scale(1).value, 0.5f);
  EXPECT_EQ(pool.v_scale(1).data, heads.data());

  Scale bad;
  bad.value = 0;
  EXPECT_THAT(message_of([&] { pool.set_scales(0, bad, {}); }),
              HasSubstr("k_scale is 0; it must be finite and above 0"));
  bad.value = NAN;
  EXPECT_THAT(message_of([&] { pool.set_scales(0, {}, bad); }), HasSubstr("v_scale is nan"));
  bad = v;
  bad.value = 2;
  EXPECT_THAT(message_of([&] { pool.set_scales(0, {}, bad); }), HasSubstr("both an array and the value 2"));
  bad = v;
  bad.granularity = ScaleGranularity::kPerRequest;
  EXPECT_THAT(message_of([&] { pool.set_scales(0, {}, bad); }), HasSubstr("v_scale is per request"));
  EXPECT_EQ(pool.v_scale(0).data, nullptr);
  KvPool wide(small());
  EXPECT_THAT(message_of([&] { wide.set_scales(0, k, {}); }), HasSubstr("k_scale is given for a pool of float16"));
}

TEST(KvPoolTest, FlattensAnyLeadingShape) {
  const KvPool pool(small());
  std::vector<uint16_t> k(6 * 3 * 16);
  std::vector<uint16_t> v(6 * 3 * 8);
  const std::vector<int64_t> slots{1, 2, 3, 4, 5, 6};
  const auto args_of = [&](ConstTensorView keys, ConstTensorView values) {
    return pool.write_args(1, keys, values, slots);
  };
  const ConstTensorView k3(k.data(), DType::kFloat16, {6, 3, 16});
  const ConstTensorView v3(v.data(), DType::kFloat16, {6, 3, 8});
  const ConstTensorView k5(k.data(), DType::kFloat16, {2, 1, 3, 3, 16});
  const ConstTensorView v4(v.data(), DType::kFloat16, {2, 3, 3, 8});
  const ConstTensorView k2(k.data(), DType::kFloat16, {6, 48});
  const ConstTensorView v2(v.data(), DType::kFloat16, {3, 2, 24});
  for (const auto& [keys, values] : {std::pair(k3, v3), std::pair(k5, v4), std::pair(k2, v2)}) {
    const CacheWriteArgs args = args_of(keys, values);
    EXPECT_EQ(args.num_slots, 6);
    EXPECT_EQ(args.slot_mapping, slots.data());
    EXPECT_EQ(args.cache.k, pool.view(1).k);
    EXPECT_EQ(args.k.shape, k3.shape);
    EXPECT_EQ(args.k.strides, k3.strides);
    EXPECT_EQ(args.v.shape, v3.shape);
    EXPECT_EQ(args.v.strides, v3.strides);
  }
  // A slice of a fused projection: tokens far apart, still one stride.
  ConstTensorView sliced(k.data(), DType::kFloat16, {2, 3, 3, 16});
  sliced.strides = {3 * 100, 100, 16, 1};
  EXPECT_EQ(args_of(sliced, v4).k.strides[0], 100);
  ConstTensorView one(k.data(), DType::kFloat16, {48});
  EXPECT_EQ(
      pool.write_args(0, one, ConstTensorView(v.data(), DType::kFloat16, {1, 24}), std::span(slots).first(1)).k.rank,
      3);

  ConstTensorView torn = sliced;
  torn.strides[0] = 512;
  EXPECT_THAT(message_of([&] { (void)args_of(torn, v4); }), HasSubstr("k has a stride of 512 in dimension 0"));
  ConstTensorView gaps = k3;
  gaps.strides[2] = 2;
  EXPECT_THAT(message_of([&] { (void)args_of(gaps, v3); }), HasSubstr("must be contiguous"));
  EXPECT_THAT(message_of([&] { (void)args_of(v3, v3); }),
              HasSubstr("k ends in a dimension of 8; it must end in [3, 16]"));
  EXPECT_THAT(message_of([&] {
                (void)args_of(k3, ConstTensorView(v.data(), DType::kFloat16, {5, 3, 8}));
              }),
              HasSubstr("v has 5 tokens, slots has 6"));
  EXPECT_THAT(message_of([&] { (void)args_of(ConstTensorView(), v3); }), HasSubstr("k has rank 0"));
}

}  // namespace
}  // namespace folio
