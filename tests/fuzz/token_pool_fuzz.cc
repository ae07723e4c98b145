// The token pool's lists of slots and draft trees, from arbitrary tables, rows, lengths, offsets and parents. Arrays
// are as long as they say, so that a sanitizer sees any access outside; what is accepted must be what the definitions
// say, and what is refused leaves the outputs alone.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "calls.hpp"
#include "folio/backends/token_pool/draft_kv_indices.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"
#include "folio/backends/token_pool/kv_indices.hpp"
#include "input.hpp"

namespace {

using namespace folio::backends;
using folio::PageTableKind;
using folio::PageTableView;
using Ints = std::vector<int32_t>;

constexpr int32_t kUntouched = -12345;
constexpr int64_t kMostEntries = 1 << 14;

bool untouched(const Ints& values) {
  return std::all_of(values.begin(), values.end(), [](int32_t value) { return value == kUntouched; });
}

/// A dense table whose view is mostly true to its entries; `entries` keeps them.
PageTableView take_table(FuzzInput& input, Ints& entries) {
  entries = input.take_lengths(input.take<uint8_t>(), 64);
  PageTableView table;
  table.kind = input.take<uint8_t>() < 250 ? PageTableKind::kDense : PageTableKind::kCsr;
  table.indices = entries.data();
  table.num_indices = static_cast<int64_t>(entries.size());
  table.row_stride = input.take_length(16);
  table.first_column = input.take_length(2);
  table.num_rows = input.take_length(8);
  if (input.take<uint8_t>() > 250) table.row_stride = input.take<int64_t>();
  return table;
}

int32_t take_page_size(FuzzInput& input) {
  const auto kind = input.take<uint8_t>();
  return kind < 128 ? 1 : kind < 240 ? 1 + kind % 8 : input.take<int32_t>();
}

/// The slot that an accepted call read.
int32_t slot_at(const PageTableView& table, int32_t row, int64_t position) {
  const int64_t place = row * table.row_stride + table.first_column + position;
  FUZZ_CHECK(position >= 0 && place >= 0 && place < table.num_indices);
  return table.indices[place];
}

void check_kv_indices(FuzzInput& input) {
  Ints entries;
  KvIndicesArgs args;
  args.req_to_token = take_table(input, entries);
  const auto batch = static_cast<size_t>(input.take_between(0, 6));
  const Ints rows = input.take_lengths(batch, 7);
  const Ints lens = input.take_lengths(batch, 20);
  Ints starts;
  if (input.take<uint8_t>() % 2 == 0) starts = input.take_lengths(batch, 8);
  args.page_size = take_page_size(input);
  args.num_slots = input.take<uint8_t>() % 2 == 0 ? 0 : input.take_length(100);
  Ints indptr(batch + 1, kUntouched);
  if (input.take<uint8_t>() < 32) {
    indptr = input.take_lengths(batch + 1, 40);
  } else if (!accepted([&] { kv_indptr_from_lens(lens, args.page_size, indptr); })) {
    FUZZ_CHECK(untouched(indptr));
    return;
  }
  Ints out(
      static_cast<size_t>(std::clamp<int64_t>(indptr.back() + int64_t{input.take<int8_t>() / 32}, 0, kMostEntries)),
      kUntouched);
  args.req_pool_indices = rows;
  args.paged_kernel_lens = lens;
  args.kv_start_idx = starts;
  args.kv_indptr = indptr;
  if (!accepted([&] { create_kv_indices(args, out); })) {
    FUZZ_CHECK(untouched(out));
    return;
  }
  for (size_t r = 0; r < batch; ++r) {
    for (int32_t j = 0; j < lens[r]; j += args.page_size) {
      const int32_t slot = slot_at(args.req_to_token, rows[r], (starts.empty() ? 0 : starts[r]) + int64_t{j});
      FUZZ_CHECK(args.num_slots == 0 || (slot >= 0 && slot < args.num_slots));
      FUZZ_CHECK(out[static_cast<size_t>(indptr[r] + j / args.page_size)] == slot / args.page_size);
      if (j > lens[r] - args.page_size) break;  // the next j could overflow
    }
  }
}

void check_windows(FuzzInput& input) {
  const auto batch = static_cast<size_t>(input.take_between(0, 4));
  const Ints seq_lens = input.take_lengths(batch, 40);
  Ints prefix_lens;
  if (input.take<uint8_t>() % 2 == 0) prefix_lens = input.take_lengths(batch, 40);
  const int32_t window = input.take_length(16) - 1;
  const int32_t page_size = take_page_size(input);
  Ints lens(batch, kUntouched), starts(batch, kUntouched);
  if (!accepted([&] { window_kv_ranges(seq_lens, prefix_lens, window, page_size, lens, starts); })) {
    FUZZ_CHECK(untouched(lens) && untouched(starts));
    return;
  }
  for (size_t r = 0; r < batch; ++r) {
    const int64_t first_query = prefix_lens.empty() ? int64_t{seq_lens[r]} - 1 : prefix_lens[r];
    FUZZ_CHECK(starts[r] >= 0 && starts[r] % page_size == 0 && lens[r] >= 0 && starts[r] + lens[r] == seq_lens[r]);
    FUZZ_CHECK(window >= 0 ? starts[r] <= std::max<int64_t>(0, first_query - window) : starts[r] == 0);
  }
}

void check_draft(FuzzInput& input) {
  Ints entries;
  DraftKvIndicesArgs args;
  args.req_to_token = take_table(input, entries);
  const auto batch = static_cast<size_t>(input.take_between(0, 3));
  const Ints rows = input.take_lengths(batch, 7);
  const Ints lens = input.take_lengths(batch, 6);
  Ints starts;
  if (input.take<uint8_t>() % 4 == 0) starts = input.take_lengths(batch, 3);
  args.req_pool_indices = rows;
  args.paged_kernel_lens = lens;
  args.kv_start_idx = starts;
  args.branches = {input.take_length(3), input.take_length(3), take_page_size(input)};
  args.num_iterations = input.take_length(3);
  args.num_slots = input.take<uint8_t>() % 2 == 0 ? 0 : input.take_length(100);
  const int64_t indptr_stride = input.take_length(12), indices_stride = input.take_length(60);
  Ints indptr(input.take<uint8_t>() % 40, kUntouched), indices(input.take<uint8_t>(), kUntouched);
  if (!accepted([&] { generate_draft_decode_kv_indices(args, {indptr, indptr_stride, indices, indices_stride}); })) {
    FUZZ_CHECK(untouched(indptr) && untouched(indices));
    return;
  }
  const int32_t topk = args.branches.topk;
  for (int32_t t = 1; t <= args.num_iterations; ++t) {
    const int32_t* const offsets = indptr.data() + (t - 1) * indptr_stride;
    FUZZ_CHECK(offsets[0] == 0);
    for (size_t z = 0; z < batch * static_cast<size_t>(topk); ++z) {
      const size_t r = z / static_cast<size_t>(topk);
      FUZZ_CHECK(offsets[z + 1] - offsets[z] == lens[r] + t);
      for (int32_t j = 0; j < lens[r]; ++j) {
        const int64_t position = (starts.empty() ? 0 : starts[r]) + int64_t{j};
        FUZZ_CHECK(indices[static_cast<size_t>((t - 1) * indices_stride + offsets[z] + j)] ==
                   slot_at(args.req_to_token, rows[r], position));
      }
    }
  }
}

void check_tree(FuzzInput& input) {
  const DraftTreeShape shape{input.take_length(4), input.take_length(4), input.take_length(10)};
  const auto batch = static_cast<size_t>(input.take_between(0, 3));
  int64_t extensions = 0;
  if (!accepted([&] { extensions = draft_parent_list_len(shape); })) return;
  if (shape.draft_token_num > 64 || extensions > 64) return;
  const auto nodes = static_cast<size_t>(shape.draft_token_num);
  const auto take_longs = [&input](size_t count, int32_t usual) {
    const Ints values = input.take_lengths(count, usual);
    return std::vector<int64_t>(values.begin(), values.end());
  };
  const std::vector<int64_t> list = take_longs(batch * static_cast<size_t>(extensions), 20);
  std::vector<int64_t> selected = take_longs(batch * (nodes - 1), 30);
  for (size_t r = 0; r < batch; ++r) {
    const auto first = selected.begin() + static_cast<int64_t>(r * (nodes - 1));
    if (input.take<uint8_t>() % 8 != 0) std::sort(first, first + static_cast<int64_t>(nodes - 1));
  }
  Ints parents(batch * nodes, kUntouched);
  if (!accepted([&] { draft_tree_parents(list, selected, shape, parents); })) {
    FUZZ_CHECK(untouched(parents));
    parents = input.take_lengths(batch * nodes, 3);
    for (size_t r = 0; r < batch; ++r) parents[r * nodes] = -1;
  }
  const Ints seq_lens = input.take_lengths(batch, 30);
  Ints positions(parents.size(), kUntouched), index = positions, next_token = positions, next_sibling = positions;
  const bool is_forest =
      accepted([&] { draft_tree_links(parents, shape.draft_token_num, index, next_token, next_sibling); });
  if (!is_forest) FUZZ_CHECK(untouched(index) && untouched(next_token) && untouched(next_sibling));
  if (accepted([&] { draft_tree_positions(parents, seq_lens, positions); })) {
    FUZZ_CHECK(is_forest);
  } else {
    FUZZ_CHECK(untouched(positions));
  }
  for (int32_t form = 0; form < 5; ++form) {
    int64_t bytes = 0;
    if (!accepted([&] { bytes = tree_mask_bytes(static_cast<TreeMaskForm>(form), seq_lens, shape.draft_token_num); })) {
      continue;
    }
    if (bytes > kMostEntries) continue;
    std::vector<uint8_t> mask(static_cast<size_t>(bytes), 0xaa);
    int32_t window = -1;
    if (form == 0 || form == 3) {
      const int32_t keys = input.take_length(8);
      if (keys < 0) continue;
      window = keys - 1;
    }
    FUZZ_CHECK(is_forest == accepted([&] {
                 fill_tree_mask(static_cast<TreeMaskForm>(form), parents, seq_lens, shape.draft_token_num, mask,
                                window);
               }));
  }
}

void check_selection(FuzzInput& input) {
  const DraftTreeShape shape{input.take_length(3), input.take_length(3), input.take_length(6)};
  const auto batch = static_cast<size_t>(input.take_between(0, 2));
  int64_t candidates = 0;
  if (!accepted([&] { candidates = draft_candidates(shape); }) || candidates > 64 || shape.draft_token_num > 64) return;
  const auto count = static_cast<size_t>(candidates), nodes = static_cast<size_t>(shape.draft_token_num);
  std::vector<float> scores(batch * count);
  for (float& score : scores) {
    score = static_cast<float>(input.take<uint8_t>()) / 16.0f;
    if (score == 15.0f) score = input.take<float>();
  }
  const std::vector<int64_t> tokens(scores.size(), 1), bonus(batch, 2);
  std::vector<int64_t> selected(batch * (nodes - 1), kUntouched), draft(batch * nodes, kUntouched);
  if (!accepted([&] { select_draft_tokens(scores, tokens, bonus, shape, selected, draft); })) return;
  for (size_t r = 0; r < batch; ++r) {
    const int64_t* const mine = selected.data() + r * (nodes - 1);
    const float* const score = scores.data() + r * count;
    for (size_t c = 0; c < count; ++c) {
      if (std::binary_search(mine, mine + (nodes - 1), static_cast<int64_t>(c))) continue;
      for (size_t i = 0; i + 1 < nodes; ++i) FUZZ_CHECK(score[mine[i]] >= score[c]);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  switch (input.take<uint8_t>() % 5) {
    case 0: check_kv_indices(input); break;
    case 1: check_windows(input); break;
    case 2: check_draft(input); break;
    case 3: check_tree(input); break;
    default: check_selection(input);
  }
  return 0;
}
