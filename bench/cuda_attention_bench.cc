#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cuda_timing.hpp"
#include "folio/folio.hpp"
#include "page_read.hpp"

/// Attention of one layer on a GPU: decode beside a plain read of the same pages, prefill as TFLOP/s. bfloat16 and fp8,
/// 32 query heads over 8, head_dim 128, shuffled pages of 16, in a CUDA graph; medians. Needs a GPU.
///   folio_cuda_attention_bench [KERNEL [LABEL]]: of all shapes, those whose label contains LABEL
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header
using bench::check;
using bench::DeviceBytes;

constexpr int32_t kQHeads = 32;
constexpr int32_t kKvHeads = 8;
constexpr int32_t kHeadDim = 128;
constexpr int32_t kPageSize = 16;

/// Median microseconds of a replay of a graph of the call.
double time_of(cudaStream_t stream, const std::function<void()>& call) {
  call();  // what happens once, happens outside of the graph
  check(cudaStreamSynchronize(stream));
  return bench::graph_time(stream, 1, 20, call);
}

struct Shape {
  const char* name;
  std::vector<int32_t> kv_len;
  int32_t q_len;
  int32_t chunk = 0;  ///< tokens of the first request, if it has others than `q_len`
  int32_t tokens_of(size_t request) const { return request == 0 && chunk > 0 ? chunk : q_len; }
};

