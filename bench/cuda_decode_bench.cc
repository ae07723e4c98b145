#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_timing.hpp"
#include "folio/folio.hpp"
#include "folio/types/ds_mla.hpp"
#include "page_read.hpp"

/// Decode, verify and mixed batches of one layer on a GPU, beside reads of the same pages by TMA and by threads, the
/// faster of which is what it is compared with: each in a CUDA graph, one after the other, over several page tables in
/// turn that together exceed the L2; medians. Needs a GPU of compute capability 9.0.
///   folio_cuda_decode_bench [KERNEL [LABEL [ROUNDS]]]: of all rows, those whose label contains LABEL, or of "=LABEL"
///   the one whose label it is
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header
using bench::check;
using bench::DeviceBytes;

struct Row {
  std::string name;
  std::vector<int32_t> kv_len;
  int32_t q_heads = 32;
  int32_t kv_heads = 8;
  int32_t head_dim = 128;
  bool mla = false;       ///< the first 512 components of keys are values too
  int32_t mla_dim = 576;  ///< components of keys
  bool ds_mla = false;    ///< MLA over rows of fp8_ds_mla
  int32_t page_size = 16;
  int32_t q_len = 1;
  std::vector<int32_t> prompts{};  ///< new tokens of the first requests, instead of q_len
  DType kv = DType::kBFloat16;
  bool hnd = false;
  float soft_cap = 0.0f;
  bool device_plan = false;  ///< the graph plans, too, from lengths on the GPU
};

/// New tokens of a request.
int32_t q_len_of(const Row& row, size_t request) {
  return request < row.prompts.size() ? row.prompts[request] : row.q_len;
}

