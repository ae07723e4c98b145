#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>

#include "cuda_timing.hpp"
#include "folio/folio.hpp"
#include "page_read.hpp"

/// Prefill of one layer on a GPU as TFLOP/s: head dimensions, masks, pages, features and lengths beyond those of
/// folio_cuda_attention_bench, and FP8 MMA. bfloat16 unless said, 32 query heads over 8, shuffled
/// pages, calls of a CUDA graph one after the other behind a rest of 50 ms; medians. Work is counted as two GEMMs of
/// what rows see. Needs a GPU.
///   folio_cuda_prefill_bench "KERNEL[,KERNEL...]" [LABEL]: of all cases, those whose label contains LABEL
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header
using bench::check;
using bench::DeviceBytes;

constexpr int32_t kQHeads = 32;
constexpr int32_t kKvHeads = 8;

struct Case {
  std::string label;
  std::vector<int32_t> q_len;
  std::vector<int32_t> kv_len;
  int32_t dim_qk = 128;
  int32_t dim_v = 128;
  MaskKind mask = MaskKind::kCausal;
  int32_t window = -1;
  int32_t chunk = 0;
  int32_t page_size = 16;
  bool random_mask = false;  ///< kCustom: random bits, half of them set; otherwise those of a causal mask
  Features features = {};    ///< kSpans: an image of 256 tokens in each 1024; kKvStart: at 0; kRequestCausal: all are
  bool fp8_q = false;        ///< queries are e4m3, not bfloat16
  bool fp8_kv = false;       ///< so are keys and values
  bool fp8_mma = false;      ///< allowed
};

std::vector<int32_t> times(int32_t count, int32_t length) {
  return std::vector<int32_t>(static_cast<size_t>(count), length);
}

