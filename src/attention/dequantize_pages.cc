#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "attention/cache_args.hpp"
#include "attention/op_state.hpp"
#include "attention/split_work.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"
#include "folio/types/float_convert.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0 {
namespace {

using core::require;

/// Every fp8 value under a scale, as the 16-bit cache stores it.
using Table = std::array<uint16_t, 256>;

Table scaled_values(DType from, DType to, float scale) {
  Table table{};
  for (size_t fp8 = 0; fp8 < table.size(); ++fp8) {
    const auto stored = static_cast<uint8_t>(fp8);
    const float value = from == DType::kFloat8E4M3 ? fp8_e4m3_to_float(stored) : fp8_e5m2_to_float(stored);
    table[fp8] = to == DType::kFloat16 ? float_to_float16(value * scale) : float_to_bfloat16(value * scale);
  }
  return table;
}

/// Tokens of one page, one half of the cache.
struct Half {
  const uint8_t* from;
  uint16_t* to;
  const KvStrides& from_strides;
  const KvStrides& to_strides;
  int32_t head_dim;
};

void copy_page(const Half& half, const Table& table, int32_t tokens, int32_t heads) {
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t head = 0; head < heads; ++head) {
      const uint8_t* const from = half.from + token * half.from_strides.token + head * half.from_strides.head;
      uint16_t* const to = half.to + token * half.to_strides.token + head * half.to_strides.head;
      for (int32_t d = 0; d < half.head_dim; ++d) to[d] = table[from[d]];
    }
  }
}

void check_caches(const KvCacheView& from, const KvCacheView& to) {
  require(from.format == KvFormat::kStrided && to.format == KvFormat::kStrided,
          "dequantize_pages: both caches must be strided");
  require(is_fp8(from.dtype), "from is ", from.dtype, "; it must be fp8_e4m3 or fp8_e5m2");
  require(to.dtype == DType::kFloat16 || to.dtype == DType::kBFloat16, "to is ", to.dtype,
          "; it must be float16 or bfloat16");
  validate(from);
  validate(to);
  require(to.page_size == from.page_size && to.num_kv_heads == from.num_kv_heads &&
              to.head_dim_qk == from.head_dim_qk && to.head_dim_v == from.head_dim_v,
          "the pages of to are not like those of from");
}

Scale scale_of(float value) {
  Scale scale;
  scale.value = value;
  return scale;
}

/// What both devices need, checked.
struct Dequantize {
  const KvCacheView& from;
  const PageTableView& table;
  int32_t columns;
  std::span<const int32_t> seq_lens;
  float k_scale;
  float v_scale;
  const KvCacheView& to;
  std::span<int32_t> new_table;

  const int32_t* first_row() const { return table.indices + table.first_column; }
};

/// A GPU reads lengths and tables when its kernels run.
void dequantize_on_gpu(const attention::GpuKernels& gpu, const Dequantize& job, Stream stream, int32_t* status) {
  attention::check_gpu_aligned("table.indices", job.table.indices, sizeof(int32_t));
  attention::check_gpu_aligned("seq_lens", job.seq_lens.data(), sizeof(int32_t));
  attention::check_gpu_aligned("new_table", job.new_table.data(), sizeof(int32_t));
  kernels::cuda::RenumberParams params;
  params.move.num_heads = job.from.num_kv_heads;
  params.move.page_size = job.from.page_size;
  params.move.status = status;
  for (const bool is_k : {true, false}) {
    kernels::cuda::MoveHalf& half = params.move.halves[is_k ? 0 : 1];
    half.from = attention::move_side(job.from, is_k);
    half.to = attention::move_side(job.to, is_k);
    half.head_dim = is_k ? job.from.head_dim_qk : job.from.head_dim_v;
    half.from_scale = scale_of(is_k ? job.k_scale : job.v_scale);
  }
  params.table = job.first_row();
  params.table_stride = job.table.row_stride;
  params.columns = job.columns;
  params.seq_lens = job.seq_lens.data();
  params.num_rows = core::checked_cast<int32_t>(job.seq_lens.size());
  params.from_pages = job.from.num_pages;
  params.to_pages = job.to.num_pages;
  params.new_table = job.new_table.data();
  gpu.enqueue(params, stream);
}

