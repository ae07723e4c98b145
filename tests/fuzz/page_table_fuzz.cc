// Page tables and the conversions between them, from arbitrary lengths, tables and sizes. What a call accepts must
// agree with its inverse; what it refuses, it refuses with folio::Error; memory outside the given arrays is never
// touched.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "calls.hpp"
#include "folio/page_table.hpp"
#include "input.hpp"

namespace {

using folio::PageTableView;

constexpr size_t kMaxRows = 8;
constexpr int32_t kUsualLength = 96;
constexpr int32_t kMaxSlots = 64;
constexpr int32_t kMaxRatio = 1 << 16;  // the expansion is as long as it says: keep it within a fuzzer's memory

/// A page size, usually one that a cache would have.
int32_t take_page_size(FuzzInput& input) {
  constexpr int32_t kUsual[] = {1, 2, 3, 4, 8, 16, 32, 64};
  const auto kind = input.take<uint8_t>();
  return kind < 240 ? kUsual[kind % std::size(kUsual)] : input.take<int32_t>();
}

/// Lengths to (indptr, last_page_len) and back.
void check_lengths(const std::vector<int32_t>& seq_lens, int32_t page_size) {
  const size_t rows = seq_lens.size();
  std::vector<int32_t> indptr(rows + 1), last_page_len(rows), back(rows);
  if (!accepted([&] { folio::paged_indptr(seq_lens, page_size, indptr, last_page_len); })) return;
  FUZZ_CHECK(indptr[0] == 0 && std::is_sorted(indptr.begin(), indptr.end()));
  folio::seq_lens_from_paged(indptr, last_page_len, page_size, back);
  FUZZ_CHECK(back == seq_lens);
}

/// A table that passed validation converts to the other kind and back, and every slot lies in the cache.
void check_table(const PageTableView& table, const std::vector<int32_t>& seq_lens, int32_t page_size, int64_t num_pages,
                 FuzzInput& input) {
  if (!accepted([&] { folio::validate(table, seq_lens, page_size, num_pages); })) return;
  folio::PagedMetadata csr;
  if (!accepted([&] { csr = folio::to_csr(table, seq_lens, page_size); })) return;
  FUZZ_CHECK(csr.indptr.size() == seq_lens.size() + 1);
  FUZZ_CHECK(csr.indices.size() == static_cast<size_t>(csr.indptr.back()));
  for (int32_t page : csr.indices) FUZZ_CHECK(page >= 0 && page < num_pages);

  const PageTableView view = folio::csr_table(csr.indices, csr.indptr);
  int32_t longest = 0;
  for (size_t row = 0; row < seq_lens.size(); ++row) longest = std::max(longest, csr.indptr[row + 1] - csr.indptr[row]);
  const std::vector<int32_t> dense = folio::to_dense(view, seq_lens, page_size, longest, -1);
  const auto rows = static_cast<int32_t>(seq_lens.size());
  const folio::PagedMetadata again = folio::to_csr(folio::dense_table(dense, rows, longest), seq_lens, page_size);
  FUZZ_CHECK(again.indices == csr.indices && again.indptr == csr.indptr && again.last_page_len == csr.last_page_len);

  const auto tokens = static_cast<size_t>(input.take_between(0, kMaxSlots));
  const std::vector<int32_t> token_row = input.take_lengths(tokens, rows);
  const std::vector<int32_t> positions = input.take_lengths(tokens, kUsualLength);
  std::vector<int64_t> slots(tokens);
  if (!accepted([&] { folio::slot_mapping(view, token_row, positions, page_size, slots); })) return;
  for (int64_t slot : slots) FUZZ_CHECK(slot >= -1 && slot < num_pages * page_size);
}

/// Tokens of all ranks are the tokens.
void check_shards(FuzzInput& input) {
  const int32_t length = input.take_length(kUsualLength);
  const int32_t world = input.take_length(8);
  const int32_t interleave = input.take_length(4);
  if (world > 64) return;
  int64_t total = 0;
  if (!accepted([&] {
        for (int32_t rank = 0; rank < world; ++rank) total += folio::shard_len(length, world, rank, interleave);
      })) {
    return;
  }
  FUZZ_CHECK(world < 1 || total == length);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const auto rows = static_cast<size_t>(input.take_between(0, kMaxRows));
  const int32_t page_size = take_page_size(input);
  const std::vector<int32_t> seq_lens = input.take_lengths(rows, kUsualLength);
  const int64_t num_pages = input.take_length(64);
  accepted([&] { folio::pages_for(seq_lens.empty() ? 0 : seq_lens[0], page_size); });
  check_lengths(seq_lens, page_size);
  check_shards(input);

  const std::vector<int32_t> entries = input.take_lengths(input.take<uint8_t>(), 64);
  const int32_t ratio = input.take_length(4);
  if (ratio < kMaxRatio) accepted([&] { folio::expand_pages(entries, ratio); });
  PageTableView table;
  if (input.take<uint8_t>() % 2 == 0) {
    std::vector<int32_t> indptr = input.take_lengths(rows + 1, static_cast<int32_t>(entries.size()));
    if (input.take<uint8_t>() % 4 != 0) std::sort(indptr.begin(), indptr.end());
    if (accepted([&] { table = folio::csr_table(entries, indptr); })) {
      check_table(table, seq_lens, page_size, num_pages, input);
    }
  } else {
    const int32_t row_stride = input.take_length(16);
    const int32_t first_column = input.take_length(2);
    if (accepted([&] { table = folio::dense_table(entries, static_cast<int32_t>(rows), row_stride, first_column); })) {
      check_table(table, seq_lens, page_size, num_pages, input);
    }
  }
  return 0;
}
