#include "folio/table_ops.hpp"

#include <algorithm>
#include <limits>

#include "attention/cache_args.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/page_table.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0 {
namespace {

using core::require;
namespace cuda = kernels::cuda;

template <typename T>
void check_array(const char* name, std::span<T> array, int64_t size) {
  require(std::ssize(array) == size, name, " has ", std::ssize(array), " entries; it must have ", size);
  require(array.data() != nullptr || size == 0, name, " is null");
  attention::check_gpu_aligned(name, array.data(), sizeof(T));
}

/// The GPU, null for a CPU.
const attention::GpuBackend* gpu_of(const char* function, const Context& context, Stream stream,
                                    const int32_t* status) {
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) attention::check_device(function, context, stream);
  attention::check_status(status, gpu != nullptr);
  return gpu;
}

void check_page_size(int32_t page_size) {
  require(page_size >= 1, "page_size is ", page_size, "; it must be 1 or more");
}

void check_shard(const KvShard& shard) {
  require(shard.world >= 1 && shard.rank >= 0 && shard.rank < shard.world && shard.interleave >= 1,
          "the shard is rank ", shard.rank, " of ", shard.world, " with an interleave of ", shard.interleave,
          "; ranks are in [0, world), the others 1 or more");
}

int32_t rows_of(std::span<const int32_t> lens) {
  return core::checked_cast<int32_t>(lens.size());
}

void check_list(const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size) {
  check_page_size(page_size);
  kvcache::check_table(table, std::ssize(seq_lens));
  check_array("seq_lens", seq_lens, std::ssize(seq_lens));
}

/// One entry a token, `entry(page, place)`, on a CPU.
template <typename T, typename Entry>
void list_tokens(const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size,
                 std::span<int32_t> indptr, std::span<T> out, const Entry& entry) {
  int64_t total = 0;
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    const int32_t pages = pages_for(seq_lens[r], page_size);
    kvcache::row_pages(table, static_cast<int32_t>(r), pages);
    total += seq_lens[r];
    require(total <= std::numeric_limits<int32_t>::max(), "the tokens up to request ", r, " are ", total,
            "; a 32-bit indptr counts up to ", std::numeric_limits<int32_t>::max());
  }
  require(total <= std::ssize(out), "there are ", total, " tokens; the list has room for ", std::ssize(out));
  indptr[0] = 0;
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    const auto pages = kvcache::row_pages(table, static_cast<int32_t>(r), pages_for(seq_lens[r], page_size));
    for (int32_t t = 0; t < seq_lens[r]; ++t) {
      out[static_cast<size_t>(indptr[r]) + static_cast<size_t>(t)] =
          entry(pages[static_cast<size_t>(t / page_size)], t % page_size);
    }
    indptr[r + 1] = indptr[r] + seq_lens[r];
  }
}

cuda::ListParams list_params(const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size,
                             std::span<int32_t> indptr, int32_t* status) {
  cuda::ListParams params;
  params.table = table;
  params.lens = seq_lens.data();
  params.n = rows_of(seq_lens);
  params.page_size = page_size;
  params.tokens = true;
  params.indptr = indptr.data();
  params.status = status;
  return params;
}

}  // namespace

void paged_indptr(const Context& context, std::span<const int32_t> seq_lens, int32_t page_size,
                  std::span<int32_t> indptr, std::span<int32_t> last_page_len, Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("paged_indptr", context, stream, status);
  if (gpu == nullptr) return paged_indptr(seq_lens, page_size, indptr, last_page_len);
  check_page_size(page_size);
  check_array("seq_lens", seq_lens, std::ssize(seq_lens));
  check_array("indptr", indptr, std::ssize(seq_lens) + 1);
  check_array("last_page_len", last_page_len, std::ssize(seq_lens));
  cuda::IndptrParams params;
  params.lens = seq_lens.data();
  params.n = rows_of(seq_lens);
  params.unit = page_size;
  params.indptr = indptr.data();
  params.last_unit_len = last_page_len.data();
  params.status = status;
  gpu->enqueue(params, stream);
}

