#include "folio/backends/flashinfer/kv_dequant.hpp"

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

namespace folio::inline v0::backends {
namespace {

using core::require;

/// Every fp8 code under a scale, as the mock cache stores it.
using Table = std::array<uint16_t, 256>;

Table codes_under(DType from, DType to, float scale) {
  Table table{};
  for (size_t code = 0; code < table.size(); ++code) {
    const auto stored = static_cast<uint8_t>(code);
    const float value = from == DType::kFloat8E4M3 ? fp8_e4m3_to_float(stored) : fp8_e5m2_to_float(stored);
    table[code] = to == DType::kFloat16 ? float_to_float16(value * scale) : float_to_bfloat16(value * scale);
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

void check_caches(const KvCacheView& kv_cache, const KvCacheView& mock) {
  require(kv_cache.format == KvFormat::kStrided && mock.format == KvFormat::kStrided,
          "kv_cache and mock_kv_cache must be strided");
  require(is_fp8(kv_cache.dtype), "kv_cache is ", kv_cache.dtype, "; it must be fp8_e4m3 or fp8_e5m2");
  require(mock.dtype == DType::kFloat16 || mock.dtype == DType::kBFloat16, "mock_kv_cache is ", mock.dtype,
          "; it must be float16 or bfloat16");
  validate(kv_cache);
  validate(mock);
  require(mock.page_size == kv_cache.page_size && mock.num_kv_heads == kv_cache.num_kv_heads &&
              mock.head_dim_qk == kv_cache.head_dim_qk && mock.head_dim_v == kv_cache.head_dim_v,
          "mock_kv_cache's pages are not like kv_cache's");
}

Scale scale_of(float value) {
  Scale scale;
  scale.value = value;
  return scale;
}

/// The same on a GPU, which reads lengths and tables when its kernels run.
void dequant_on_gpu(const attention::GpuKernels& gpu, const KvCacheView& kv_cache, const BlockTableView& block_tables,
                    std::span<const int32_t> seq_lens, float k_scale, float v_scale, const KvCacheView& mock,
                    std::span<int32_t> mock_block_table, Stream stream, int32_t* status) {
  attention::check_gpu_aligned("block_tables.data", block_tables.data, sizeof(int32_t));
  attention::check_gpu_aligned("seq_lens", seq_lens.data(), sizeof(int32_t));
  attention::check_gpu_aligned("mock_block_table", mock_block_table.data(), sizeof(int32_t));
  kernels::cuda::RenumberParams params;
  params.move.num_heads = kv_cache.num_kv_heads;
  params.move.page_size = kv_cache.page_size;
  params.move.status = status;
  for (const bool is_k : {true, false}) {
    kernels::cuda::MoveHalf& half = params.move.halves[is_k ? 0 : 1];
    half.from = attention::move_side(kv_cache, is_k);
    half.to = attention::move_side(mock, is_k);
    half.head_dim = is_k ? kv_cache.head_dim_qk : kv_cache.head_dim_v;
    half.from_scale = scale_of(is_k ? k_scale : v_scale);
  }
  params.table = block_tables.data;
  params.table_stride = block_tables.row_stride;
  params.columns = block_tables.num_columns;
  params.seq_lens = seq_lens.data();
  params.num_rows = core::checked_cast<int32_t>(seq_lens.size());
  params.from_pages = kv_cache.num_pages;
  params.to_pages = mock.num_pages;
  params.new_table = mock_block_table.data();
  gpu.enqueue(params, stream);
}

}  // namespace

int64_t num_dequantized_pages(std::span<const int32_t> seq_lens, int32_t page_size) {
  int64_t pages = 1;
  for (const int32_t seq_len : seq_lens) pages += pages_for(seq_len, page_size);
  return pages;
}

void trtllm_prefill_attn_kvfp8_dequant(const Context& context, const KvCacheView& kv_cache,
                                       const BlockTableView& block_tables, std::span<const int32_t> seq_lens,
                                       float k_scale, float v_scale, const KvCacheView& mock_kv_cache,
                                       std::span<int32_t> mock_block_table, Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) attention::check_device("trtllm_prefill_attn_kvfp8_dequant", context, stream);
  attention::check_status(status, gpu != nullptr);
  check_caches(kv_cache, mock_kv_cache);
  require(std::isfinite(k_scale) && std::isfinite(v_scale), "k_scale is ", k_scale, " and v_scale ", v_scale,
          "; both must be finite");
  const auto num_requests = core::checked_cast<int32_t>(seq_lens.size());
  const int32_t columns = block_tables.num_columns;
  require(block_tables.num_rows >= num_requests, "block_tables has ", block_tables.num_rows, " rows; seq_lens has ",
          num_requests, " entries");
  require(static_cast<int64_t>(mock_block_table.size()) == int64_t{num_requests} * columns, "mock_block_table has ",
          mock_block_table.size(), " entries; ", num_requests, " rows of ", columns, " are needed");
  if (gpu != nullptr) {
    kvcache::check_table(to_page_table(block_tables, num_requests), num_requests);
    dequant_on_gpu(*gpu, kv_cache, block_tables, seq_lens, k_scale, v_scale, mock_kv_cache, mock_block_table, stream,
                   status);
    return;
  }
  const int64_t num_pages = num_dequantized_pages(seq_lens, kv_cache.page_size);
  require(mock_kv_cache.num_pages >= num_pages, "mock_kv_cache has ", mock_kv_cache.num_pages, " pages; ", num_pages,
          " are needed");
  // Throws for lengths beyond a row and for ids outside the cache.
  validate(to_page_table(block_tables, num_requests), seq_lens, kv_cache.page_size, kv_cache.num_pages);

  std::ranges::fill(mock_block_table, 0);
  int32_t next = 1;
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    const int32_t pages = pages_for(seq_lens[r], kv_cache.page_size);
    for (int32_t j = 0; j < pages; ++j) {
      mock_block_table[r * static_cast<size_t>(columns) + static_cast<size_t>(j)] = next++;
    }
  }
  const Table k_table = codes_under(kv_cache.dtype, mock_kv_cache.dtype, k_scale);
  const Table v_table = codes_under(kv_cache.dtype, mock_kv_cache.dtype, v_scale);
  const int64_t entries = int64_t{num_requests} * columns;
  const double bytes = static_cast<double>(num_pages) * kv_cache.page_size * kv_cache.num_kv_heads *
                       (kv_cache.head_dim_qk + kv_cache.head_dim_v);
  attention::for_ranges(context, entries, attention::wanted_items(context, bytes), [&](int64_t begin, int64_t end) {
    for (int64_t entry = begin; entry < end; ++entry) {
      const int64_t mock_page = mock_block_table[static_cast<size_t>(entry)];
      if (mock_page == 0) continue;
      const int64_t row = entry / columns;
      const int64_t column = entry % columns;
      const int64_t page = block_tables.data[row * block_tables.row_stride + column];
      const auto tokens = static_cast<int32_t>(
          std::min<int64_t>(kv_cache.page_size, seq_lens[static_cast<size_t>(row)] - column * kv_cache.page_size));
      copy_page({static_cast<const uint8_t*>(kv_cache.k) + page * kv_cache.k_strides.page,
                 static_cast<uint16_t*>(mock_kv_cache.k) + mock_page * mock_kv_cache.k_strides.page, kv_cache.k_strides,
                 mock_kv_cache.k_strides, kv_cache.head_dim_qk},
                k_table, tokens, kv_cache.num_kv_heads);
      copy_page({static_cast<const uint8_t*>(kv_cache.v) + page * kv_cache.v_strides.page,
                 static_cast<uint16_t*>(mock_kv_cache.v) + mock_page * mock_kv_cache.v_strides.page, kv_cache.v_strides,
                 mock_kv_cache.v_strides, kv_cache.head_dim_v},
                v_table, tokens, kv_cache.num_kv_heads);
    }
  });
}

}  // namespace folio::inline v0::backends