void measure(const std::string& label, const Shape& shape, const std::string& kernel, cudaStream_t native,
             DType q_dtype, DType kv_dtype) {
  const Context context = Context::cuda(0);
  AttentionConfig config;
  config.num_q_heads = kQHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim_qk = config.head_dim_v = kHeadDim;
  config.page_size = kPageSize;
  config.q = q_dtype;
  config.kv = kv_dtype;
  config.out = DType::kBFloat16;
  PrepareOptions options;
  options.force_kernel = kernel;
  const AttentionOp op = prepare(context, config, options);
  PlanBuffer buffer = make_plan_buffer(op);
  const Stream stream{native};

  const auto num_requests = static_cast<int32_t>(shape.kv_len.size());
  std::vector<int32_t> cu_q{0}, indptr{0}, pages;
  double keys = 0.0;
  double visible = 0.0;
  for (size_t r = 0; r < shape.kv_len.size(); ++r) {
    const int32_t length = shape.kv_len[r];
    const int32_t tokens = shape.tokens_of(r);
    cu_q.push_back(cu_q.back() + tokens);
    indptr.push_back(indptr.back() + (length + kPageSize - 1) / kPageSize);
    keys += length;
    visible += 1.0 * length * tokens - 0.5 * (tokens - 1.0) * tokens;
  }
  const int32_t num_tokens = cu_q.back();
  for (int32_t page = 0; page < indptr.back(); ++page) pages.push_back(page);
  std::mt19937 random(7);
  std::shuffle(pages.begin(), pages.end(), random);
  const DeviceBytes device_indptr(indptr), device_pages(pages);
  const KvCacheShape cache{.num_pages = indptr.back(),
                           .page_size = kPageSize,
                           .num_kv_heads = kKvHeads,
                           .head_dim_qk = kHeadDim,
                           .head_dim_v = kHeadDim,
                           .dtype = kv_dtype};
  const auto element = static_cast<size_t>(size_of(kv_dtype));
  const size_t pool = element * static_cast<size_t>(k_elements(cache));
  const DeviceBytes k(pool), v(pool), sink(4);
  const size_t rows = static_cast<size_t>(num_tokens) * kQHeads * kHeadDim;
  const auto q_element = static_cast<size_t>(size_of(q_dtype));
  const DeviceBytes q(q_element * rows), out(2 * rows);
  if (q_element == 2) {
    folio_bench::fill_normal(q.as(), rows, 1, native);
  } else {
    folio_bench::fill_fp8(q.as(), rows, 1, native);
  }
  if (element == 2) {
    folio_bench::fill_normal(k.as(), pool / 2, 2, native);
    folio_bench::fill_normal(v.as(), pool / 2, 3, native);
  } else {
    folio_bench::fill_fp8(k.as(), pool, 2, native);
    folio_bench::fill_fp8(v.as(), pool, 3, native);
  }

  KvSegment lengths;
  lengths.kv_len = shape.kv_len.data();
  BatchView batch;
  batch.num_requests = num_requests;
  batch.num_tokens = num_tokens;
  batch.cu_q = cu_q.data();
  batch.segments = {&lengths, 1};
  SegmentArgs segment;
  segment.cache = make_nhd_view(cache, k.as(), v.as());
  segment.table = {.kind = PageTableKind::kCsr,
                   .indices = device_pages.as<int32_t>(),
                   .num_indices = static_cast<int64_t>(pages.size()),
                   .indptr = device_indptr.as<int32_t>(),
                   .row_stride = 0,
                   .first_column = 0,
                   .num_rows = num_requests};
  AttentionArgs args;
  args.q = ConstTensorView(q.as(), q_dtype, {num_tokens, kQHeads, kHeadDim});
  args.out = TensorView(out.as(), DType::kBFloat16, {num_tokens, kQHeads, kHeadDim});
  args.segments = {&segment, 1};
  const AttentionPlan plan = folio::plan(op, batch, buffer, stream);
  const size_t bytes = std::max(workspace_size(op), workspace_size(plan));
  const DeviceBytes workspace(bytes);
  init_workspace(op, {workspace.as(), bytes}, stream);
  check(cudaStreamSynchronize(native));

  const double attention = time_of(native, [&] { run(plan, args, {workspace.as(), bytes}, stream); });
  const double read = time_of(native, [&] {
    folio_bench::read_pages(k.as(), v.as(), pool / static_cast<size_t>(indptr.back()), device_pages.as<int32_t>(),
                            indptr.back(), sink.as<int32_t>(), native);
  });
  const double moved =
      2.0 * keys * kKvHeads * kHeadDim * static_cast<double>(element) + static_cast<double>((2 + q_element) * rows);
  std::printf(
      "%-21s %-11s run %9.1f us  %7.0f GB/s  read of the pages %8.1f us, %5.0f GB/s: ratio %.3f  %6.1f TFLOP/s\n",
      label.c_str(), op.kernel_name().c_str(), attention, moved / attention / 1e3, read,
      2.0 * static_cast<double>(pool) / read / 1e3, read / attention,
      4.0 * kHeadDim * kQHeads * visible / attention / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string kernel = argc > 1 ? argv[1] : "";
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<int32_t> skewed(64, 1024);
    skewed[20] = 131072;
    const std::vector<Shape> shapes{{"decode 64x4096", std::vector<int32_t>(64, 4096), 1},
                                    {"decode 8x32768", std::vector<int32_t>(8, 32768), 1},
                                    {"decode skewed", skewed, 1},
                                    {"decode 1x131072", {131072}, 1},
                                    {"decode 1x4096", {4096}, 1},
                                    {"verify 64x4096x4", std::vector<int32_t>(64, 4096), 4},
                                    {"prefill 8x4096", std::vector<int32_t>(8, 4096), 4096},
                                    {"prefill 1x8192", {8192}, 8192},
                                    {"prefill 1x16384", {16384}, 16384},
                                    {"append 8x512", std::vector<int32_t>(8, 8704), 512},
                                    {"mixed chunk 512", {4096}, 512},
                                    {"mixed decode 128x4096", std::vector<int32_t>(128, 4096), 1},
                                    {"mixed both", std::vector<int32_t>(129, 4096), 1, 512}};
    const std::string wanted = argc > 2 ? argv[2] : "";
    struct Types {
      const char* name;
      DType q;
      DType kv;
    };
    constexpr Types kTypes[] = {{" bf16", DType::kBFloat16, DType::kBFloat16},
                                {" fp8", DType::kBFloat16, DType::kFloat8E4M3},
                                {" all fp8", DType::kFloat8E4M3, DType::kFloat8E4M3}};
    for (const Types& types : kTypes) {
      for (const Shape& shape : shapes) {
        const std::string label = std::string(shape.name) + types.name;
        if (label.find(wanted) != std::string::npos) measure(label, shape, kernel, stream, types.q, types.kv);
      }
    }
    check(cudaStreamDestroy(stream));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
