#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "device_array.hpp"
#include "folio/verify.hpp"

namespace folio::cuda_test {
namespace {

constexpr int32_t kQHeads = 16;
constexpr int32_t kPageSize = 16;
constexpr int32_t kUsedPages = 12;
constexpr int32_t kKvLen = kUsedPages * kPageSize - 5;
constexpr int64_t kBeyond = int64_t{1} << 31;

struct Case {
  DType dtype;
  int32_t head_dim_qk;
  int32_t head_dim_v;
  const char* kernel;
};

/// Bytes that are numbers of moderate size in bfloat16 and in e4m3.
std::vector<std::byte> moderate_values(DType dtype, size_t elements) {
  std::vector<std::byte> bytes(elements * static_cast<size_t>(size_of(dtype)));
  uint32_t state = 1;
  for (size_t i = 0; i < elements; ++i) {
    state = state * 1664525u + 1013904223u;
    const uint32_t bits = state >> 16;
    if (dtype == DType::kBFloat16) {
      const auto value = static_cast<uint16_t>(0x3e00u + (bits & 0x81ffu));  // 1/8 to 1 and their negatives
      std::memcpy(&bytes[2 * i], &value, 2);
    } else {
      bytes[i] = static_cast<std::byte>(0x20u + (bits & 0x97u));
    }
  }
  return bytes;
}

class LargePool : public CudaTest, public ::testing::WithParamInterface<Case> {};

/// The same pages, one after the other in a small pool and spread over one of more than 2^31 elements, give the same
/// bits. Keys and values lie in one piece of a page each, or, where they are wider than 256, values inside keys.
TEST_P(LargePool, GivesTheBitsOfASmallOne) {
  const Case& c = GetParam();
  const std::vector<std::string> kernels = verify::runnable_kernels(Context::cuda(0));
  if (std::count(kernels.begin(), kernels.end(), c.kernel) == 0)
    GTEST_SKIP() << c.kernel << " does not run on this GPU";
  const bool inside = c.head_dim_qk > 256;
  const auto element = static_cast<size_t>(size_of(c.dtype));
  const int64_t page = int64_t{kPageSize} * (inside ? c.head_dim_qk : c.head_dim_qk + c.head_dim_v);
  const int64_t num_pages = kBeyond / page + 2 * kUsedPages;
  const size_t pool_bytes = static_cast<size_t>(num_pages * page) * element;
  size_t free_bytes = 0, all_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &all_bytes));
  if (free_bytes < pool_bytes + (size_t{1} << 28)) GTEST_SKIP() << "not enough memory for " << pool_bytes << " bytes";
  const DeviceArray<std::byte> large(pool_bytes);
  const DeviceArray<std::byte> small(
      moderate_values(c.dtype, static_cast<size_t>(kUsedPages) * static_cast<size_t>(page)));
  const DeviceArray<std::byte> q(moderate_values(DType::kBFloat16, static_cast<size_t>(kQHeads * c.head_dim_qk)));
  std::vector<int32_t> places[2];
  for (int32_t i = 0; i < kUsedPages; ++i) {
    places[0].push_back(i);
    places[1].push_back(static_cast<int32_t>(num_pages - 1 - (num_pages / kUsedPages) * i));
    check(cudaMemcpy(large.data() + static_cast<size_t>(places[1].back() * page) * element,
                     small.data() + static_cast<size_t>(i * page) * element, static_cast<size_t>(page) * element,
                     cudaMemcpyDeviceToDevice));
  }