void seq_lens_from_paged(const Context& context, std::span<const int32_t> indptr,
                         std::span<const int32_t> last_page_len, int32_t page_size, std::span<int32_t> seq_lens,
                         Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("seq_lens_from_paged", context, stream, status);
  if (gpu == nullptr) return seq_lens_from_paged(indptr, last_page_len, page_size, seq_lens);
  check_page_size(page_size);
  check_array("indptr", indptr, std::ssize(seq_lens) + 1);
  check_array("last_page_len", last_page_len, std::ssize(seq_lens));
  check_array("seq_lens", seq_lens, std::ssize(seq_lens));
  cuda::LensParams params;
  params.indptr = indptr.data();
  params.last_unit_len = last_page_len.data();
  params.n = rows_of(seq_lens);
  params.unit = page_size;
  params.lens = seq_lens.data();
  params.status = status;
  gpu->enqueue(params, stream);
}

void to_csr(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size,
            std::span<int32_t> indptr, std::span<int32_t> indices, std::span<int32_t> last_page_len, Stream stream,
            int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("to_csr", context, stream, status);
  if (gpu == nullptr) {
    const PagedMetadata csr = to_csr(table, seq_lens, page_size);
    check_array("indptr", indptr, std::ssize(csr.indptr));
    check_array("last_page_len", last_page_len, std::ssize(csr.last_page_len));
    require(std::ssize(indices) >= std::ssize(csr.indices), "there are ", std::ssize(csr.indices),
            " pages; indices has room for ", std::ssize(indices));
    std::ranges::copy(csr.indptr, indptr.begin());
    std::ranges::copy(csr.indices, indices.begin());
    std::ranges::copy(csr.last_page_len, last_page_len.begin());
    return;
  }
  check_list(table, seq_lens, page_size);
  check_array("indices", indices, std::ssize(indices));
  check_array("indptr", indptr, std::ssize(seq_lens) + 1);
  check_array("last_page_len", last_page_len, std::ssize(seq_lens));
  cuda::ListParams params = list_params(table, seq_lens, page_size, indptr, status);
  params.tokens = false;
  params.last_unit_len = last_page_len.data();
  params.out32 = indices.data();
  params.capacity = std::ssize(indices);
  gpu->enqueue(params, stream);
}

void to_dense(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size,
              int32_t columns, int32_t fill, std::span<int32_t> dense, Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("to_dense", context, stream, status);
  require(columns >= 0, "columns is ", columns, "; it must not be negative");
  check_array("dense", dense, core::checked_mul(core::checked_cast<int64_t>(seq_lens.size()), int64_t{columns}));
  if (gpu == nullptr) {
    std::ranges::copy(to_dense(table, seq_lens, page_size, columns, fill), dense.begin());
    return;
  }
  check_list(table, seq_lens, page_size);
  cuda::DenseParams params;
  params.table = table;
  params.lens = seq_lens.data();
  params.n = rows_of(seq_lens);
  params.page_size = page_size;
  params.columns = columns;
  params.fill = fill;
  params.out = dense.data();
  params.status = status;
  gpu->enqueue(params, stream);
}

void token_indices(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens,
                   int32_t page_size, std::span<int32_t> indptr, std::span<int32_t> indices, Stream stream,
                   int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("token_indices", context, stream, status);
  check_list(table, seq_lens, page_size);
  check_array("indptr", indptr, std::ssize(seq_lens) + 1);
  check_array("indices", indices, std::ssize(indices));
  if (gpu == nullptr) {
    list_tokens(table, seq_lens, page_size, indptr, indices, [&](int32_t page, int32_t place) {
      const int64_t index = int64_t{page} * page_size + place;
      require(index >= 0 && index <= std::numeric_limits<int32_t>::max(), "page ", page, " of ", page_size,
              " tokens has no indices of 32 bits; token_offsets has 64");
      return static_cast<int32_t>(index);
    });
    return;
  }
  cuda::ListParams params = list_params(table, seq_lens, page_size, indptr, status);
  params.page_stride = page_size;
  params.token_stride = 1;
  params.out32 = indices.data();
  params.capacity = std::ssize(indices);
  gpu->enqueue(params, stream);
}

