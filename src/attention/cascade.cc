#include "folio/cascade.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "attention/cascade_levels.hpp"
#include "attention/op_state.hpp"
#include "core/error.hpp"
#include "folio/page_table.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0 {
namespace {

using attention::CascadeGroup;
using core::require;

void check_costs(const CascadeCosts& costs) {
  require(costs.tile_rows >= 1 && costs.tile_tokens >= 1, "the tile is ", costs.tile_rows, " rows by ",
          costs.tile_tokens, " tokens; both are 1 or more");
  require(costs.group_size >= 1, "group_size is ", costs.group_size, "; it is 1 or more");
  require(costs.page_size >= 1, "page_size is ", costs.page_size, "; it is 1 or more");
  require(costs.window_left >= -1, "window_left is ", costs.window_left, "; it is -1 (unbounded) or more");
  require(costs.kv_token_bytes >= 1 && costs.q_row_bytes >= 0 && costs.partial_row_bytes >= 0, "kv_token_bytes is ",
          costs.kv_token_bytes, ", q_row_bytes ", costs.q_row_bytes, " and partial_row_bytes ", costs.partial_row_bytes,
          "; the first is 1 or more, the others are not negative");
}

int32_t levels_offered(const AttentionOp& op, int32_t max_levels) {
  const auto& bounds = op.state().options.bounds;
  const int32_t offered = bounds ? std::min(max_levels, bounds->max_shared_levels) : max_levels;
  return op.state().gpu() != nullptr ? std::min(offered, kernels::cuda::kMaxSegments - 1) : offered;
}

}  // namespace

CascadeCosts cascade_costs(const AttentionOp& op) {
  const AttentionConfig& config = op.config();
  const scheduler::TileShape& tile = op.state().passes.front().scheduler.tile;
  CascadeCosts costs;
  costs.tile_rows = tile.rows;
  costs.tile_tokens = tile.kv_tokens;
  costs.group_size = config.num_q_heads / config.num_kv_heads;
  costs.page_size = config.page_size;
  costs.window_left = config.window_left;
  costs.kv_token_bytes = int64_t{config.head_dim_qk + config.head_dim_v} * size_of(config.kv);
  costs.q_row_bytes = int64_t{config.head_dim_qk} * size_of(config.q);
  // As workspaces hold it: the values, their maximum, their sum.
  costs.partial_row_bytes = (int64_t{config.head_dim_v} + 2) * static_cast<int64_t>(sizeof(float));
  costs.determinism = config.determinism;
  return costs;
}

struct CascadePlanner::State {
  /// One segment's arrays.
  struct Level {
    std::vector<int32_t> group_indptr, kv_len, first_pos, indptr;
  };

  void read(const CascadeBatch& batch);
  void check_place(const CascadeBatch& batch, Stream stream) const;
  void check_common(const CascadeBatch& batch, int32_t first, int32_t prefix_pages) const;
  const Cascade& emit(const CascadeBatch& batch, std::span<const CascadeGroup> groups, Stream stream);
  void emit_level(const CascadeBatch& batch, size_t level, std::span<const CascadeGroup> groups);
  void emit_empty(const CascadeBatch& batch, size_t level);
  void emit_own(const CascadeBatch& batch, size_t level);
  const Cascade& made(const CascadeBatch& batch, size_t count, Stream stream);
  void move_to_gpu(const CascadeBatch& batch, size_t count, Stream stream);
  void set_level(size_t level, const PageTableView& table);
  PageTableView rows_of(const PageTableView& table, const Level& level, int32_t num_rows) const;

  CascadeCosts costs;
  int32_t max_levels = 0;
  SharedPrefixFinder finder;
  attention::CascadeLevels choice;
  std::vector<int32_t> full_pages;      ///< [R] pages of tokens computed before this step
  std::vector<int64_t> row_begin;       ///< [R + 1] where each request's pages begin in table.indices
  std::vector<int32_t> own_first_page;  ///< [R] pages that lie in shared segments
  /// Whether an indptr can say where rows begin: one after the other (not so with a row stride of 0), in 32 bits.
  bool addressable = false;
  std::array<Level, kMaxCascadeLevels + 1> levels;
  std::array<KvSegment, kMaxCascadeLevels + 1> segments;
  std::array<PageTableView, kMaxCascadeLevels + 1> tables;
  Cascade cascade;

  std::optional<AttentionOp> gpu_op;
  size_t fixed_levels = 0;      ///< that every cascade has, for graphs
  size_t fixed_rows = 0;        ///< room of each table's starts there
  std::vector<int32_t> starts;  ///< where rows of the tables begin, one table after the other
  std::shared_ptr<void> starts_on_gpu;
  size_t starts_room = 0;
};

