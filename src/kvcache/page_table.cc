#include "folio/page_table.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0 {
namespace {

using core::kMaxInt32;
using core::require;
using kvcache::check_table;
using kvcache::row_pages;

void check_page_size(int32_t page_size) {
  require(page_size >= 1, "page_size is ", page_size, "; it must be 1 or more");
}

void check_length(int64_t request, int32_t length) {
  require(length >= 0, "the length of request ", request, " is ", length, "; it must not be negative");
}

int32_t last_page_of(int32_t length, int32_t pages, int32_t page_size) {
  if (pages == 0) return 0;
  return static_cast<int32_t>(length - static_cast<int64_t>(pages - 1) * page_size);
}

/// Memory for `count` entries, `value` in each.
std::vector<int32_t> entries(int64_t count, int32_t value, const char* what) {
  try {
    return std::vector<int32_t>(static_cast<size_t>(count), value);
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  core::fail(ErrorCode::kOutOfMemory, what, " of ", count, " entries does not fit into memory");
}

/// Checks lengths and rows, and returns how many pages they need in all.
int64_t total_pages(const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size) {
  check_page_size(page_size);
  check_table(table, static_cast<int64_t>(seq_lens.size()));
  int64_t total = 0;
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    check_length(static_cast<int64_t>(r), seq_lens[r]);
    const int32_t pages = pages_for(seq_lens[r], page_size);
    row_pages(table, static_cast<int32_t>(r), pages);
    total += pages;
  }
  return total;
}

void check_shard(int32_t world, int32_t rank, int32_t interleave) {
  require(world >= 1, "the shard's world is ", world, "; it must be 1 or more");
  require(rank >= 0 && rank < world, "the shard's rank is ", rank, "; it must be in [0, ", world, ")");
  require(interleave >= 1, "the shard's interleave is ", interleave, "; it must be 1 or more");
}

}  // namespace

int32_t pages_for(int32_t tokens, int32_t page_size) {
  require(tokens >= 0, "tokens is ", tokens, "; it must not be negative");
  check_page_size(page_size);
  return core::ceil_div(tokens, page_size);
}

void paged_indptr(std::span<const int32_t> seq_lens, int32_t page_size, std::span<int32_t> indptr,
                  std::span<int32_t> last_page_len) {
  check_page_size(page_size);
  require(indptr.size() == seq_lens.size() + 1, "indptr has ", indptr.size(), " entries for ", seq_lens.size(),
          " requests; it must have one more than requests");
  require(last_page_len.size() == seq_lens.size(), "last_page_len has ", last_page_len.size(), " entries for ",
          seq_lens.size(), " requests");
  int64_t pages_before = 0;
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    check_length(static_cast<int64_t>(r), seq_lens[r]);
    pages_before += core::ceil_div(seq_lens[r], page_size);
    require(pages_before <= kMaxInt32, "the pages up to request ", r, " are ", pages_before,
            "; a 32-bit indptr counts up to ", kMaxInt32);
  }
  indptr[0] = 0;
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    const int32_t pages = core::ceil_div(seq_lens[r], page_size);
    indptr[r + 1] = indptr[r] + pages;
    last_page_len[r] = last_page_of(seq_lens[r], pages, page_size);
  }
}

void seq_lens_from_paged(std::span<const int32_t> indptr, std::span<const int32_t> last_page_len, int32_t page_size,
                         std::span<int32_t> seq_lens) {
  check_page_size(page_size);
  require(indptr.size() == seq_lens.size() + 1, "indptr has ", indptr.size(), " entries for ", seq_lens.size(),
          " requests; it must have one more than requests");
  require(last_page_len.size() == seq_lens.size(), "last_page_len has ", last_page_len.size(), " entries for ",
          seq_lens.size(), " requests");
  require(indptr[0] >= 0, "indptr starts at ", indptr[0], "; it must not be negative");
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    require(indptr[r + 1] >= indptr[r], "indptr descends from ", indptr[r], " to ", indptr[r + 1], " at request ", r);
    const int64_t pages = indptr[r + 1] - indptr[r];
    // Padded requests have no pages; what schedulers put into their last_page_len (0 or 1) says nothing.
    const int32_t least = pages == 0 ? 0 : 1;
    require(last_page_len[r] >= least && last_page_len[r] <= page_size, "last_page_len of request ", r, " is ",
            last_page_len[r], "; with ", pages, " pages it must be in [", least, ", ", page_size, "]");
    const int64_t length = pages == 0 ? 0 : (pages - 1) * page_size + last_page_len[r];
    require(length <= kMaxInt32, "the length of request ", r, " is ", length, "; lengths go up to ", kMaxInt32);
    seq_lens[r] = static_cast<int32_t>(length);
  }
}

PagedMetadata to_csr(const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size) {
  const int64_t total = total_pages(table, seq_lens, page_size);
  const auto rows = static_cast<int64_t>(seq_lens.size());
  PagedMetadata csr;
  csr.indptr = entries(rows + 1, 0, "indptr");
  csr.last_page_len = entries(rows, 0, "last_page_len");
  paged_indptr(seq_lens, page_size, csr.indptr, csr.last_page_len);
  csr.indices = entries(total, 0, "indices");
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    std::ranges::copy(row_pages(table, static_cast<int32_t>(r), csr.indptr[r + 1] - csr.indptr[r]),
                      csr.indices.begin() + csr.indptr[r]);
  }
  return csr;
}

