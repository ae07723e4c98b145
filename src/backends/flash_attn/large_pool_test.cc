#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "backends/flash_attn/flash_attn_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using testing::backend_batch;
using testing::BatchFixture;
using testing::FlashAttnFixture;
using testing::LayerSetup;

/// A pool of which only what is touched takes memory.
class SparsePool {
 public:
  explicit SparsePool(size_t bytes)
      : bytes_(bytes),
        base_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparsePool() {
    if (valid()) munmap(base_, bytes_);
  }
  SparsePool(const SparsePool&) = delete;
  SparsePool& operator=(const SparsePool&) = delete;
  bool valid() const { return base_ != MAP_FAILED; }
  std::byte* data() const { return static_cast<std::byte*>(base_); }

 private:
  size_t bytes_;
  void* base_;
};

/// Moves the fixture's pages, in their order, to places spread over a pool of num_pages: its last page to the last one.
/// `cache` is [pages, 2, ...] in shape, whatever its strides.
void spread(BatchFixture& fixture, TensorView& cache, const SparsePool& pool, int64_t num_pages) {
  const int64_t num_used = cache.shape[0];
  const auto place = [&](int64_t page) { return num_pages - 1 - (num_used - 1 - page) * (num_pages / num_used); };
  const int32_t page_size = fixture.setup.page_size;
  const int64_t size = size_of(fixture.setup.model_dtype);
  const bool halves_apart = cache.strides[1] > cache.strides[0];
  const int64_t half_bytes = (halves_apart ? cache.strides[0] : cache.strides[1]) * size;
  const int64_t new_stride = halves_apart ? cache.strides[0] * num_pages : cache.strides[1];
  const auto* from = static_cast<const std::byte*>(cache.data);
  for (int64_t page = 0; page < num_used; ++page) {
    for (int64_t half = 0; half < 2; ++half) {
      std::memcpy(pool.data() + (place(page) * cache.strides[0] + half * new_stride) * size,
                  from + (page * cache.strides[0] + half * cache.strides[1]) * size, static_cast<size_t>(half_bytes));
    }
  }
  for (int32_t& page : fixture.block_table) {
    if (page >= 0 && page < num_used) page = static_cast<int32_t>(place(page));
  }
  for (int64_t& slot : fixture.slot_mapping) slot = place(slot / page_size) * page_size + slot % page_size;
  cache.data = pool.data();
  cache.shape[0] = num_pages;
  cache.strides[1] = new_stride;
}

class LargePool : public ::testing::TestWithParam<GoldenCase> {
 protected:
  LayerSetup setup(KvCacheLayout layout) const {
    LayerSetup setup;
    setup.num_heads = GetParam().at<int32_t>("num_heads");
    setup.num_kv_heads = GetParam().at<int32_t>("num_kv_heads");
    setup.head_size = GetParam().at<int32_t>("head_size");
    setup.layout = layout;
    return setup;
  }
  int64_t num_pages() const { return GetParam().at<int64_t>("num_pages"); }
  /// K and V of all pages in bfloat16.
  size_t pool_bytes() const {
    const LayerSetup layer = setup(KvCacheLayout::kNhd);
    return static_cast<size_t>(num_pages() * 2 * layer.page_size * layer.num_kv_heads * layer.head_size * 2);
  }
  const testing::BatchLengths& lengths() const { return backend_batch(GetParam().at<std::string>("batch")); }
};

TEST_P(LargePool, OfFlashAttention) {
  for (const KvCacheLayout layout : {KvCacheLayout::kNhd, KvCacheLayout::kHnd}) {
    if (folio::testing::kInstrumented && layout == KvCacheLayout::kHnd) continue;
    const SparsePool pool(pool_bytes());
    if (!pool.valid()) GTEST_SKIP() << "no address space for a pool of " << pool_bytes() << " bytes";
    FlashAttnFixture fixture(setup(layout), lengths());
    spread(fixture, fixture.kv_cache, pool, num_pages());
    fixture.kv = fixture.logical_cache();
    fixture.step();
    EXPECT_EQ(fixture.wrong_output(), "");
  }
}

TEST_P(LargePool, OfFlashInfer) {
  for (const KvCacheLayout layout : {KvCacheLayout::kNhd, KvCacheLayout::kHnd}) {
    if (folio::testing::kInstrumented && layout == KvCacheLayout::kHnd) continue;
    const SparsePool pool(pool_bytes());
    if (!pool.valid()) GTEST_SKIP() << "no address space for a pool of " << pool_bytes() << " bytes";
    BatchFixture fixture(setup(layout), lengths());
    spread(fixture, fixture.kv_cache, pool, num_pages());
    fixture.run();
    EXPECT_EQ(fixture.wrong_output(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, LargePool, ::testing::ValuesIn(golden_cases("backends/large_pool")), golden_case_name);

}  // namespace
}  // namespace folio::inline v0::backends
