// Shared prefixes found in arbitrary tables, and merges of arbitrary states. A cascade that is planned must name every
// request's keys, each once and in order; a merge must be the formula in float64; what is refused writes nothing.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "calls.hpp"
#include "folio/cascade.hpp"
#include "folio/merge.hpp"
#include "folio/page_table.hpp"
#include "values.hpp"

namespace {

using folio::DType;
using Ints = std::vector<int32_t>;

constexpr float kUntouched = -12345.0f;

const folio::Context& shared_context() {
  static const folio::Context context = folio::Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  return context;
}

int32_t take_usual(FuzzInput& input, int32_t low, int32_t high) {
  const auto kind = input.take<uint8_t>();
  return kind < 250 ? low + kind % (high - low + 1) : input.take<int32_t>();
}

/// The pages that a row of a table names for `tokens` of its keys, which may be near 2^31.
Ints pages_of(const folio::PageTableView& table, int32_t row, int32_t tokens, int32_t page_size) {
  const int64_t pages = (int64_t{tokens} + page_size - 1) / page_size;
  const int64_t first =
      table.kind == folio::PageTableKind::kCsr ? table.indptr[row] : row * table.row_stride + table.first_column;
  FUZZ_CHECK(first >= 0 && first + pages <= table.num_indices);
  return {table.indices + first, table.indices + first + pages};
}

/// A request's pages, segment after segment, are those that its own row names.
void check_keys(const folio::Cascade& cascade, const folio::CascadeBatch& batch, int32_t page_size) {
  FUZZ_CHECK(!cascade.segments.empty() && cascade.segments.size() == cascade.tables.size());
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const int32_t len = batch.kv_len[r];
    if (batch.cu_q[r + 1] == batch.cu_q[r]) continue;  // what padding reads is nobody's business
    Ints pages;
    int64_t before = 0;
    for (size_t s = 0; s < cascade.segments.size(); ++s) {
      const folio::KvSegment& segment = cascade.segments[s];
      int32_t row = r;
      if (segment.group_indptr != nullptr) {
        const int32_t* const end = segment.group_indptr + segment.num_groups + 1;
        row = static_cast<int32_t>(std::upper_bound(segment.group_indptr, end, r) - segment.group_indptr) - 1;
        if (row < 0 || row >= segment.num_groups) continue;  // in a gap: it shares nothing here
      }
      const int32_t here = segment.kv_len[row];
      if (here == 0) continue;
      if (segment.first_pos != nullptr) FUZZ_CHECK(segment.first_pos[row] == before);
      FUZZ_CHECK(before % page_size == 0);
      const Ints mine = pages_of(cascade.tables[s], row, here, page_size);
      pages.insert(pages.end(), mine.begin(), mine.end());
      before += here;
    }
    FUZZ_CHECK(before == len && pages == pages_of(batch.table, r, len, page_size));
  }
}