std::vector<int32_t> to_dense(const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size,
                              int32_t columns, int32_t fill) {
  require(columns >= 0, "columns is ", columns, "; it must not be negative");
  total_pages(table, seq_lens, page_size);
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    const int32_t pages = pages_for(seq_lens[r], page_size);
    require(pages <= columns, "request ", r, " needs ", pages, " pages; the dense table has ", columns, " columns");
  }
  const int64_t count = core::checked_mul(static_cast<int64_t>(seq_lens.size()), static_cast<int64_t>(columns));
  std::vector<int32_t> dense = entries(count, fill, "a dense table");
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    std::ranges::copy(row_pages(table, static_cast<int32_t>(r), pages_for(seq_lens[r], page_size)),
                      dense.begin() + static_cast<int64_t>(r) * columns);
  }
  return dense;
}

PageTableView csr_table(std::span<const int32_t> indices, std::span<const int32_t> indptr) {
  require(!indptr.empty(), "indptr is empty; it must have one entry more than rows");
  PageTableView table;
  table.kind = PageTableKind::kCsr;
  table.indices = indices.data();
  table.num_indices = core::checked_cast<int64_t>(indices.size());
  table.indptr = indptr.data();
  table.num_rows = core::checked_cast<int32_t>(indptr.size() - 1);
  check_table(table);
  return table;
}

PageTableView dense_table(std::span<const int32_t> entries, int32_t num_rows, int64_t row_stride,
                          int32_t first_column) {
  PageTableView table;
  table.kind = PageTableKind::kDense;
  table.indices = entries.data();
  table.num_indices = core::checked_cast<int64_t>(entries.size());
  table.row_stride = row_stride;
  table.first_column = first_column;
  table.num_rows = num_rows;
  check_table(table);
  if (num_rows > 0) {
    const int64_t last_row = core::checked_mul(static_cast<int64_t>(num_rows) - 1, row_stride);
    require(last_row <= table.num_indices - first_column, "a dense table of ", num_rows, " rows, stride ", row_stride,
            ", from column ", first_column, " on, does not fit into ", table.num_indices, " entries");
  }
  return table;
}

void slot_mapping(const PageTableView& table, std::span<const int32_t> token_row, std::span<const int32_t> positions,
                  int32_t page_size, std::span<int64_t> slots, int32_t shard_world, int32_t shard_rank,
                  int32_t shard_interleave) {
  check_page_size(page_size);
  check_table(table);
  check_shard(shard_world, shard_rank, shard_interleave);
  require(page_size % shard_interleave == 0, "the shard's interleave is ", shard_interleave,
          "; it must divide page_size (", page_size, ")");
  require(token_row.size() == positions.size() && slots.size() == positions.size(),
          "token_row, positions and slots have ", token_row.size(), ", ", positions.size(), " and ", slots.size(),
          " entries; they must have as many as tokens");
  const int64_t span = static_cast<int64_t>(page_size) * shard_world;          // tokens of a logical page
  const int64_t cycle = static_cast<int64_t>(shard_interleave) * shard_world;  // tokens until a rank's turn returns
  for (size_t t = 0; t < positions.size(); ++t) {
    slots[t] = -1;
    if (positions[t] < 0) continue;
    const int64_t logical_page = positions[t] / span;
    const int64_t in_page = positions[t] % span;
    if (in_page / shard_interleave % shard_world != shard_rank) continue;
    require(token_row[t] >= 0 && token_row[t] < table.num_rows, "token ", t, " belongs to row ", token_row[t],
            "; the table has ", table.num_rows, " rows");
    const int64_t page = row_pages(table, token_row[t], logical_page + 1).back();
    require(page >= 0, "token ", t, " (row ", token_row[t], ", position ", positions[t], ") lies on page ", page,
            "; page ids are not negative");
    slots[t] = page * page_size + in_page / cycle * shard_interleave + in_page % shard_interleave;
  }
}

std::vector<int32_t> expand_pages(std::span<const int32_t> pages, int32_t ratio) {
  require(ratio >= 1, "ratio is ", ratio, "; it must be 1 or more");
  for (size_t i = 0; i < pages.size(); ++i) {
    require(pages[i] >= 0, "pages[", i, "] is ", pages[i], "; page ids are not negative");
    require((static_cast<int64_t>(pages[i]) + 1) * ratio - 1 <= kMaxInt32, "pages[", i, "] is ", pages[i], "; times ",
            ratio, " it is no 32-bit page id");
  }
  const int64_t count = core::checked_mul(core::checked_cast<int64_t>(pages.size()), static_cast<int64_t>(ratio));
  std::vector<int32_t> expanded = entries(count, 0, "the expanded list");
  size_t next = 0;
  for (const int32_t page : pages) {
    for (int32_t i = 0; i < ratio; ++i) expanded[next++] = page * ratio + i;
  }
  return expanded;
}

void validate(const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size, int64_t num_pages) {
  check_page_size(page_size);
  check_table(table, static_cast<int64_t>(seq_lens.size()));
  require(num_pages >= 0, "num_pages is ", num_pages, "; it must not be negative");
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    check_length(static_cast<int64_t>(r), seq_lens[r]);
    const auto pages = row_pages(table, static_cast<int32_t>(r), pages_for(seq_lens[r], page_size));
    for (size_t column = 0; column < pages.size(); ++column) {
      require(pages[column] >= 0 && pages[column] < num_pages, "row ", r, ", column ", column, " of the table is page ",
              pages[column], "; the cache has ", num_pages, " pages");
    }
  }
}

int32_t shard_len(int32_t length, int32_t world, int32_t rank, int32_t interleave) {
  require(length >= 0, "length is ", length, "; it must not be negative");
  check_shard(world, rank, interleave);
  const int64_t cycle = static_cast<int64_t>(world) * interleave;
  const int64_t whole = length / cycle * interleave;
  const int64_t rest = length % cycle - static_cast<int64_t>(rank) * interleave;
  return static_cast<int32_t>(whole + std::clamp<int64_t>(rest, 0, interleave));
}

}  // namespace folio::inline v0