/// 64 lengths, log-normal around 1024, of 65536 tokens together.
std::vector<int32_t> spread() {
  std::mt19937 random(5);
  std::lognormal_distribution<double> draw(std::log(1024.0), 0.7);
  std::vector<double> drawn(64);
  for (double& x : drawn) x = draw(random);
  const double sum = std::accumulate(drawn.begin(), drawn.end(), 0.0);
  std::vector<int32_t> lengths;
  for (const double x : drawn) lengths.push_back(std::max(1, static_cast<int32_t>(65536.0 * x / sum)));
  return lengths;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, const std::vector<int32_t>& q_len, const std::vector<int32_t>& kv_len,
                       const auto& change) {
    Case one{.label = name, .q_len = q_len, .kv_len = kv_len};
    change(one);
    cases.push_back(one);
  };
  constexpr int32_t kDims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}, {512, 512}};
  for (const auto& dims : kDims) {
    const std::string name = "dims " + std::to_string(dims[0]) + "/" + std::to_string(dims[1]);
    for (const bool causal : {true, false}) {
      const auto change = [&](Case& one) {
        one.dim_qk = dims[0];
        one.dim_v = dims[1];
        one.mask = causal ? MaskKind::kCausal : MaskKind::kNone;
      };
      add(name + (causal ? " causal" : " full") + " 8x4096", times(8, 4096), times(8, 4096), change);
      if (causal) {
        add(name + " append 8x512", times(8, 512), times(8, 8704), change);
        add(name + " causal 1x16384", {16384}, {16384}, change);
        add(name + " decode 64x4096", times(64, 1), times(64, 4096), change);
      }
    }
  }
  const auto same = [](Case&) {};
  add("lengths spread", spread(), spread(), same);
  add("lengths uniform", times(64, 1024), times(64, 1024), same);
  add("short 32x256", times(32, 256), times(32, 256), same);
  add("short 64x128", times(64, 128), times(64, 128), same);
  add("short 1x512", times(1, 512), times(1, 512), same);
  add("short 1x2048", times(1, 2048), times(1, 2048), same);
  const auto features = [&](const std::string& name, const auto& change) {
    add(name + " 1x32768", {32768}, {32768}, change);
    add(name + " 8x4096", times(8, 4096), times(8, 4096), change);
  };
  features("with nothing", same);
  features("with cap", [](Case& one) { one.features = Feature::kSoftCap; });
  features("with sinks", [](Case& one) { one.features = Feature::kSinks; });
  features("with alibi", [](Case& one) { one.features = Feature::kAlibi; });
  add("with both sides 8x4096", times(8, 4096), times(8, 4096), [](Case& one) { one.mask = MaskKind::kNone; });
  add("with both sides, alibi 8x4096", times(8, 4096), times(8, 4096), [](Case& one) {
    one.mask = MaskKind::kNone;
    one.features = Feature::kAlibi;
  });
  features("with window 1024", [](Case& one) { one.window = 1023; });
  // The window's work as that of a plain kernel: every row sees about as many keys.
  add("with window, as if full", times(32, 1024), times(32, 1024), [](Case& one) { one.mask = MaskKind::kNone; });
  // Masks as rules, beside "with nothing".
  features("with images", [](Case& one) { one.features = Feature::kSpans; });
  features("with images, window 1024", [](Case& one) {
    one.features = Feature::kSpans;
    one.window = 1023;
  });
  features("with padding", [](Case& one) { one.features = Feature::kKvStart; });
  features("with causal flags", [](Case& one) { one.features = Feature::kRequestCausal; });
  features("with chunks of 2048", [](Case& one) { one.chunk = 2048; });
  // The chunks' work as that of plain causal.
  add("with chunks, as if causal", times(16, 2048), times(16, 2048), same);
  add("with mask 8x4096", times(8, 4096), times(8, 4096), [](Case& one) { one.mask = MaskKind::kCustom; });
  add("with random mask 8x4096", times(8, 4096), times(8, 4096), [](Case& one) {
    one.mask = MaskKind::kCustom;
    one.random_mask = true;
  });
  for (const int32_t page : {1, 4, 12, 20, 8, 64}) {
    add("page " + std::to_string(page) + " 8x4096", times(8, 4096), times(8, 4096),
        [&](Case& one) { one.page_size = page; });
  }
  for (const auto& [fp8_q, fp8_kv, fp8_mma, name] :
       {std::tuple{false, false, false, "bfloat16"}, std::tuple{false, true, false, "e4m3 KV"},
        std::tuple{true, true, false, "e4m3"}, std::tuple{true, true, true, "e4m3 MMA"}}) {
    const auto change = [&](Case& one) {
      one.fp8_q = fp8_q;
      one.fp8_kv = fp8_kv;
      one.fp8_mma = fp8_mma;
    };
    const std::string label = std::string("fp8, ") + name;
    add(label + " 1x16384", {16384}, {16384}, change);
    add(label + " 8x4096", times(8, 4096), times(8, 4096), change);
    add(label + " append 8x512", times(8, 512), times(8, 8704), change);
    add(label + " window 1024 1x32768", {32768}, {32768}, [&](Case& one) {
      change(one);
      one.window = 1023;
    });
    add(label + " full 8x4096", times(8, 4096), times(8, 4096), [&](Case& one) {
      change(one);
      one.mask = MaskKind::kNone;
    });
  }
  return cases;
}

constexpr int32_t kImagePeriod = 1024;
constexpr int32_t kImageBegin = 256;
constexpr int32_t kImageEnd = 512;

/// The image around a position: its begin and end; empty outside of images.
std::array<int32_t, 2> image_at(int32_t position) {
  const int32_t first = position / kImagePeriod * kImagePeriod;
  const int32_t place = position - first;
  if (place < kImageBegin || place >= kImageEnd) return {0, 0};
  return {first + kImageBegin, first + kImageEnd};
}

double visible(const Case& one) {
  double sum = 0.0;
  for (size_t r = 0; r < one.q_len.size(); ++r) {
    for (int32_t i = 0; i < one.q_len[r]; ++i) {
      const int32_t position = one.kv_len[r] - one.q_len[r] + i;
      const int32_t end = one.mask == MaskKind::kNone ? one.kv_len[r] : position + 1;
      int32_t begin = one.window < 0 ? 0 : std::max(0, end - 1 - one.window);
      if (one.chunk > 0) begin = std::max(begin, position / one.chunk * one.chunk);
      const int32_t image_end = one.features.has(Feature::kSpans) ? image_at(position)[1] : 0;
      sum += std::min(std::max(end, image_end), one.kv_len[r]) - begin;
    }
  }
  return sum;
}

