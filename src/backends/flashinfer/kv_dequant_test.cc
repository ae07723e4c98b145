#include "folio/backends/flashinfer/kv_dequant.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "backends/flashinfer/batch_test_util.hpp"
#include "backends/flashinfer/group_test_util.hpp"
#include "folio/backends/flashinfer/block_table.hpp"
#include "folio/kv_cache.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::BatchFixture;
using ::testing::HasSubstr;
using testing::LayerSetup;
using testing::message_of;

constexpr uint16_t kUnwritten = 0x5a5a;

/// A fixture over an fp8 cache with room for its copy.
struct Dequant {
  BatchFixture fixture;
  KvCacheView kv_cache;
  std::vector<uint16_t> k, v;
  KvCacheView mock;
  std::vector<int32_t> table;

  explicit Dequant(const std::string& cache_dtype, KvCacheLayout layout = KvCacheLayout::kHnd)
      : fixture(setup_of(cache_dtype, layout), {"prefill", {40, 16, 1, 33}, {5, 16, 1, 2}}) {
    const LayerSetup& setup = fixture.setup;
    kv_cache = FlashInferBackend::kv_cache_view(fixture.kv_cache,
                                                FlashInferBackend::get_fp8_dtype_for_flashinfer(cache_dtype));
    const int64_t pages = num_dequantized_pages(fixture.seq_lens, setup.page_size);
    const size_t half = static_cast<size_t>(pages * setup.page_size * setup.num_kv_heads * setup.head_size);
    k.assign(half, kUnwritten);
    v.assign(half, kUnwritten);
    mock =
        make_nhd_view({pages, setup.page_size, setup.num_kv_heads, setup.head_size, setup.head_size, DType::kBFloat16},
                      k.data(), v.data());
    table.assign(fixture.seq_lens.size() * static_cast<size_t>(fixture.batch.block_table.num_columns), -1);
  }
  static LayerSetup setup_of(const std::string& cache_dtype, KvCacheLayout layout) {
    LayerSetup setup;
    setup.layout = layout;
    setup.cache_dtype = cache_dtype;
    setup.share_kv = true;
    setup.k_scale = 0.5f;
    setup.v_scale = 2.0f;
    setup.q_scale = 3.0f;  // of 16-bit queries: never applied
    return setup;
  }
  void run() {
    trtllm_prefill_attn_kvfp8_dequant(fixture.context, kv_cache, fixture.batch.block_table, fixture.seq_lens,
                                      fixture.setup.k_scale, fixture.setup.v_scale, mock, table);
  }
};

TEST(KvDequant, CountsThePagesInUse) {
  const std::vector<int32_t> seq_lens{40, 16, 1, 33, 0};
  EXPECT_EQ(num_dequantized_pages(seq_lens, 16), 1 + 3 + 1 + 1 + 3) << "not rows times columns";
}

TEST(KvDequant, CopiesWhatIsInUseAndAppliesEachScaleOnce) {
  for (const std::string cache_dtype : {"fp8_e4m3", "fp8_e5m2"}) {
    for (const KvCacheLayout layout : {KvCacheLayout::kNhd, KvCacheLayout::kHnd}) {
      Dequant dequant(cache_dtype, layout);
      dequant.run();
      const int32_t columns = dequant.fixture.batch.block_table.num_columns;
      int32_t next = 1;
      for (size_t r = 0; r < 4; ++r) {
        for (int32_t j = 0; j < columns; ++j) {
          const bool used = j * 16 < dequant.fixture.seq_lens[r];
          EXPECT_EQ(dequant.table[r * static_cast<size_t>(columns) + static_cast<size_t>(j)], used ? next++ : 0);
        }
      }
      for (size_t i = 0; i < 16 * 2 * 32; ++i) EXPECT_EQ(dequant.k[i], kUnwritten) << "page 0 is nobody's";

      // Attention over the copy is attention over the cache; the scales are in it.
      BlockTableWorkspace workspace(dequant.fixture.context);
      BlockTableArgs args;
      args.query = dequant.fixture.query;
      args.kv_cache = dequant.mock;
      args.block_tables = {dequant.table.data(), 4, columns, columns};
      args.seq_lens = dequant.fixture.seq_lens;
      args.bmm1_scale = 1.0f / std::sqrt(32.0f);
      args.out = dequant.fixture.output;
      trtllm_batch_context_with_kv_cache(workspace, args, dequant.fixture.query_start_loc);
      EXPECT_EQ(dequant.fixture.wrong_output(), "");
    }
  }
}

TEST(KvDequant, RefusesBeforeItWrites) {
  FOLIO_CPU_ONLY("kernels of a GPU leave out the entries that a CPU refuses");
  const auto refused = [](auto&& change) {
    Dequant dequant("fp8");
    change(dequant);
    std::string message = message_of([&] { dequant.run(); });
    for (const uint16_t value : dequant.k) EXPECT_EQ(value, kUnwritten);
    return message;
  };
  // The original skips ids <= 0 and reads whatever id is too large.
  EXPECT_THAT(refused([](Dequant& d) { d.fixture.block_table[0] = -1; }), HasSubstr("-1"));
  EXPECT_THAT(refused([](Dequant& d) { d.fixture.block_table[1] = 1 << 20; }), HasSubstr("1048576"));
  EXPECT_THAT(refused([](Dequant& d) { d.fixture.seq_lens[0] = 49; }), HasSubstr("pages"));
  EXPECT_THAT(refused([](Dequant& d) { d.mock.num_pages -= 1; }), HasSubstr("9 are needed"));
  EXPECT_THAT(refused([](Dequant& d) { d.mock.dtype = DType::kFloat32; }), HasSubstr("mock_kv_cache is float32"));
  EXPECT_THAT(refused([](Dequant& d) { d.kv_cache.dtype = DType::kBFloat16; }), HasSubstr("kv_cache is bfloat16"));
  EXPECT_THAT(refused([](Dequant& d) { d.table.pop_back(); }), HasSubstr("mock_block_table has"));
  EXPECT_THAT(refused([](Dequant& d) { d.fixture.setup.k_scale = NAN; }), HasSubstr("k_scale is nan"));
}

TEST(KvDequant, PageZeroIsAPageLikeAnyOther) {
  Dequant dequant("fp8");
  // Request 2's only page trades places with page 0.
  const auto columns = static_cast<size_t>(dequant.fixture.batch.block_table.row_stride);
  int32_t& entry = dequant.fixture.block_table[2 * columns];
  const auto page_bytes = static_cast<int64_t>(dequant.kv_cache.k_strides.page);
  std::swap_ranges(dequant.fixture.cache_memory.begin(), dequant.fixture.cache_memory.begin() + page_bytes,
                   dequant.fixture.cache_memory.begin() + entry * page_bytes);
  entry = 0;
  dequant.run();
  const int64_t mock_page = dequant.table[2 * static_cast<size_t>(dequant.fixture.batch.block_table.num_columns)];
  for (int32_t d = 0; d < 32; ++d) {
    const auto* stored = reinterpret_cast<const uint8_t*>(dequant.fixture.cache_memory.data());
    EXPECT_EQ(bfloat16_to_float(dequant.k[static_cast<size_t>(mock_page * dequant.mock.k_strides.page + d)]),
              bfloat16_to_float(float_to_bfloat16(fp8_e4m3_to_float(stored[d]) * 0.5f)));
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