void token_offsets(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens,
                   int32_t page_size, int64_t page_stride, int64_t token_stride, std::span<int32_t> indptr,
                   std::span<int64_t> offsets, Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("token_offsets", context, stream, status);
  check_list(table, seq_lens, page_size);
  check_array("indptr", indptr, std::ssize(seq_lens) + 1);
  check_array("offsets", offsets, std::ssize(offsets));
  require(page_stride >= 0 && token_stride >= 0, "page_stride ", page_stride, " and token_stride ", token_stride,
          " must not be negative");
  if (gpu == nullptr) {
    list_tokens(table, seq_lens, page_size, indptr, offsets, [&](int32_t page, int32_t place) {
      return core::checked_add(core::checked_mul(int64_t{page}, page_stride),
                               core::checked_mul(int64_t{place}, token_stride));
    });
    return;
  }
  cuda::ListParams params = list_params(table, seq_lens, page_size, indptr, status);
  params.page_stride = page_stride;
  params.token_stride = token_stride;
  params.out64 = offsets.data();
  params.capacity = std::ssize(offsets);
  gpu->enqueue(params, stream);
}

void slot_mapping(const Context& context, const PageTableView& table, std::span<const int32_t> token_row,
                  std::span<const int32_t> positions, int32_t page_size, std::span<int64_t> slots, const KvShard& shard,
                  Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("slot_mapping", context, stream, status);
  if (gpu == nullptr) {
    return slot_mapping(table, token_row, positions, page_size, slots, shard.world, shard.rank, shard.interleave);
  }
  check_page_size(page_size);
  kvcache::check_table(table);
  check_shard(shard);
  require(page_size % shard.interleave == 0, "the shard's interleave is ", shard.interleave,
          "; it must divide page_size (", page_size, ")");
  require(int64_t{page_size} * shard.world <= std::numeric_limits<int32_t>::max(), "page_size ", page_size, " times ",
          shard.world, " ranks is no 32-bit number of tokens");
  check_array("positions", positions, std::ssize(positions));
  check_array("token_row", token_row, std::ssize(positions));
  check_array("slots", slots, std::ssize(positions));
  cuda::SlotParams params;
  params.table = table;
  params.token_row = token_row.data();
  params.positions = positions.data();
  params.num_tokens = std::ssize(positions);
  params.page_size = page_size;
  params.shard = shard;
  params.slots = slots.data();
  params.status = status;
  gpu->enqueue(params, stream);
}

void expand_pages(const Context& context, std::span<const int32_t> pages, int32_t ratio, std::span<int32_t> expanded,
                  Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("expand_pages", context, stream, status);
  require(ratio >= 1, "ratio is ", ratio, "; it must be 1 or more");
  check_array("pages", pages, std::ssize(pages));
  check_array("expanded", expanded, core::checked_mul(core::checked_cast<int64_t>(pages.size()), int64_t{ratio}));
  if (gpu == nullptr) {
    std::ranges::copy(expand_pages(pages, ratio), expanded.begin());
    return;
  }
  cuda::ExpandParams params;
  params.pages = pages.data();
  params.n = std::ssize(pages);
  params.ratio = ratio;
  params.out = expanded.data();
  params.status = status;
  gpu->enqueue(params, stream);
}

void shard_lens(const Context& context, std::span<const int32_t> lens, const KvShard& shard, std::span<int32_t> local,
                Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("shard_lens", context, stream, status);
  check_shard(shard);
  check_array("lens", lens, std::ssize(lens));
  check_array("local", local, std::ssize(lens));
  if (gpu != nullptr) {
    gpu->enqueue(cuda::ShardLensParams{lens.data(), std::ssize(lens), shard, local.data(), status}, stream);
    return;
  }
  for (size_t i = 0; i < lens.size(); ++i) local[i] = shard_len(lens[i], shard.world, shard.rank, shard.interleave);
}

void validate(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size,
              int64_t num_pages, Stream stream, int32_t* status) {
  const attention::GpuBackend* const gpu = gpu_of("validate", context, stream, status);
  if (gpu == nullptr) return validate(table, seq_lens, page_size, num_pages);
  check_list(table, seq_lens, page_size);
  require(status != nullptr, "status is null; a GPU has no other way to say that a page is wrong");
  require(num_pages >= 0, "num_pages is ", num_pages, "; it must not be negative");
  gpu->enqueue(cuda::ValidateParams{table, seq_lens.data(), rows_of(seq_lens), page_size, num_pages, status}, stream);
}

}  // namespace folio::inline v0