/// What one case needs on the GPU.
class Layer {
 public:
  Layer(const Case& one, cudaStream_t stream) : one_(one), num_tokens_(sum(one.q_len)) {
    cu_q_.push_back(0);
    indptr_.push_back(0);
    for (size_t r = 0; r < one.q_len.size(); ++r) {
      cu_q_.push_back(cu_q_.back() + one.q_len[r]);
      indptr_.push_back(indptr_.back() + (one.kv_len[r] + one.page_size - 1) / one.page_size);
    }
    std::vector<int32_t> pages(static_cast<size_t>(indptr_.back()));
    std::iota(pages.begin(), pages.end(), 0);
    std::mt19937 random(7);
    std::shuffle(pages.begin(), pages.end(), random);
    shape_ = {.num_pages = indptr_.back(),
              .page_size = one.page_size,
              .num_kv_heads = kKvHeads,
              .head_dim_qk = one.dim_qk,
              .head_dim_v = one.dim_v,
              .dtype = dtype(one.fp8_kv)};
    q_elements_ = static_cast<size_t>(num_tokens_) * kQHeads * static_cast<size_t>(one.dim_qk);
    indices_ = std::make_unique<DeviceBytes>(pages);
    table_ = std::make_unique<DeviceBytes>(indptr_);
    k_ = values(static_cast<size_t>(k_elements(shape_)), one.fp8_kv, 2, stream);
    v_ = values(static_cast<size_t>(v_elements(shape_)), one.fp8_kv, 3, stream);
    q_ = values(q_elements_, one.fp8_q, 1, stream);
    out_ = std::make_unique<DeviceBytes>(2 * q_elements_);
    starts_.assign(one.q_len.size(), 0);
    flags_.assign(one.q_len.size(), 1);
    for (size_t r = 0; r < one.q_len.size(); ++r) {
      for (int32_t i = 0; i < one.q_len[r]; ++i) {
        for (const int32_t bound : image_at(one.kv_len[r] - one.q_len[r] + i)) spans_.push_back(bound);
      }
    }
    std::vector<float> slopes;
    for (int32_t head = 0; head < kQHeads; ++head)
      slopes.push_back(std::exp2(-8.0f * static_cast<float>(head + 1) / kQHeads));
    slopes_ = std::make_unique<DeviceBytes>(slopes);
    if (one.mask == MaskKind::kCustom) {
      std::vector<uint8_t> bits;
      for (size_t r = 0; r < one.q_len.size(); ++r) {
        const auto columns = static_cast<size_t>(one.kv_len[r]);
        const auto before = static_cast<size_t>(one.kv_len[r] - one.q_len[r]);
        const size_t first = bits.size();
        if (one.random_mask) {
          bits.resize(first + static_cast<size_t>(one.q_len[r]) * columns / 8);
          std::generate(bits.begin() + static_cast<ptrdiff_t>(first), bits.end(),
                        [&] { return static_cast<uint8_t>(random()); });
          continue;
        }
        bits.resize(first + (static_cast<size_t>(one.q_len[r]) * columns + 7) / 8);
        for (size_t i = 0; i < static_cast<size_t>(one.q_len[r]); ++i) {
          for (size_t j = 0; j <= before + i; ++j) {
            const size_t bit = i * columns + j;
            bits[first + bit / 8] = static_cast<uint8_t>(bits[first + bit / 8] | 1u << bit % 8);
          }
        }
      }
      mask_ = std::make_unique<DeviceBytes>(bits);
    }
    check(cudaStreamSynchronize(stream));
  }