void dequantize_on_cpu(const Context& context, const Dequantize& job) {
  const KvCacheView& from = job.from;
  const KvCacheView& to = job.to;
  const int64_t num_pages = num_dequantized_pages(job.seq_lens, from.page_size);
  require(to.num_pages >= num_pages, "to has ", to.num_pages, " pages; ", num_pages, " are needed");
  // Throws for lengths beyond a row and for ids outside the cache.
  validate(job.table, job.seq_lens, from.page_size, from.num_pages);

  std::ranges::fill(job.new_table, 0);
  int32_t next = 1;
  for (size_t r = 0; r < job.seq_lens.size(); ++r) {
    const int32_t pages = pages_for(job.seq_lens[r], from.page_size);
    require(pages <= job.columns, "request ", r, " needs ", pages, " pages; new_table has ", job.columns, " columns");
    for (int32_t j = 0; j < pages; ++j) {
      job.new_table[r * static_cast<size_t>(job.columns) + static_cast<size_t>(j)] = next++;
    }
  }
  const Table k_table = scaled_values(from.dtype, to.dtype, job.k_scale);
  const Table v_table = scaled_values(from.dtype, to.dtype, job.v_scale);
  const auto entries = static_cast<int64_t>(job.new_table.size());
  const double bytes =
      static_cast<double>(num_pages) * from.page_size * from.num_kv_heads * (from.head_dim_qk + from.head_dim_v);
  attention::for_ranges(context, entries, attention::wanted_ranges(context, bytes), [&](int64_t begin, int64_t end) {
    for (int64_t entry = begin; entry < end; ++entry) {
      const int64_t new_page = job.new_table[static_cast<size_t>(entry)];
      if (new_page == 0) continue;
      const int64_t row = entry / job.columns;
      const int64_t column = entry % job.columns;
      const int64_t page = job.first_row()[row * job.table.row_stride + column];
      const auto tokens = static_cast<int32_t>(
          std::min<int64_t>(from.page_size, job.seq_lens[static_cast<size_t>(row)] - column * from.page_size));
      copy_page(
          {static_cast<const uint8_t*>(from.k) + page * from.k_strides.page,
           static_cast<uint16_t*>(to.k) + new_page * to.k_strides.page, from.k_strides, to.k_strides, from.head_dim_qk},
          k_table, tokens, from.num_kv_heads);
      copy_page(
          {static_cast<const uint8_t*>(from.v) + page * from.v_strides.page,
           static_cast<uint16_t*>(to.v) + new_page * to.v_strides.page, from.v_strides, to.v_strides, from.head_dim_v},
          v_table, tokens, from.num_kv_heads);
    }
  });
}

}  // namespace

int64_t num_dequantized_pages(std::span<const int32_t> seq_lens, int32_t page_size) {
  int64_t pages = 1;
  for (const int32_t seq_len : seq_lens) pages += pages_for(seq_len, page_size);
  return pages;
}

void dequantize_pages(const Context& context, const KvCacheView& from, const PageTableView& table, int32_t columns,
                      std::span<const int32_t> seq_lens, float k_scale, float v_scale, const KvCacheView& to,
                      std::span<int32_t> new_table, Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) attention::check_device("dequantize_pages", context, stream);
  attention::check_status(status, gpu != nullptr);
  check_caches(from, to);
  require(std::isfinite(k_scale) && std::isfinite(v_scale), "k_scale is ", k_scale, " and v_scale ", v_scale,
          "; both must be finite");
  require(table.kind == PageTableKind::kDense, "dequantize_pages: the table must be dense");
  const auto num_requests = core::checked_cast<int32_t>(seq_lens.size());
  kvcache::check_table(table, num_requests);
  require(columns >= 0 && static_cast<int64_t>(new_table.size()) == int64_t{num_requests} * columns, "new_table has ",
          new_table.size(), " entries; ", num_requests, " rows of ", columns, " are needed");
  const Dequantize job{from, table, columns, seq_lens, k_scale, v_scale, to, new_table};
  if (gpu != nullptr) {
    dequantize_on_gpu(*gpu, job, stream, status);
  } else {
    dequantize_on_cpu(context, job);
  }
}

}  // namespace folio::inline v0
