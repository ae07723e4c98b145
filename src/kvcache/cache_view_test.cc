#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/expect_refused_test_util.hpp"
#include "folio/kv_cache.hpp"
#include "kvcache/address.hpp"
#include "kvcache/strided_set.hpp"

namespace folio {
namespace {

using testing::expect_refused;

constexpr int32_t kMax32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

/// An address that nothing reads: views are checked, not used.
void* address(uintptr_t at) {
  return reinterpret_cast<void*>(at);
}

const KvCacheShape kShape{10, 16, 3, 24, 8, DType::kBFloat16};

TEST(Elements, CountsBothHalves) {
  EXPECT_EQ(k_elements(kShape), 10 * 16 * 3 * 24);
  EXPECT_EQ(v_elements(kShape), 10 * 16 * 3 * 8);
  EXPECT_EQ(k_elements({int64_t{1} << 33, 16, 8, 128, 128, DType::kBFloat16}), int64_t{1} << 47);
  EXPECT_EQ(k_elements({0, kMax32, kMax32, kMax32, 8, DType::kBFloat16}), 0);
  expect_refused("num_pages -1", [] { k_elements({-1, 16, 8, 128, 128, DType::kBFloat16}); });
  expect_refused("head_dim -2", [] { v_elements({0, 16, 8, 128, -2, DType::kBFloat16}); });
  expect_refused("beyond 2^63 - 1", [] { k_elements({kMax64, 2, 1, 1, 1, DType::kBFloat16}); });
  expect_refused("beyond 2^63 - 1", [] { v_elements({2, kMax32, kMax32, 1, kMax32, DType::kBFloat16}); });
}

TEST(Views, StridesOfEveryMaker) {
  const KvCacheView nhd = make_nhd_view(kShape, address(0x100000), address(0x900000));
  EXPECT_EQ(nhd.k_strides.page, 16 * 3 * 24);
  EXPECT_EQ(nhd.k_strides.token, 3 * 24);
  EXPECT_EQ(nhd.k_strides.head, 24);
  EXPECT_EQ(nhd.v_strides.token, 3 * 8);
  const KvCacheView hnd = make_hnd_view(kShape, address(0x100000), address(0x900000));
  EXPECT_EQ(hnd.k_strides.page, 16 * 3 * 24);
  EXPECT_EQ(hnd.k_strides.token, 24);
  EXPECT_EQ(hnd.k_strides.head, 16 * 24);
  EXPECT_EQ(hnd.v_strides.head, 16 * 8);
  const KvCacheView packed = make_cpu_packed_view(kShape, address(0x100000), address(0x900000));
  EXPECT_EQ(packed.k_strides.head, 16 * 24);
  EXPECT_EQ(packed.k_strides.token, 24);
  EXPECT_EQ(packed.v_strides.page, 16 * 3 * 8);
  EXPECT_EQ(packed.v_strides.head, 16 * 8);
  EXPECT_EQ(packed.v_strides.token, 16);
}

TEST(Views, RowsOfDsMla) {
  const KvCacheView cache = make_fp8_ds_mla_view(10, 64, address(0x100000));
  EXPECT_EQ(cache.format, KvFormat::kFp8DsMla);
  EXPECT_EQ(cache.dtype, DType::kFloat8E4M3);
  EXPECT_EQ(cache.v, cache.k);
  EXPECT_EQ(cache.k_strides.token, 656);
  EXPECT_EQ(cache.v_strides.page, 64 * 656);
  EXPECT_EQ(cache.head_dim_qk, 576);
  EXPECT_EQ(cache.head_dim_v, 512);
  EXPECT_TRUE(kvcache::v_aliases_k(cache));
  EXPECT_EQ(kvcache::k_set(cache).extent, 10 * 64 * 656);
  EXPECT_EQ(to_string(cache.format), "fp8_ds_mla");
}

/// Every element of a packed page has its own place, and all places are used.
TEST(Views, PackedRowsTileTheirPage) {
  const KvCacheShape shape{2, 16, 2, 8, 8, DType::kFloat8E4M3};
  std::vector<std::byte> k(static_cast<size_t>(k_elements(shape))), v(static_cast<size_t>(v_elements(shape)));
  const KvCacheView cache = make_cpu_packed_view(shape, k.data(), v.data());
  const kvcache::CacheHalf half = kvcache::v_half(cache);
  std::vector<int> seen(v.size());
  for (int64_t page = 0; page < 2; ++page) {
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t token = 0; token < 16; ++token) {
        for (int64_t d = 0; d < 8; ++d) {
          const std::byte* at = half.row(page, token, head) + d * half.step;
          EXPECT_EQ(at - v.data(), page * 256 + head * 128 + token / 2 * 16 + 2 * d + token % 2);  // KvFormat's words
          ++seen[static_cast<size_t>(at - v.data())];
        }
      }
    }
  }
  EXPECT_THAT(seen, ::testing::Each(1));
}