/// A graph of one call.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& call) {
    call();  // what happens once, happens outside of the graph
    check(cudaStreamSynchronize(stream));
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call();
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable_, graph, 0));
    check(cudaGraphDestroy(graph));
  }
  ~Graph() { static_cast<void>(cudaGraphExecDestroy(executable_)); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) const { check(cudaGraphLaunch(executable_, stream)); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

/// Values are their keys' first components.
KvCacheView mla_view(const KvCacheShape& shape, void* data) {
  KvCacheView view;
  view.dtype = shape.dtype;
  view.k = view.v = data;
  view.num_pages = shape.num_pages;
  view.page_size = shape.page_size;
  view.num_kv_heads = shape.num_kv_heads;
  view.head_dim_qk = shape.head_dim_qk;
  view.head_dim_v = shape.head_dim_v;
  const int64_t token = int64_t{shape.num_kv_heads} * shape.head_dim_qk;
  view.k_strides = view.v_strides = {shape.page_size * token, token, shape.head_dim_qk};
  return view;
}

/// Fills rows of fp8_ds_mla with normal keys.
void fill_ds_mla(const KvCacheView& cache, cudaStream_t native) {
  constexpr int64_t kAtOnce = 1 << 16;
  const int64_t slots = cache.num_pages * cache.page_size;
  std::vector<int64_t> numbers(static_cast<size_t>(slots));
  std::iota(numbers.begin(), numbers.end(), 0);
  const DeviceBytes mapping(numbers), keys(static_cast<size_t>(2 * kAtOnce * cache.head_dim_qk));
  folio_bench::fill_normal(keys.as(), static_cast<size_t>(kAtOnce * cache.head_dim_qk), 2, native);
  for (int64_t first = 0; first < slots; first += kAtOnce) {
    CacheWriteArgs args;
    args.k = ConstTensorView(keys.as(), DType::kBFloat16, {kAtOnce, 1, cache.head_dim_qk});
    args.v = ConstTensorView(nullptr, DType::kBFloat16, {kAtOnce, 1, cache.head_dim_v});
    args.slot_mapping = mapping.as<int64_t>() + first;
    args.num_slots = std::min(kAtOnce, slots - first);
    args.cache = cache;
    write_kv_cache(Context::cuda(0), args, Stream{native});
  }
  check(cudaStreamSynchronize(native));
}

/// Microseconds that a GPU is kept busy before what is timed: a graph takes the host several to launch, the more nodes
/// it has the more, and a GPU that waits for it counts them.
constexpr uint32_t kAhead = 40;

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void measure(const Row& row, const std::string& kernel, cudaStream_t native, int rounds) {
  const auto num_requests = static_cast<int32_t>(row.kv_len.size());
  std::vector<int32_t> cu_q{0}, indptr{0};
  double keys = 0.0;
  int32_t max_q_len = 0;
  for (size_t r = 0; r < row.kv_len.size(); ++r) {
    cu_q.push_back(cu_q.back() + q_len_of(row, r));
    indptr.push_back(indptr.back() + (row.kv_len[r] + row.page_size - 1) / row.page_size);
    keys += row.kv_len[r];
    max_q_len = std::max(max_q_len, q_len_of(row, r));
  }
  const int32_t num_tokens = cu_q.back();
  const int32_t longest = *std::max_element(row.kv_len.begin(), row.kv_len.end());
  AttentionConfig config;
  config.num_q_heads = row.q_heads;
  config.num_kv_heads = row.kv_heads;
  const int32_t dim_qk = row.mla ? row.mla_dim : row.head_dim;
  const int32_t dim_v = row.mla ? 512 : row.head_dim;
  config.head_dim_qk = dim_qk;
  config.head_dim_v = dim_v;
  config.page_size = row.page_size;
  config.kv = row.kv;
  if (row.ds_mla) config.kv_format = KvFormat::kFp8DsMla;
  if (row.soft_cap > 0.0f) config.features = Feature::kSoftCap;
  PrepareOptions options;
  options.force_kernel = kernel;
  if (row.device_plan) options.bounds = GraphBounds{num_requests, num_tokens, max_q_len, longest, 0};
  const AttentionOp op = prepare(Context::cuda(0), config, options);
  PlanBuffer buffer = make_plan_buffer(op);
  const Stream stream{native};

  const auto element = static_cast<size_t>(size_of(row.kv));
  // Reads take keys and values from two halves of memory, attention those of MLA from one.
  const int32_t token_elements = row.ds_mla ? kDsMlaRowBytes : row.kv_heads * (row.mla ? dim_qk : dim_qk + dim_v);
  const size_t page_bytes = element * static_cast<size_t>(row.page_size * token_elements) / 2;
  const size_t set_bytes = 2 * page_bytes * static_cast<size_t>(indptr.back());
  const int32_t sets = std::clamp(static_cast<int32_t>((size_t{320} << 20) / set_bytes), 2, 16);
  std::vector<int32_t> pages(static_cast<size_t>(sets) * static_cast<size_t>(indptr.back()));
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
  std::mt19937 random(7);
  std::shuffle(pages.begin(), pages.end(), random);
  const DeviceBytes device_cu_q(cu_q), device_kv_len(row.kv_len), device_indptr(indptr), device_pages(pages);
  const KvCacheShape cache{.num_pages = static_cast<int64_t>(pages.size()),
                           .page_size = row.page_size,
                           .num_kv_heads = row.kv_heads,
                           .head_dim_qk = dim_qk,
                           .head_dim_v = dim_v,
                           .dtype = row.kv};
  const size_t pool = page_bytes * pages.size();
  const DeviceBytes kv(2 * pool), counters(8);
  auto* const k = kv.as<unsigned char>();
  auto* const v = k + pool;
  const auto q_rows = static_cast<size_t>(num_tokens * row.q_heads);
  const size_t q_elements = q_rows * static_cast<size_t>(dim_qk);
  const size_t out_elements = q_rows * static_cast<size_t>(dim_v);
  const DeviceBytes q(2 * q_elements), out(2 * out_elements);
  folio_bench::fill_normal(q.as(), q_elements, 1, native);
  for (unsigned char* half : {k, v}) {
    const uint32_t seed = half == k ? 2 : 3;
    if (element == 2) {
      folio_bench::fill_normal(half, pool / 2, seed, native);
    } else {
      folio_bench::fill_fp8(half, pool, seed, native);
    }
  }

  KvSegment lengths;
  lengths.kv_len = row.device_plan ? device_kv_len.as<int32_t>() : row.kv_len.data();
  BatchView batch;
  batch.where = row.device_plan ? Where::kDevice : Where::kHost;
  batch.num_requests = num_requests;
  batch.num_tokens = num_tokens;
  batch.max_q_len = max_q_len;
  batch.max_kv_len = longest;
  batch.cu_q = row.device_plan ? device_cu_q.as<int32_t>() : cu_q.data();
  batch.segments = {&lengths, 1};
  SegmentArgs segment;
  if (row.ds_mla) {
    segment.cache = make_fp8_ds_mla_view(cache.num_pages, cache.page_size, k);
    fill_ds_mla(segment.cache, native);
  } else if (row.mla) {
    segment.cache = mla_view(cache, k);
  } else {
    segment.cache = row.hnd ? make_hnd_view(cache, k, v) : make_nhd_view(cache, k, v);
  }
  AttentionArgs args;
  args.q = ConstTensorView(q.as(), DType::kBFloat16, {num_tokens, row.q_heads, dim_qk});
  args.out = TensorView(out.as(), DType::kBFloat16, {num_tokens, row.q_heads, dim_v});
  args.segments = {&segment, 1};
  args.logits_soft_cap = row.soft_cap;
  AttentionPlan plan = folio::plan(op, batch, buffer, stream);
  std::string split;
  if (!row.device_plan) {
    const PlanSummary of = summary(plan);
    split = std::to_string(of.num_work_tiles) + " items, " + std::to_string(of.num_partial_rows) + " partial rows";
  }
  const size_t bytes = std::max(workspace_size(op), workspace_size(plan));
  const DeviceBytes workspace(bytes);
  init_workspace(op, {workspace.as(), bytes}, stream);
  check(cudaStreamSynchronize(native));

  std::vector<std::unique_ptr<Graph>> attention;
  std::vector<std::unique_ptr<Graph>> read;
  for (int32_t set = 0; set < sets; ++set) {
    const int32_t* const table = device_pages.as<int32_t>() + int64_t{set} * indptr.back();
    segment.table = {.kind = PageTableKind::kCsr,
                     .indices = table,
                     .num_indices = indptr.back(),
                     .indptr = device_indptr.as<int32_t>(),
                     .row_stride = 0,
                     .first_column = 0,
                     .num_rows = num_requests};
    attention.push_back(std::make_unique<Graph>(native, [&] {
      if (row.device_plan) plan = folio::plan(op, batch, buffer, stream);
      run(plan, args, {workspace.as(), bytes}, stream);
    }));
    read.push_back(std::make_unique<Graph>(native, [&] {
      if (page_bytes % 1024 != 0) {  // which TMA's read does not take
        folio_bench::read_pages(k, v, page_bytes, table, indptr.back(), counters.as<int32_t>() + 1, native);
        return;
      }
      folio_bench::bulk_read_pages(k, v, page_bytes, pool, table, indptr.back(), counters.as<uint32_t>(), native);
    }));
  }
  std::vector<std::unique_ptr<Graph>> plain_read;
  for (int32_t set = 0; set < sets; ++set) {
    const int32_t* const table = device_pages.as<int32_t>() + int64_t{set} * indptr.back();
    plain_read.push_back(std::make_unique<Graph>(native, [&] {
      folio_bench::read_pages(k, v, page_bytes, table, indptr.back(), counters.as<int32_t>() + 1, native);
    }));
  }
  std::vector<double> attention_times, read_times, plain_times;
  int32_t turn = 0;
  for (int round = 0; round < rounds + 2; ++round) {  // two to warm up
    for (const auto& [graphs, times] : {std::pair{&attention, &attention_times}, std::pair{&read, &read_times},
                                        std::pair{&plain_read, &plain_times}}) {
      const auto set = static_cast<size_t>(turn++ % sets);
      const auto launch = [&graph = *(*graphs)[set], native] { graph.launch(native); };
      const double time = bench::round_times(native, 0, 1, launch, [&] { folio_bench::occupy(kAhead, native); })[0];
      if (round >= 2) times->push_back(time);
    }
    if (sets % 3 == 0) ++turn;  // so that each goes through all sets
  }
  const double time = median(attention_times);
  const double read_time = median(read_times);
  const double plain_time = median(plain_times);
  const double moved =
      keys * token_elements * static_cast<double>(element) + 2.0 * static_cast<double>(q_elements + out_elements);
  const double tflops = 2.0 * keys * row.q_heads * row.q_len * (dim_qk + dim_v) / time / 1e6;
  if (row.mla) split += ", " + std::to_string(static_cast<int>(tflops)) + " TFLOP/s";
  std::printf("%-24s %-16s %8.2f us %6.0f GB/s  read %8.2f us %6.0f GB/s, by threads %8.2f us  ratio %.3f  %s\n",
              row.name.c_str(), op.kernel_name().c_str(), time, moved / time / 1e3, read_time,
              static_cast<double>(set_bytes) / read_time / 1e3, plain_time, std::min(read_time, plain_time) / time,
              split.c_str());
  std::fflush(stdout);
}

std::vector<int32_t> log_normal(int32_t requests, double median_length, double sigma) {
  std::mt19937 random(11);
  std::lognormal_distribution<double> lengths(std::log(median_length), sigma);
  std::vector<int32_t> all;
  for (int32_t i = 0; i < requests; ++i) all.push_back(std::clamp(static_cast<int32_t>(lengths(random)), 16, 65536));
  return all;
}

std::vector<Row> rows() {
  const std::vector<int32_t> many(64, 4096);
  const std::vector<int32_t> few(8, 32768);
  std::vector<int32_t> skewed(64, 1024);
  skewed[20] = 131072;
  const int32_t skewed_total = 131072 + 63 * 1024;
  const std::vector<int32_t> mixed = log_normal(256, 2048, 1.0);
  int64_t mixed_total = 0;
  for (const int32_t length : mixed) mixed_total += length;
  std::vector<Row> all{
      {.name = "64x4096", .kv_len = many},
      {.name = "8x32768", .kv_len = few},
      {.name = "1x131072", .kv_len = {131072}},
      {.name = "skewed", .kv_len = skewed},
      {.name = "skewed, balanced", .kv_len = std::vector<int32_t>(64, skewed_total / 64)},
      {.name = "log-normal", .kv_len = mixed},
      {.name = "log-normal, balanced", .kv_len = std::vector<int32_t>(256, static_cast<int32_t>(mixed_total / 256))}};
  for (const int32_t page : {1, 8, 32, 64}) {
    all.push_back({.name = "64x4096 page " + std::to_string(page), .kv_len = many, .page_size = page});
  }
  all.push_back({.name = "64x4096 HND", .kv_len = many, .hnd = true});
  all.push_back({.name = "64x4096 page 1 HND", .kv_len = many, .page_size = 1, .hnd = true});
  for (const int32_t group : {1, 2, 5, 7, 8, 16}) {
    all.push_back({.name = "64x4096 group " + std::to_string(group), .kv_len = many, .q_heads = 8 * group});
  }
  for (const int32_t dim : {64, 96, 256}) {
    all.push_back({.name = "64x4096 dim " + std::to_string(dim), .kv_len = many, .head_dim = dim});
  }
  all.push_back({.name = "64x4096 fp8", .kv_len = many, .kv = DType::kFloat8E4M3});
  all.push_back({.name = "64x4096 fp8 HND", .kv_len = many, .kv = DType::kFloat8E4M3, .hnd = true});
  all.push_back({.name = "256x1024 fp8", .kv_len = std::vector<int32_t>(256, 1024), .kv = DType::kFloat8E4M3});
  all.push_back({.name = "8x32768 fp8", .kv_len = few, .kv = DType::kFloat8E4M3});
  all.push_back({.name = "1x131072 fp8", .kv_len = {131072}, .kv = DType::kFloat8E4M3});
  for (const int32_t tokens : {2, 4, 8}) {
    all.push_back({.name = "64x4096 verify " + std::to_string(tokens), .kv_len = many, .q_len = tokens});
  }
  all.push_back({.name = "64x4096 group 8 verify 4", .kv_len = many, .q_heads = 64, .q_len = 4});
  all.push_back({.name = "64x4096 group 2 verify 8", .kv_len = many, .q_heads = 16, .q_len = 8});
  for (const int32_t dim : {64, 256}) {
    all.push_back(
        {.name = "64x4096 dim " + std::to_string(dim) + " verify 4", .kv_len = many, .head_dim = dim, .q_len = 4});
  }
  all.push_back({.name = "64x4096 fp8 verify 4", .kv_len = many, .q_len = 4, .kv = DType::kFloat8E4M3});
  all.push_back({.name = "1x4096 verify 4", .kv_len = {4096}, .q_len = 4});
  all.push_back({.name = "8x1024 verify 4", .kv_len = std::vector<int32_t>(8, 1024), .q_len = 4});
  for (const bool device : {false, true}) {
    const std::string suffix = device ? " and plan" : "";
    all.push_back({.name = "short 1x1024" + suffix, .kv_len = {1024}, .device_plan = device});
    all.push_back({.name = "short 1x4096" + suffix, .kv_len = {4096}, .device_plan = device});
    all.push_back({.name = "short 8x1024" + suffix, .kv_len = std::vector<int32_t>(8, 1024), .device_plan = device});
    all.push_back({.name = "short 8x8192" + suffix, .kv_len = std::vector<int32_t>(8, 8192), .device_plan = device});
  }
  all.push_back({.name = "64x4096 and plan", .kv_len = many, .device_plan = true});
  for (const auto& [name, prompts, prompt_kv, decodes] :
       {std::tuple{"mixed 4x1024, 60x4096", std::vector<int32_t>(4, 1024), 1024, std::vector<int32_t>(60, 4096)},
        {"mixed 1x512, 64x4096", {512}, 512, many},
        {"mixed 1x2048, 128x4096", {2048}, 2048, std::vector<int32_t>(128, 4096)},
        {"mixed 1x512 behind 8192, 64x1024", {512}, 8704, std::vector<int32_t>(64, 1024)},
        {"mixed 1x8192, 32x2048", {8192}, 8192, std::vector<int32_t>(32, 2048)}}) {
    std::vector<int32_t> lengths(prompts.size(), prompt_kv);
    lengths.insert(lengths.end(), decodes.begin(), decodes.end());
    all.push_back({.name = name, .kv_len = lengths, .prompts = prompts});
    all.push_back(
        {.name = std::string(name) + " and plan", .kv_len = lengths, .prompts = prompts, .device_plan = true});
  }
  for (const int32_t heads : {16, 64, 128}) {
    for (const int32_t page : {16, 64}) {
      for (const auto& [requests, length] : {std::pair{64, 4096},
                                             {8, 32768},
                                             {128, 8192},
                                             {16, 4096},
                                             {4, 4096},
                                             {1, 4096},
                                             {1, 1024},
                                             {1, 32768},
                                             {16, 1024},
                                             {64, 1024}}) {
        const std::string batch = std::to_string(requests) + "x" + std::to_string(length);
        all.push_back({.name = "mla " + batch + " heads " + std::to_string(heads) + " page " + std::to_string(page),
                       .kv_len = std::vector<int32_t>(static_cast<size_t>(requests), length),
                       .q_heads = heads,
                       .kv_heads = 1,
                       .mla = true,
                       .page_size = page});
      }
    }
  }
  for (const int32_t q_len : {2, 4}) {
    all.push_back({.name = "mla 64x4096 heads 16 verify " + std::to_string(q_len),
                   .kv_len = many,
                   .q_heads = 16,
                   .kv_heads = 1,
                   .mla = true,
                   .page_size = 64,
                   .q_len = q_len});
  }
  for (const int32_t heads : {16, 128}) {
    Row row{.name = "mla 64x4096 heads " + std::to_string(heads) + " page 1", .kv_len = many, .q_heads = heads};
    row.kv_heads = 1;
    row.mla = true;
    row.page_size = 1;
    all.push_back(row);
    row.name = "mla 64x4096 heads " + std::to_string(heads) + " soft cap";
    row.page_size = 64;
    row.soft_cap = 30.0f;
    all.push_back(row);
  }
  for (const int32_t heads : {16, 128}) {
    for (const auto& [requests, length, page] :
         {std::tuple{64, 4096, 64}, {128, 8192, 64}, {16, 4096, 64}, {1, 4096, 64}, {64, 4096, 16}, {64, 4096, 1}}) {
      Row row{.name = "mla fp8 " + std::to_string(requests) + "x" + std::to_string(length) + " heads " +
                      std::to_string(heads) + " page " + std::to_string(page),
              .kv_len = std::vector<int32_t>(static_cast<size_t>(requests), length),
              .q_heads = heads,
              .kv_heads = 1,
              .mla = true,
              .page_size = page,
              .kv = DType::kFloat8E4M3};
      all.push_back(row);
      row.name.replace(row.name.find("fp8"), 3, "fp8_ds_mla");
      row.ds_mla = true;
      all.push_back(row);
    }
  }
  for (const int32_t heads : {64, 128}) {
    all.push_back({.name = "512 k=v 64x4096 heads " + std::to_string(heads),
                   .kv_len = many,
                   .q_heads = heads,
                   .kv_heads = 1,
                   .mla = true,
                   .mla_dim = 512,
                   .page_size = 64});
  }
  all.push_back({.name = "512 64x4096 heads 32/4", .kv_len = many, .kv_heads = 4, .head_dim = 512});
  all.push_back({.name = "mla log-normal heads 128",
                 .kv_len = mixed,
                 .q_heads = 128,
                 .kv_heads = 1,
                 .mla = true,
                 .page_size = 64});
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string kernel = argc > 1 ? argv[1] : "";
    const std::string wanted = argc > 2 ? argv[2] : "";
    const int rounds = argc > 3 ? std::stoi(argv[3]) : 25;
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (const Row& row : rows()) {
      const bool exactly = wanted.starts_with('=');
      if (exactly ? row.name != wanted.substr(1) : row.name.find(wanted) == std::string::npos) continue;
      try {
        measure(row, kernel, stream, rounds);
      } catch (const Error& error) {
        std::printf("%-24s %s\n", row.name.c_str(), error.what());
      }
    }
    check(cudaStreamDestroy(stream));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