CascadePlanner::CascadePlanner(const CascadeCosts& costs, int32_t max_levels) : state_(std::make_unique<State>()) {
  check_costs(costs);
  require(max_levels >= 0 && max_levels <= kMaxCascadeLevels, "max_levels is ", max_levels, "; 0 to ",
          kMaxCascadeLevels, " are offered");
  state_->costs = costs;
  state_->max_levels = max_levels;
}

CascadePlanner::CascadePlanner(const AttentionOp& op, int32_t max_levels)
    : CascadePlanner(cascade_costs(op), max_levels) {
  State& state = *state_;
  state.max_levels = levels_offered(op, max_levels);
  const attention::GpuBackend* const gpu = op.state().gpu();
  if (gpu == nullptr) return;
  state.gpu_op = op;
  const auto& bounds = op.state().options.bounds;
  if (!bounds || state.max_levels == 0 || state.costs.determinism >= Determinism::kBatchInvariant) return;
  // All at once: graphs know the addresses.
  state.fixed_levels = static_cast<size_t>(state.max_levels);
  state.fixed_rows = static_cast<size_t>(bounds->max_requests) + 1;
  state.starts.resize((state.fixed_levels + 1) * state.fixed_rows);
  state.starts_room = state.starts.size();
  state.starts_on_gpu = gpu->allocate(state.starts_room * sizeof(int32_t));
}

CascadePlanner::CascadePlanner(CascadePlanner&&) noexcept = default;
CascadePlanner& CascadePlanner::operator=(CascadePlanner&&) noexcept = default;
CascadePlanner::~CascadePlanner() = default;

const CascadeCosts& CascadePlanner::costs() const noexcept {
  return state_->costs;
}
int32_t CascadePlanner::max_levels() const noexcept {
  return state_->max_levels;
}

void CascadePlanner::State::check_place(const CascadeBatch& batch, Stream stream) const {
  if (!gpu_op) {
    require(batch.device_indices == nullptr && stream.handle == nullptr,
            "device_indices or a stream is given; they are for planners of an op on a GPU");
    return;
  }
  require(batch.device_indices != nullptr || batch.table.num_indices == 0,
          "device_indices is null; the op's kernels read the table's entries in the GPU's memory");
  require(fixed_levels == 0 || static_cast<size_t>(batch.num_requests) < fixed_rows, "num_requests is ",
          batch.num_requests, "; the op was prepared for at most ", static_cast<uint64_t>(fixed_rows) - 1);
}

/// Checks the batch, and finds what may be shared of each request and where its pages lie.
void CascadePlanner::State::read(const CascadeBatch& batch) {
  require(batch.num_requests >= 0, "num_requests is ", batch.num_requests, "; it is 0 or more");
  require(batch.num_requests == 0 || (batch.cu_q != nullptr && batch.kv_len != nullptr),
          "cu_q or kv_len is null; they have num_requests + 1 and num_requests entries");
  kvcache::check_table(batch.table, batch.num_requests);
  const auto num_requests = static_cast<size_t>(batch.num_requests);
  full_pages.resize(num_requests);
  row_begin.resize(num_requests + 1);
  row_begin[0] = 0;
  addressable = true;
  for (size_t r = 0; r < num_requests; ++r) {
    const int32_t q_len = batch.cu_q[r + 1] - batch.cu_q[r];
    require(q_len >= 0 && batch.kv_len[r] >= 0, "request ", r, ": q_len is ", q_len, " and kv_len ", batch.kv_len[r],
            "; they are not negative");
    // More queries than keys is what some masks allow; such a request has nothing that was there before.
    full_pages[r] = q_len == 0 ? 0 : std::max(0, batch.kv_len[r] - q_len) / costs.page_size;
    const auto pages =
        kvcache::row_pages(batch.table, static_cast<int32_t>(r), pages_for(batch.kv_len[r], costs.page_size));
    if (!pages.empty()) {  // a request without keys may have no entry at all: it stands where the one before it ended
      const int64_t begin = pages.data() - batch.table.indices;
      addressable = addressable && begin >= row_begin[r];
      row_begin[r] = begin;
    }
    row_begin[r + 1] = row_begin[r] + static_cast<int64_t>(pages.size());
  }
  addressable = addressable && row_begin[num_requests] <= std::numeric_limits<int32_t>::max();
}

PageTableView CascadePlanner::State::rows_of(const PageTableView& table, const Level& level, int32_t num_rows) const {
  PageTableView view;
  view.kind = PageTableKind::kCsr;
  view.indices = table.indices;
  view.num_indices = table.num_indices;
  view.indptr = level.indptr.data();
  view.num_rows = num_rows;
  return view;
}