  AttentionConfig config;
  config.num_q_heads = kQHeads;
  config.num_kv_heads = 1;
  config.head_dim_qk = c.head_dim_qk;
  config.head_dim_v = c.head_dim_v;
  config.kv = c.dtype;
  config.out = DType::kFloat32;
  config.page_size = kPageSize;
  PrepareOptions options;
  options.force_kernel = c.kernel;
  const AttentionOp op = prepare(Context::cuda(0), config, options);
  PlanBuffer buffer = make_plan_buffer(op);
  const std::vector<int32_t> cu_q{0, 1}, kv_len{kKvLen}, entries{0, kUsedPages};
  KvSegment segment;
  segment.kv_len = kv_len.data();
  BatchView batch;
  batch.num_requests = batch.num_tokens = 1;
  batch.cu_q = cu_q.data();
  batch.segments = {&segment, 1};
  const AttentionPlan plan = folio::plan(op, batch, buffer);
  const DeviceArray<std::byte> scratch(workspace_size(op));
  const Workspace workspace{scratch.data(), scratch.bytes()};
  init_workspace(op, workspace);
  const DeviceArray<int32_t> indptr(entries);

  std::vector<float> outs[2];
  for (const size_t which : {size_t{0}, size_t{1}}) {
    std::byte* const pool = which == 0 ? small.data() : large.data();
    const DeviceArray<int32_t> indices(places[which]);
    const auto elements = static_cast<size_t>(kQHeads * c.head_dim_v);
    DeviceArray<float> out(elements);
    out.fill(0xff);
    SegmentArgs args;
    args.cache.dtype = c.dtype;
    args.cache.k = pool;
    args.cache.v = pool + (inside ? 0 : static_cast<size_t>(kPageSize * c.head_dim_qk) * element);
    args.cache.num_pages = which == 0 ? kUsedPages : num_pages;
    args.cache.page_size = kPageSize;
    args.cache.num_kv_heads = 1;
    args.cache.head_dim_qk = c.head_dim_qk;
    args.cache.head_dim_v = c.head_dim_v;
    args.cache.k_strides = {page, c.head_dim_qk, c.head_dim_qk};
    args.cache.v_strides = inside ? args.cache.k_strides : KvStrides{page, c.head_dim_v, c.head_dim_v};
    args.table.indices = indices.data();
    args.table.num_indices = kUsedPages;
    args.table.indptr = indptr.data();
    args.table.num_rows = 1;
    AttentionArgs attention;
    attention.q = {q.data(), DType::kBFloat16, {1, kQHeads, c.head_dim_qk}};
    attention.out = {out.data(), DType::kFloat32, {1, kQHeads, c.head_dim_v}};
    attention.segments = {&args, 1};
    run(plan, attention, workspace);
    check(cudaDeviceSynchronize());
    outs[which] = out.get();
  }
  float largest = 0.0f;
  for (const float value : outs[0]) {
    ASSERT_TRUE(std::isfinite(value));
    largest = std::max(largest, std::abs(value));
  }
  EXPECT_GT(largest, 0.0f);
  EXPECT_EQ(std::memcmp(outs[0].data(), outs[1].data(), outs[0].size() * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, LargePool,
                         ::testing::Values(Case{DType::kBFloat16, 128, 128, "cuda-sm80"},
                                           Case{DType::kFloat8E4M3, 128, 128, "cuda-sm80"},
                                           Case{DType::kBFloat16, 576, 512, "cuda-sm80"},
                                           Case{DType::kBFloat16, 128, 128, "cuda-plain"},
                                           Case{DType::kBFloat16, 576, 512, "cuda-plain"},
                                           Case{DType::kBFloat16, 128, 128, "cuda-sm90-decode"},
                                           Case{DType::kFloat8E4M3, 128, 128, "cuda-sm90-decode"},
                                           Case{DType::kBFloat16, 128, 128, "cuda-sm90-prefill"},
                                           Case{DType::kBFloat16, 576, 512, "cuda-sm90-mla"}),
                         [](const auto& of_case) {
                           const Case& c = of_case.param;
                           std::string kernel = c.kernel + 5;
                           std::replace(kernel.begin(), kernel.end(), '-', '_');
                           return kernel + "_" + (c.dtype == DType::kBFloat16 ? "bf16" : "e4m3") + "_" +
                                  std::to_string(c.head_dim_qk) + "_" + std::to_string(c.head_dim_v);
                         });

}  // namespace
}  // namespace folio::cuda_test