TEST(Views, OffsetsBeyond32Bits) {
  const KvCacheView cache = make_nhd_view({int64_t{1} << 24, 16, 8, 128, 128, DType::kBFloat16}, address(1 << 20),
                                          address(uintptr_t{1} << 45));
  const std::byte* row = kvcache::k_half(cache).row((1 << 24) - 1, 15, 7);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(row), (1 << 20) + ((uintptr_t{1} << 38) - 128) * 2);
}

TEST(Views, RefuseSizesThatNoCacheHas) {
  const auto make = [](auto change) {
    KvCacheShape shape = kShape;
    change(shape);
    make_nhd_view(shape, address(0x100000), address(0x900000));
  };
  EXPECT_NO_THROW(make([](KvCacheShape&) {}));
  expect_refused("num_pages is -1", [&] { make([](KvCacheShape& s) { s.num_pages = -1; }); });
  expect_refused("page_size is 0", [&] { make([](KvCacheShape& s) { s.page_size = 0; }); });
  expect_refused("num_kv_heads is 0", [&] { make([](KvCacheShape& s) { s.num_kv_heads = 0; }); });
  expect_refused("head_dim_qk is -8", [&] { make([](KvCacheShape& s) { s.head_dim_qk = -8; }); });
  expect_refused("head_dim_v is 0", [&] { make([](KvCacheShape& s) { s.head_dim_v = 0; }); });
  expect_refused("dtype is unset", [&] { make([](KvCacheShape& s) { s.dtype = DType::kUnset; }); });
  expect_refused("dtype is fp4_e2m1x2", [&] { make([](KvCacheShape& s) { s.dtype = DType::kFloat4E2M1x2; }); });
  expect_refused("dtype is invalid", [&] { make([](KvCacheShape& s) { s.dtype = static_cast<DType>(99); }); });
  expect_refused("overflows",
                 [&] { make([](KvCacheShape& s) { s.page_size = s.num_kv_heads = s.head_dim_qk = kMax32; }); });
  expect_refused("beyond the address space", [&] { make([](KvCacheShape& s) { s.num_pages = kMax64; }); });
  expect_refused("k is null", [] { make_nhd_view(kShape, nullptr, address(0x900000)); });
  expect_refused("v is null", [] { make_hnd_view(kShape, address(0x900000), nullptr); });
  expect_refused("k is not aligned", [] { make_nhd_view(kShape, address(0x100001), address(0x900000)); });
  expect_refused("k and v overlap", [] { make_nhd_view(kShape, address(0x100000), address(0x100010)); });
  KvCacheShape empty = kShape;
  empty.num_pages = 0;
  EXPECT_NO_THROW(make_nhd_view(empty, nullptr, nullptr));
}

TEST(Views, PackedSaysWhatIsOffered) {
  const auto make = [](int32_t page_size, DType dtype) {
    make_cpu_packed_view({10, page_size, 2, 64, 64, dtype}, address(0x1000000), address(0x9000000));
  };
  EXPECT_NO_THROW(make(16, DType::kFloat16));
  EXPECT_NO_THROW(make(18, DType::kFloat8E5M2));
  expect_refused(
      "even sizes from 16 on", [&] { make(17, DType::kFloat16); }, ErrorCode::kUnsupported);
  expect_refused(
      "even sizes from 16 on", [&] { make(14, DType::kFloat16); }, ErrorCode::kUnsupported);
  expect_refused(
      "float32 caches are strided", [&] { make(16, DType::kFloat32); }, ErrorCode::kUnsupported);
}

/// The shapes that engines use, as (base of K, base of V, strides).
struct Layout {
  const char* name;
  int64_t v_base;  ///< elements from K's base
  KvStrides k, v;
  bool valid;
};