/// Rows of the segment that are groups; between groups, rows without keys.
void CascadePlanner::State::emit_level(const CascadeBatch& batch, size_t level, std::span<const CascadeGroup> groups) {
  Level& arrays = levels[level];
  arrays.group_indptr.clear();
  arrays.kv_len.clear();
  arrays.first_pos.clear();
  arrays.indptr.clear();
  const auto add_row = [&](int32_t request, int32_t first_page, int32_t end_page) {
    arrays.group_indptr.push_back(request);
    arrays.kv_len.push_back((end_page - first_page) * costs.page_size);
    arrays.first_pos.push_back(first_page * costs.page_size);
    arrays.indptr.push_back(static_cast<int32_t>(row_begin[static_cast<size_t>(request)]) + first_page);
  };
  for (size_t g = 0; g < groups.size(); ++g) {
    const CascadeGroup& group = groups[g];
    if (g > 0 && groups[g - 1].end < group.begin) add_row(groups[g - 1].end, 0, 0);
    add_row(group.begin, group.first_page, group.end_page);
  }
  const CascadeGroup& last = groups.back();
  arrays.group_indptr.push_back(last.end);
  arrays.indptr.push_back(static_cast<int32_t>(row_begin[static_cast<size_t>(last.begin)]) + last.end_page);

  set_level(level, batch.table);
}

/// One group of all requests, without keys: nothing is planned for it.
void CascadePlanner::State::emit_empty(const CascadeBatch& batch, size_t level) {
  Level& arrays = levels[level];
  arrays.group_indptr.assign({0, batch.num_requests});
  arrays.kv_len.assign(1, 0);
  arrays.first_pos.assign(1, 0);
  arrays.indptr.assign(2, 0);
  set_level(level, batch.table);
}

/// The segment of a level's arrays and its table.
void CascadePlanner::State::set_level(size_t level, const PageTableView& table) {
  const Level& arrays = levels[level];
  KvSegment& segment = segments[level];
  segment = {};
  segment.kv_len = arrays.kv_len.data();
  segment.first_pos = arrays.first_pos.data();
  segment.group_indptr = arrays.group_indptr.data();
  segment.num_groups = static_cast<int32_t>(arrays.kv_len.size());
  tables[level] = rows_of(table, arrays, segment.num_groups);
}

/// What is left of every request's keys.
void CascadePlanner::State::emit_own(const CascadeBatch& batch, size_t level) {
  Level& arrays = levels[level];
  const auto num_requests = static_cast<size_t>(batch.num_requests);
  arrays.kv_len.resize(num_requests);
  arrays.first_pos.resize(num_requests);
  arrays.indptr.resize(num_requests + 1);
  for (size_t r = 0; r < num_requests; ++r) {
    const int32_t first_pos = own_first_page[r] * costs.page_size;
    arrays.kv_len[r] = batch.kv_len[r] - first_pos;
    arrays.first_pos[r] = first_pos;
    arrays.indptr[r] = static_cast<int32_t>(row_begin[r]) + own_first_page[r];
  }
  arrays.indptr[num_requests] = static_cast<int32_t>(row_begin[num_requests]);

  KvSegment& segment = segments[level];
  segment = {};
  segment.kv_len = arrays.kv_len.data();
  segment.first_pos = arrays.first_pos.data();
  tables[level] = rows_of(batch.table, arrays, batch.num_requests);
}

/// The cascade of the first `count` segments, its tables where kernels read them.
const Cascade& CascadePlanner::State::made(const CascadeBatch& batch, size_t count, Stream stream) {
  if (gpu_op) move_to_gpu(batch, count, stream);
  cascade = {};
  cascade.segments = {segments.data(), count};
  cascade.tables = {tables.data(), count};
  return cascade;
}

void CascadePlanner::State::move_to_gpu(const CascadeBatch& batch, size_t count, Stream stream) {
  const attention::GpuBackend& gpu = *gpu_op->state().gpu();
  const bool fixed = fixed_levels > 0;
  if (!fixed) starts.clear();
  std::array<size_t, kMaxCascadeLevels + 1> begins{};
  for (size_t s = 0; s < count; ++s) {
    if (tables[s].kind == PageTableKind::kDense) continue;
    const size_t rows = static_cast<size_t>(tables[s].num_rows) + 1;
    begins[s] = fixed ? s * fixed_rows : starts.size();
    if (!fixed) starts.resize(starts.size() + rows);
    std::copy_n(tables[s].indptr, rows, starts.begin() + static_cast<std::ptrdiff_t>(begins[s]));
  }
  if (starts.size() > starts_room) {
    starts_room = 2 * starts.size();
    starts_on_gpu = gpu.allocate(starts_room * sizeof(int32_t));
  }
  if (!starts.empty()) gpu.upload(starts_on_gpu.get(), starts.data(), starts.size() * sizeof(int32_t), stream);
  for (size_t s = 0; s < count; ++s) {
    tables[s].indices = batch.device_indices;
    if (tables[s].kind == PageTableKind::kCsr) {
      tables[s].indptr = static_cast<const int32_t*>(starts_on_gpu.get()) + begins[s];
    }
  }
}