void check_cascade(FuzzInput& input) {
  folio::CascadeCosts costs;
  costs.tile_rows = take_usual(input, 1, 16);
  costs.tile_tokens = take_usual(input, 1, 16);
  costs.group_size = take_usual(input, 1, 4);
  costs.page_size = take_usual(input, 1, 3);
  costs.window_left = input.take<uint8_t>() % 4 == 0 ? take_usual(input, 0, 12) : -1;
  costs.kv_token_bytes = take_usual(input, 64, 256);
  costs.q_row_bytes = take_usual(input, 0, 4);
  costs.partial_row_bytes = take_usual(input, 0, 4);
  costs.determinism = static_cast<folio::Determinism>(take_usual(input, 0, 3));
  const int32_t max_levels = take_usual(input, 0, folio::kMaxCascadeLevels);
  std::optional<folio::CascadePlanner> planner;
  if (!accepted([&] { planner.emplace(costs, max_levels); })) return;
  for (int calls = input.take_between(1, 3); calls > 0; --calls) {
    folio::CascadeBatch batch;
    batch.num_requests = input.take_between(0, 6);
    const auto count = static_cast<size_t>(batch.num_requests);
    Ints cu_q = {0}, lens, entries, indptr = {0};
    for (size_t r = 0; r < count; ++r) {
      const int32_t q_len = input.take<uint8_t>() % 8 == 0 ? input.take_between(0, 3) : 1;
      cu_q.push_back(cu_q.back() + q_len);
      lens.push_back(input.take<uint8_t>() < 250 ? q_len + input.take_between(0, 20) : input.take_length(30));
    }
    if (input.take<uint8_t>() > 250) cu_q[input.take<uint8_t>() % cu_q.size()] = input.take_length(8);
    batch.cu_q = cu_q.data();
    batch.kv_len = lens.data();
    const bool dense = input.take<uint8_t>() % 2 == 0;
    const int32_t columns = 24;
    for (size_t r = 0; r < count; ++r) {
      const auto begin = entries.size();
      const int32_t own = dense ? columns : static_cast<int32_t>(std::clamp(lens[r], 0, 64));
      const auto common = static_cast<size_t>(input.take<uint8_t>() % columns);  // with the request before
      for (size_t i = 0; i < static_cast<size_t>(own); ++i) {
        const bool same = r > 0 && i < common && begin >= static_cast<size_t>(columns) && dense;
        const bool same_csr = r > 0 && !dense && i < common && static_cast<size_t>(indptr[r - 1]) + i < begin;
        entries.push_back(same       ? entries[begin - static_cast<size_t>(columns) + i]
                          : same_csr ? entries[static_cast<size_t>(indptr[r - 1]) + i]
                                     : take_usual(input, 0, 100));
      }
      indptr.push_back(static_cast<int32_t>(entries.size()));
    }
    if (!accepted([&] {
          batch.table = dense ? folio::dense_table(entries, batch.num_requests, columns, take_usual(input, 0, 1))
                              : folio::csr_table(entries, indptr);
        })) {
      continue;
    }
    if (input.take<uint8_t>() > 250) batch.table.num_rows = input.take_length(6);
    const bool share = input.take<uint8_t>() % 2 == 0;
    const int32_t prefix = take_usual(input, 0, 20);
    const folio::Cascade* cascade = nullptr;
    if (!accepted([&] { cascade = share ? &planner->share(batch, prefix) : &planner->discover(batch); })) continue;
    FUZZ_CHECK(cascade->num_levels() <= std::max(share ? 1 : 0, planner->max_levels()));
    if (costs.determinism >= folio::Determinism::kBatchInvariant) FUZZ_CHECK(cascade->num_levels() == 0);
    check_keys(*cascade, batch, costs.page_size);
  }
}

/// States of `tokens` rows: [tokens, states, heads, dim] and [tokens, states, heads].
struct States {
  States(FuzzInput& input, int64_t rows, int64_t width, int64_t values_each) {
    for (int64_t i = 0; i < rows * width; ++i) {
      const auto kind = input.take<uint8_t>();
      constexpr float kInfinity = std::numeric_limits<float>::infinity();
      lse.push_back(kind < 220   ? static_cast<float>(kind) / 16.0f - 6.0f
                    : kind < 235 ? -kInfinity
                    : kind < 240 ? kInfinity
                                 : std::numeric_limits<float>::quiet_NaN());
      for (int64_t d = 0; d < values_each; ++d)
        out.push_back(value_of(kind, static_cast<uint32_t>(i), static_cast<uint32_t>(d)));
    }
  }
  std::vector<float> out, lse;
};

/// One row of states folded in order: out, log-sum-exp in base e.
struct Folded {
  double total = 0.0, largest = -std::numeric_limits<double>::infinity();
  bool is_nan = false;
  std::vector<double> out;
  void add(float lse, double to_base_e, const float* values, size_t dim) {
    out.resize(dim, 0.0);
    is_nan = is_nan || std::isnan(lse);
    if (!std::isfinite(lse)) return;
    const double here = static_cast<double>(lse) * to_base_e, most = std::max(here, largest);
    const double keep = total == 0.0 ? 0.0 : std::exp(largest - most), weight = std::exp(here - most);
    total = total * keep + weight;
    for (size_t d = 0; d < dim; ++d) out[d] = out[d] * keep + weight * static_cast<double>(values[d]);
    largest = most;
  }
  bool agrees(const float* got, float lse, double to_base_e) const {
    if (is_nan) return std::isnan(lse);
    if (total == 0.0) {
      return lse == -std::numeric_limits<float>::infinity() &&
             std::all_of(got, got + out.size(), [](float x) { return x == 0.0f; });
    }
    if (!near(lse, (largest + std::log(total)) / to_base_e)) return false;
    for (size_t d = 0; d < out.size(); ++d) {
      if (!near(got[d], out[d] / total)) return false;
    }
    return true;
  }
};

