// MLA with values inside keys: cuda-sm90-mla against cuda-sm80, the same batches.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>

#include "device_array.hpp"
#include "folio/types/ds_mla.hpp"
#include "folio/types/float_convert.hpp"
#include "folio/verify.hpp"

namespace folio::cuda_test {
namespace {

constexpr int32_t kDimQk = 576;
constexpr int32_t kDimV = 512;
constexpr int32_t kMaxKvLen = 900;
constexpr int32_t kMaxQLen = 5;
/// See twin_batches_test.cc.
constexpr float kAllowed = 0x1p-7f;
constexpr float kAllowedLse = 0x1p-14f;
/// Where the portable kernel's keys were rounded to bfloat16.
constexpr float kAllowedLseOfDsMla = 0x1p-9f;

struct Shape {
  int32_t heads;
  int32_t page_size;
  DType kv = DType::kBFloat16;
  bool ds_mla = false;  ///< of cuda-sm90-mla; the portable kernel gets the same values in bfloat16
};

struct Lengths {
  std::vector<int32_t> cu_q{0};
  std::vector<int32_t> kv_len;
  std::vector<int32_t> indptr{0};  ///< of the page table
};

Lengths random_lengths(int32_t page_size, int32_t max_q_len, std::mt19937& random) {
  const auto between = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  Lengths lengths;
  const int32_t requests = between(1, 5);
  for (int32_t r = 0; r < requests; ++r) {
    const int32_t q_len = between(0, 2) == 0 ? between(0, max_q_len) : 1;
    lengths.cu_q.push_back(lengths.cu_q.back() + q_len);
    lengths.kv_len.push_back(std::max(q_len, between(0, between(0, 1) == 0 ? kMaxKvLen : 130)));
    lengths.indptr.push_back(lengths.indptr.back() + (lengths.kv_len.back() + page_size - 1) / page_size);
  }
  return lengths;
}

std::vector<uint16_t> random_bfloat16(size_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> value(-1.0f, 1.0f);
  std::vector<uint16_t> values(count);
  for (uint16_t& bits : values) bits = float_to_bfloat16(value(random));
  return values;
}

/// The bytes of keys of a dtype.
std::vector<uint8_t> random_keys(size_t count, DType dtype, std::mt19937& random) {
  std::vector<uint8_t> bytes(count * static_cast<size_t>(size_of(dtype)));
  const std::vector<uint16_t> wide = random_bfloat16(count, random);
  if (dtype == DType::kBFloat16) {
    std::memcpy(bytes.data(), wide.data(), bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < count; ++i) {
    const float value = bfloat16_to_float(wide[i]);
    bytes[i] = dtype == DType::kFloat8E4M3 ? float_to_fp8_e4m3(value) : float_to_fp8_e5m2(value);
  }
  return bytes;
}

/// Keys written as rows of fp8_ds_mla, and read from them in bfloat16.
struct DsMlaKeys {
  DsMlaKeys(int64_t pages, int32_t page_size, std::mt19937& random)
      : rows(static_cast<size_t>(pages * page_size * kDsMlaRowBytes) + kDsMlaAlignment),
        values(static_cast<size_t>(pages * page_size * kDimQk)) {
    void* first = rows.data();
    size_t space = rows.size();
    std::align(kDsMlaAlignment, space - kDsMlaAlignment, first, space);
    begin = static_cast<uint8_t*>(first);
    const int64_t tokens = pages * page_size;
    const std::vector<uint16_t> given = random_bfloat16(values.size(), random);
    const KvCacheView cache = make_fp8_ds_mla_view(pages, page_size, begin);
    std::vector<int64_t> slots(static_cast<size_t>(tokens));
    std::iota(slots.begin(), slots.end(), 0);
    CacheWriteArgs args;
    args.k = ConstTensorView(given.data(), DType::kBFloat16, {tokens, 1, kDimQk});
    args.v = ConstTensorView(nullptr, DType::kBFloat16, {tokens, 1, kDimV});
    args.slot_mapping = slots.data();
    args.num_slots = tokens;
    args.cache = cache;
    write_kv_cache(Context::cpu(), args);
    std::vector<int32_t> ids(static_cast<size_t>(pages));
    std::iota(ids.begin(), ids.end(), 0);
    const std::vector<int32_t> indptr{0, static_cast<int32_t>(pages)}, kv_len{static_cast<int32_t>(tokens)};
    std::vector<uint16_t> v(static_cast<size_t>(tokens * kDimV));
    gather_kv(Context::cpu(), cache, csr_table(ids, indptr), kv_len,
              TensorView(values.data(), DType::kBFloat16, {tokens, 1, kDimQk}),
              TensorView(v.data(), DType::kBFloat16, {tokens, 1, kDimV}));
  }
  std::vector<uint8_t> row_bytes() const { return {begin, begin + values.size() / kDimQk * kDsMlaRowBytes}; }
  std::vector<uint8_t> value_bytes() const {
    std::vector<uint8_t> bytes(values.size() * sizeof(uint16_t));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }

  std::vector<uint8_t> rows;
  std::vector<uint16_t> values;
  uint8_t* begin;
};

struct Output {
  std::vector<uint16_t> out;
  std::vector<float> lse;
};

/// What a batch needs on the GPU.
struct Batch {
  Batch(const Shape& of, int32_t most, std::mt19937& random)
      : shape(of),
        max_q_len(most),
        lengths(random_lengths(of.page_size, most, random)),
        tokens(lengths.cu_q.back()),
        pages(lengths.indptr.back() + 1),
        q(random_bfloat16(std::max<size_t>(1, rows() * kDimQk), random)),
        ds_mla(of.ds_mla ? pages : 1, of.page_size, random),
        rows_of_ds_mla(ds_mla.row_bytes()),
        kv(of.ds_mla
               ? ds_mla.value_bytes()
               : random_keys(static_cast<size_t>(pages) * static_cast<size_t>(of.page_size) * kDimQk, of.kv, random)),
        cu_q(lengths.cu_q),
        kv_len(lengths.kv_len),
        indptr(lengths.indptr),
        ids([&] {
          std::vector<int32_t> all(static_cast<size_t>(pages));
          std::iota(all.begin(), all.end(), 0);
          std::shuffle(all.begin(), all.end(), random);
          return all;
        }()) {}
  size_t rows() const { return static_cast<size_t>(tokens) * static_cast<size_t>(shape.heads); }

  Shape shape;
  int32_t max_q_len;
  Lengths lengths;
  int32_t tokens;
  int32_t pages;
  DeviceArray<uint16_t> q;
  DsMlaKeys ds_mla;
  DeviceArray<uint8_t> rows_of_ds_mla;
  DeviceArray<uint8_t> kv;
  DeviceArray<int32_t> cu_q, kv_len, indptr, ids;
};

Output run_with(const Batch& batch, const char* kernel, bool on_device, const TestStream& stream) {
  AttentionConfig config;
  config.num_q_heads = batch.shape.heads;
  config.num_kv_heads = 1;
  config.head_dim_qk = kDimQk;
  config.head_dim_v = kDimV;
  config.page_size = batch.shape.page_size;
  config.kv = batch.shape.kv;
  const bool ds_mla = batch.shape.ds_mla && std::string(kernel) == "cuda-sm90-mla";
  if (ds_mla) {
    config.kv_format = KvFormat::kFp8DsMla;
    config.kv = DType::kFloat8E4M3;
  }
  const auto requests = static_cast<int32_t>(batch.lengths.kv_len.size());
  PrepareOptions options;
  options.force_kernel = kernel;
  if (on_device) {
    options.bounds = GraphBounds{.max_requests = requests,
                                 .max_tokens = std::max(1, batch.tokens),
                                 .max_q_len = batch.max_q_len,
                                 .max_kv_len = kMaxKvLen,
                                 .max_shared_levels = 0};
  }
  const AttentionOp op = prepare(Context::cuda(0), config, options);
  KvSegment segment;
  segment.kv_len = on_device ? batch.kv_len.data() : batch.lengths.kv_len.data();
  BatchView view;
  view.where = on_device ? Where::kDevice : Where::kHost;
  view.num_requests = requests;
  view.num_tokens = batch.tokens;
  view.max_q_len = batch.max_q_len;
  view.max_kv_len = kMaxKvLen;
  view.cu_q = on_device ? batch.cu_q.data() : batch.lengths.cu_q.data();
  view.segments = {&segment, 1};
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan plan = folio::plan(op, view, buffer, stream.get());

  SegmentArgs cache;
  cache.cache.dtype = batch.shape.kv;
  cache.cache.k = cache.cache.v = batch.kv.data();
  cache.cache.num_pages = batch.pages;
  cache.cache.page_size = batch.shape.page_size;
  cache.cache.num_kv_heads = 1;
  cache.cache.head_dim_qk = kDimQk;
  cache.cache.head_dim_v = kDimV;
  cache.cache.k_strides = {int64_t{batch.shape.page_size} * kDimQk, kDimQk, kDimQk};
  cache.cache.v_strides = cache.cache.k_strides;
  if (ds_mla) cache.cache = make_fp8_ds_mla_view(batch.pages, batch.shape.page_size, batch.rows_of_ds_mla.data());
  cache.table.indices = batch.ids.data();
  cache.table.num_indices = batch.pages;
  cache.table.indptr = batch.indptr.data();
  cache.table.num_rows = requests;
  DeviceArray<uint16_t> out(std::max<size_t>(1, batch.rows() * kDimV));
  DeviceArray<float> lse(std::max<size_t>(1, batch.rows()));
  out.fill(0xff);
  lse.fill(0xff);
  AttentionArgs args;
  args.q = ConstTensorView(batch.q.data(), DType::kBFloat16, {batch.tokens, batch.shape.heads, kDimQk});
  args.out = TensorView(out.data(), DType::kBFloat16, {batch.tokens, batch.shape.heads, kDimV});
  args.lse = {.data = lse.data(), .token_stride = batch.shape.heads, .head_stride = 1};
  args.segments = {&cache, 1};
  const size_t bytes = on_device ? workspace_size(op) : workspace_size(plan);
  DeviceArray<std::byte> workspace(std::max(bytes, workspace_size(op)));
  workspace.fill(0xff);
  init_workspace(op, {workspace.data(), workspace.bytes()});
  run(plan, args, {workspace.data(), workspace.bytes()}, stream.get());
  stream.wait();
  return {out.get(), lse.get()};
}

class MlaTwin : public CudaTest, public testing::WithParamInterface<Shape> {};

TEST_P(MlaTwin, AgreesWithThePortableKernel) {
  const std::vector<std::string> kernels = verify::runnable_kernels(Context::cuda(0));
  if (std::count(kernels.begin(), kernels.end(), "cuda-sm90-mla") == 0) {
    GTEST_SKIP() << "cuda-sm90-mla does not run on this GPU";
  }
  std::mt19937 random(37);
  const TestStream stream;
  for (int i = 0; i < 12; ++i) {
    const Batch batch(GetParam(), i % 4 < 2 ? kMaxQLen : 1, random);  // of decodes alone, work tiles may be low
    const Output expected = run_with(batch, "cuda-sm80", false, stream);
    const Output got = run_with(batch, "cuda-sm90-mla", i % 2 == 1, stream);
    for (size_t j = 0; j < got.out.size(); ++j) {
      if (got.out[j] == expected.out[j]) continue;
      ASSERT_LE(std::fabs(bfloat16_to_float(got.out[j]) - bfloat16_to_float(expected.out[j])), kAllowed)
          << "batch " << i << " at " << j;
    }
    for (size_t j = 0; j < got.lse.size(); ++j) {
      if (got.lse[j] == expected.lse[j] || (std::isnan(got.lse[j]) && std::isnan(expected.lse[j]))) continue;
      const float allowed = GetParam().ds_mla ? kAllowedLseOfDsMla : kAllowedLse;
      ASSERT_LE(std::fabs(got.lse[j] - expected.lse[j]), allowed * std::max(1.0f, std::fabs(expected.lse[j])))
          << "batch " << i << " at " << j;
    }
  }
}

/// Less than a tile of rows, and several; KV loaded by TMA and copied by threads.
INSTANTIATE_TEST_SUITE_P(Shapes, MlaTwin,
                         testing::Values(Shape{16, 64}, Shape{128, 16}, Shape{3, 8}, Shape{80, 1},
                                         Shape{16, 64, DType::kFloat8E4M3}, Shape{128, 8, DType::kFloat8E4M3},
                                         Shape{3, 16, DType::kFloat8E5M2}, Shape{16, 1, DType::kFloat8E4M3},
                                         Shape{16, 64, DType::kBFloat16, true}, Shape{128, 64, DType::kBFloat16, true},
                                         Shape{7, 8, DType::kBFloat16, true}, Shape{16, 1, DType::kBFloat16, true}),
                         [](const auto& shape) {
                           return std::to_string(shape.param.heads) + "HeadsPage" +
                                  std::to_string(shape.param.page_size) + (shape.param.ds_mla ? "DsMla" : "") +
                                  (shape.param.kv == DType::kBFloat16
                                       ? ""
                                       : (shape.param.kv == DType::kFloat8E4M3 ? "E4m3" : "E5m2"));
                         });

}  // namespace
}  // namespace folio::cuda_test