  /// Median microseconds.
  double time(const std::string& kernel, cudaStream_t native, std::string& name) const {
    AttentionConfig config;
    config.num_q_heads = kQHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim_qk = one_.dim_qk;
    config.head_dim_v = one_.dim_v;
    config.page_size = one_.page_size;
    config.mask = one_.mask;
    config.window_left = one_.window;
    config.attention_chunk = one_.chunk;
    config.features = one_.features;
    config.q = dtype(one_.fp8_q);
    config.kv = dtype(one_.fp8_kv);
    PrepareOptions options;
    options.allow_fp8_mma = one_.fp8_mma;
    options.force_kernel = kernel;
    const AttentionOp op = prepare(Context::cuda(0), config, options);
    name = op.kernel_name();
    PlanBuffer buffer = make_plan_buffer(op);
    const Stream stream{native};
    KvSegment lengths;
    lengths.kv_len = one_.kv_len.data();
    BatchView batch;
    batch.num_requests = static_cast<int32_t>(one_.q_len.size());
    batch.num_tokens = num_tokens_;
    batch.cu_q = cu_q_.data();
    batch.segments = {&lengths, 1};
    if (one_.features.has(Feature::kKvStart)) batch.kv_start = starts_.data();
    if (one_.features.has(Feature::kRequestCausal)) batch.causal = flags_.data();
    if (one_.features.has(Feature::kSpans)) batch.spans = spans_.data();
    SegmentArgs segment;
    segment.cache = make_nhd_view(shape_, k_->as(), v_->as());
    segment.table = {.kind = PageTableKind::kCsr,
                     .indices = indices_->as<int32_t>(),
                     .num_indices = indptr_.back(),
                     .indptr = table_->as<int32_t>(),
                     .row_stride = 0,
                     .first_column = 0,
                     .num_rows = batch.num_requests};
    AttentionArgs args;
    args.q = ConstTensorView(q_->as(), dtype(one_.fp8_q), {num_tokens_, kQHeads, one_.dim_qk});
    args.out = TensorView(out_->as(), DType::kBFloat16, {num_tokens_, kQHeads, one_.dim_v});
    args.segments = {&segment, 1};
    if (one_.features.has(Feature::kSoftCap)) args.logits_soft_cap = 30.0f;
    if (one_.features.has(Feature::kAlibi)) args.alibi_slopes = slopes_->as<float>();
    if (one_.features.has(Feature::kSinks)) args.sinks = slopes_->as<float>();
    if (mask_ != nullptr) {
      args.custom_mask = mask_->as<uint8_t>();
      args.custom_mask_bytes = static_cast<int64_t>(mask_->size());
    }
    const AttentionPlan plan = folio::plan(op, batch, buffer, stream);
    const size_t bytes = std::max(workspace_size(op), workspace_size(plan));
    const DeviceBytes workspace(bytes);
    init_workspace(op, {workspace.as(), bytes}, stream);
    const auto call = [&] { run(plan, args, {workspace.as(), bytes}, stream); };
    call();  // what happens once, happens outside of the graph
    check(cudaStreamSynchronize(native));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return bench::graph_time(native, 1, 11, call);
  }

 private:
  static int32_t sum(const std::vector<int32_t>& lengths) { return std::accumulate(lengths.begin(), lengths.end(), 0); }
  static DType dtype(bool fp8) { return fp8 ? DType::kFloat8E4M3 : DType::kBFloat16; }
  static std::unique_ptr<DeviceBytes> values(size_t count, bool fp8, uint32_t seed, cudaStream_t stream) {
    auto bytes = std::make_unique<DeviceBytes>((fp8 ? 1 : 2) * count);
    if (fp8) {
      folio_bench::fill_fp8(bytes->as(), count, seed, stream);
    } else {
      folio_bench::fill_normal(bytes->as(), count, seed, stream);
    }
    return bytes;
  }

  const Case& one_;
  int32_t num_tokens_;
  std::vector<int32_t> cu_q_, indptr_, starts_, spans_;
  std::vector<uint8_t> flags_;
  KvCacheShape shape_;
  size_t q_elements_ = 0;
  std::unique_ptr<DeviceBytes> indices_, table_, k_, v_, q_, out_, slopes_, mask_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    std::vector<std::string> kernels(1);
    for (const char* at = argc > 1 ? argv[1] : ""; *at != '\0'; ++at) {
      if (*at == ',') {
        kernels.emplace_back();
      } else {
        kernels.back() += *at;
      }
    }
    const std::string wanted = argc > 2 ? argv[2] : "";
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (const Case& one : all_cases()) {
      if (one.label.find(wanted) == std::string::npos) continue;
      const Layer layer(one, stream);
      const double work = 2.0 * (one.dim_qk + one.dim_v) * kQHeads * visible(one);
      std::printf("%-32s", one.label.c_str());
      for (const std::string& kernel : kernels) {
        std::string name;
        try {
          const double us = layer.time(kernel, stream, name);
          std::printf("  %-17s %9.1f us %6.1f TFLOP/s", name.c_str(), us, work / us / 1e6);
        } catch (const Error& error) {
          std::printf("  %-17s refused: %.60s", kernel.c_str(), error.what());
        }
      }
      std::printf("\n");
      std::fflush(stdout);
    }
    check(cudaStreamDestroy(stream));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