/// Without groups nothing is shared: the batch's own table, unless graphs count on a number of levels.
const Cascade& CascadePlanner::State::emit(const CascadeBatch& batch, std::span<const CascadeGroup> groups,
                                           Stream stream) {
  if (groups.empty() && fixed_levels == 0) {
    segments[0] = {};
    segments[0].kv_len = batch.kv_len;
    tables[0] = batch.table;
    return made(batch, 1, stream);
  }
  require(addressable,
          "the table's rows do not lie one after the other within 2^31 - 1 entries, as those of captured "
          "graphs must");
  own_first_page.assign(static_cast<size_t>(batch.num_requests), 0);
  size_t num_levels = 0;
  for (size_t begin = 0; begin < groups.size();) {
    size_t end = begin;
    for (; end < groups.size() && groups[end].level == groups[begin].level; ++end) {
      const CascadeGroup& group = groups[end];
      for (int32_t r = group.begin; r < group.end; ++r) {
        // Requests without tokens may stand among the others; they have nothing in common with them.
        if (full_pages[static_cast<size_t>(r)] > 0) own_first_page[static_cast<size_t>(r)] = group.end_page;
      }
    }
    emit_level(batch, num_levels++, groups.subspan(begin, end - begin));
    begin = end;
  }
  const size_t all_levels = std::max(num_levels, fixed_levels);
  for (size_t level = num_levels; level < all_levels; ++level) emit_empty(batch, level);
  emit_own(batch, all_levels);
  made(batch, all_levels + 1, stream);
  cascade.levels_shared = static_cast<int32_t>(num_levels);
  return cascade;
}

const Cascade& CascadePlanner::discover(const CascadeBatch& batch, Stream stream) {
  State& state = *state_;
  state.check_place(batch, stream);
  state.read(batch);
  if (state.costs.determinism >= Determinism::kBatchInvariant || state.max_levels == 0 || !state.addressable) {
    return state.emit(batch, {}, stream);
  }
  const auto prefixes = state.finder.find(batch.table, state.full_pages);
  state.emit(batch, state.choice.choose(state.costs, state.max_levels, batch, prefixes), stream);
  state.cascade.bytes_saved = state.choice.saved();
  return state.cascade;
}

void CascadePlanner::State::check_common(const CascadeBatch& batch, int32_t first, int32_t prefix_pages) const {
  const auto expected = kvcache::row_pages(batch.table, first, prefix_pages);
  for (int32_t r = first + 1; r < batch.num_requests; ++r) {
    if (batch.cu_q[r + 1] == batch.cu_q[r]) continue;
    const auto pages = kvcache::row_pages(batch.table, r, prefix_pages);
    const auto differing = std::mismatch(pages.begin(), pages.end(), expected.begin());
    require(differing.first == pages.end(), "request ", r, " has page ",
            differing.first == pages.end() ? 0 : *differing.first, " at column ", differing.first - pages.begin(),
            ", request ", first, " page ", differing.first == pages.end() ? 0 : *differing.second,
            ": they do not share a prefix of ", prefix_pages, " pages");
  }
}

const Cascade& CascadePlanner::share(const CascadeBatch& batch, int32_t prefix_tokens, Stream stream) {
  State& state = *state_;
  state.check_place(batch, stream);
  require(prefix_tokens >= 0, "prefix_tokens is ", prefix_tokens, "; it is 0 or more");
  state.read(batch);
  int32_t prefix_pages = prefix_tokens / state.costs.page_size;
  int32_t first = -1;
  int32_t sharers = 0;
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    if (batch.cu_q[r + 1] == batch.cu_q[r]) continue;
    if (first < 0) first = r;
    ++sharers;
    prefix_pages = std::min(prefix_pages, state.full_pages[static_cast<size_t>(r)]);
  }
  if (sharers < 2 || prefix_pages == 0) return state.emit(batch, {}, stream);
  const bool readable = batch.table.indices != batch.device_indices;
  if (readable) state.check_common(batch, first, prefix_pages);
  if (state.costs.determinism >= Determinism::kBatchInvariant || state.max_levels == 0 || !state.addressable) {
    return state.emit(batch, {}, stream);
  }
  const CascadeGroup everyone{
      .level = 0, .begin = first, .end = batch.num_requests, .first_page = 0, .end_page = prefix_pages};
  return state.emit(batch, {&everyone, 1}, stream);
}

}  // namespace folio::inline v0