TEST(Validate, EnginesLayouts) {
  constexpr int64_t kPages = 6, kN = 16, kH = 4, kD = 32, kLayers = 3;
  constexpr int64_t kPage = kN * kH * kD;
  const KvStrides nhd{kPage, kH * kD, kD};
  const Layout layouts[] = {
      {"vLLM FlashAttention: 2 x pages", kPages * kPage, nhd, nhd, true},
      {"vLLM FlashInfer NHD: pages x 2", kPage, {2 * kPage, kH * kD, kD}, {2 * kPage, kH * kD, kD}, true},
      {"vLLM FlashInfer HND", kPage, {2 * kPage, kD, kN * kD}, {2 * kPage, kD, kN * kD}, true},
      {"layers inside pages (B, L, 2, N, H, D)",
       kPage,
       {2 * kLayers * kPage, kH * kD, kD},
       {2 * kLayers * kPage, kH * kD, kD},
       true},
      {"layers inside heads (B, H, L, 2, N, D)",
       kN * kD,
       {2 * kLayers * kPage, kD, 2 * kLayers * kN * kD},
       {2 * kLayers * kPage, kD, 2 * kLayers * kN * kD},
       true},
      {"K and V side by side (B, H, N, 2 D)",
       kD,
       {2 * kPage, 2 * kD, 2 * kN * kD},
       {2 * kPage, 2 * kD, 2 * kN * kD},
       true},
      {"pages innermost",
       kPages * kPage,
       {kD, kPages * kD, kPages * kN * kD},
       {kD, kPages * kD, kPages * kN * kD},
       true},
      {"V is K", 0, nhd, nhd, true},
      {"V shifted by a token: overlaps", kH * kD, nhd, nhd, false},
      {"V inside K, other strides", 0, nhd, {kPage, kD, kN * kD}, false},
      {"token stride too small", kPages * kPage, {kPage, kH * kD - 1, kD}, nhd, false},
      {"page stride too small", kPages * kPage, {kPage - 8, kH * kD, kD}, nhd, false},
      {"broadcast heads", kPages * kPage, {kPage, kH * kD, 0}, nhd, false},
      {"negative page stride", kPages * kPage, {-kPage, kH * kD, kD}, nhd, false},
      {"far beyond 64 bits", kPages * kPage, {kMax64, kH * kD, kD}, nhd, false},
  };
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(layout.name);
    KvCacheView cache = make_nhd_view({kPages, kN, kH, kD, kD, DType::kFloat16}, address(1 << 20), address(1 << 28));
    cache.v = address((1 << 20) + static_cast<uintptr_t>(layout.v_base) * 2);
    cache.k_strides = layout.k;
    cache.v_strides = layout.v;
    if (layout.valid) {
      EXPECT_NO_THROW(validate(cache));
    } else {
      EXPECT_THROW(validate(cache), Error);
    }
  }
}

TEST(Validate, LatentAttentionAliases) {  // V is the first 512 of K's 576 components
  KvCacheView cache = make_nhd_view({8, 1, 1, 576, 512, DType::kBFloat16}, address(1 << 20), address(1 << 28));
  EXPECT_FALSE(kvcache::v_aliases_k(cache));
  cache.v = cache.k;
  cache.v_strides.page = 576;
  EXPECT_NO_THROW(validate(cache));
  EXPECT_TRUE(kvcache::v_aliases_k(cache));
  cache.v = address((1 << 20) + 64 * 2);
  EXPECT_TRUE(kvcache::v_aliases_k(cache));
  cache.v = address((1 << 20) + 65 * 2);  // one component into the next token
  expect_refused("k and v overlap", [&] { validate(cache); });
}

TEST(Validate, KInsideVIsNoAlias) {  // V would be written over by K, and the other way round
  KvCacheView cache = make_nhd_view({8, 1, 1, 32, 32, DType::kBFloat16}, address(1 << 20), address(1 << 28));
  cache.v = cache.k;
  cache.head_dim_qk = 16;
  expect_refused("k and v overlap", [&] { validate(cache); });
}

TEST(Validate, PackedStrides) {
  KvCacheView cache = make_cpu_packed_view(kShape, address(1 << 20), address(1 << 28));
  cache.k_strides.head += 8;
  cache.k_strides.page += 64;
  EXPECT_NO_THROW(validate(cache));
  cache.k_strides.token = 25;
  expect_refused("k_strides.token", [&] { validate(cache); });
  cache.k_strides.token = 24;
  cache.v_strides.token = 8;
  expect_refused("v_strides.token", [&] { validate(cache); });
  cache.format = static_cast<KvFormat>(5);
  expect_refused("format is 5", [&] { validate(cache); });
}

TEST(Validate, RandomGarbageIsAnsweredOrRefused) {
  std::mt19937_64 random(11);
  const auto wide = [&]() -> int64_t {
    switch (random() % 5) {
      case 0: return static_cast<int64_t>(random());
      case 1: return kMax64;
      case 2: return -1;
      default: return static_cast<int64_t>(random() % 5000);
    }
  };
  const auto narrow = [&] {
    return random() % 4 == 0 ? static_cast<int32_t>(random()) : static_cast<int32_t>(random() % 40);
  };
  int answered = 0;
  int refused = 0;
  for (int round = 0; round < 50000; ++round) {
    KvCacheView cache = make_hnd_view(kShape, address(0x100000), address(0x900000));
    for (uint64_t changes = random() % 4; changes > 0; --changes) {
      switch (random() % 12) {
        case 0: cache.format = static_cast<KvFormat>(random() % 3); break;
        case 1: cache.dtype = static_cast<DType>(random() % 8); break;
        case 2: cache.k = address(static_cast<uintptr_t>(wide())); break;
        case 3: cache.v = address(static_cast<uintptr_t>(wide())); break;
        case 4: cache.num_pages = wide(); break;
        case 5: cache.page_size = narrow(); break;
        case 6: cache.num_kv_heads = narrow(); break;
        case 7: cache.head_dim_qk = narrow(); break;
        case 8: cache.head_dim_v = narrow(); break;
        case 9: cache.k_strides = {wide(), wide(), wide()}; break;
        case 10: cache.v_strides = {wide(), wide(), wide()}; break;
        default: cache.v = cache.k; break;
      }
    }
    try {
      validate(cache);
      ++answered;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(answered, 1000);
}

}  // namespace
}  // namespace folio