void check_merges(FuzzInput& input) {
  const int64_t tokens = input.take_between(0, 3), heads = input.take_between(1, 3), dim = input.take_between(1, 9);
  const int64_t count = input.take_between(1, 4);
  const auto base = static_cast<folio::LseBase>(input.take<uint8_t>() < 252 ? input.take<uint8_t>() % 2 : 7);
  const double to_base_e = base == folio::LseBase::k2 ? M_LN2 : 1.0;
  const bool many = input.take<uint8_t>() % 2 == 0;
  const States states(input, tokens, many ? count * heads : heads, dim), other(input, many ? 0 : tokens, heads, dim);
  const auto rows = static_cast<size_t>(tokens * heads);
  std::vector<float> out(rows * static_cast<size_t>(dim), kUntouched), lse(rows, kUntouched);
  const int64_t wrong = input.take<uint8_t>() > 245 ? 1 : 0;
  folio::TensorView result(out.data(), DType::kFloat32, {tokens, heads, dim});
  if (wrong != 0) --result.shape[input.take<uint8_t>() % 3];
  const folio::LseView result_lse = {lse.data(), heads, 1, base};
  std::vector<uint8_t> mask;
  std::vector<float> a_out = states.out, a_lse = states.lse;
  const bool in_place = !many && input.take<uint8_t>() % 2 == 0;
  for (int64_t t = 0; in_place && t < tokens; ++t) mask.push_back(input.take<uint8_t>() % 3);
  const bool done = accepted([&] {
    if (many) {
      folio::AttentionStatesView view;
      view.out = {states.out.data(), DType::kFloat32, {tokens, count, heads, dim}};
      view.lse = states.lse.data();
      view.lse_token_stride = count * heads;
      view.lse_state_stride = heads;
      view.lse_head_stride = 1;
      view.base = base;
      folio::merge_states(shared_context(), view, result, result_lse);
      return;
    }
    folio::AttentionStateView b = {
        {other.out.data(), DType::kFloat32, {tokens, heads, dim}}, other.lse.data(), heads, 1, base};
    if (in_place) {
      folio::TensorView mine(a_out.data(), DType::kFloat32, {tokens, heads, dim});
      mine.shape = result.shape;
      folio::merge_state_in_place(shared_context(), mine, {a_lse.data(), heads, 1, base}, b, mask.data());
      return;
    }
    const folio::AttentionStateView a = {
        {states.out.data(), DType::kFloat32, {tokens, heads, dim}}, states.lse.data(), heads, 1, base};
    folio::merge_state(shared_context(), a, b, result, result_lse);
  });
  if (!done) {
    const auto untouched = [](const std::vector<float>& values) {
      return std::all_of(values.begin(), values.end(), [](float x) { return x == kUntouched; });
    };
    FUZZ_CHECK(untouched(out) && untouched(lse) && a_out == states.out);
    return;
  }
  const std::vector<float>& got = in_place ? a_out : out;
  const std::vector<float>& got_lse = in_place ? a_lse : lse;
  const auto width = static_cast<size_t>(dim);
  for (size_t row = 0; row < rows; ++row) {
    const size_t t = row / static_cast<size_t>(heads), h = row % static_cast<size_t>(heads);
    if (in_place && mask[t] == 0) {
      FUZZ_CHECK(std::equal(got.begin() + static_cast<std::ptrdiff_t>(row * width),
                            got.begin() + static_cast<std::ptrdiff_t>((row + 1) * width),
                            states.out.begin() + static_cast<std::ptrdiff_t>(row * width)));
      continue;
    }
    Folded folded;
    for (size_t s = 0; s < (many ? static_cast<size_t>(count) : 1); ++s) {
      const size_t at = many ? (t * static_cast<size_t>(count) + s) * static_cast<size_t>(heads) + h : row;
      folded.add(states.lse[at], to_base_e, states.out.data() + at * width, width);
    }
    if (!many) folded.add(other.lse[row], to_base_e, other.out.data() + row * width, width);
    FUZZ_CHECK(folded.agrees(got.data() + row * width, got_lse[row], to_base_e));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  if (input.take<uint8_t>() % 2 == 0) {
    check_cascade(input);
  } else {
    check_merges(input);
  }
  return 0;
}
