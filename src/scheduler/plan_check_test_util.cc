#include "scheduler/plan_check_test_util.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>

#include "scheduler/plan_digest_test_util.hpp"

namespace folio::inline v0::scheduler::testing {
namespace {

/// A result that is written somewhere: one finished accumulation, as the (segment, local token) pairs it visited.
struct Finished {
  int32_t kv_head;
  int32_t row_begin;
  int32_t row_end;
  std::vector<const WorkTile*> work_tiles;
};

class Checker {
 public:
  Checker(const SchedulerConfig& config, const OwnedBatch& batch, const PlanView& plan)
      : config_(config), batch_(batch), plan_(plan), group_size_(config.num_q_heads / config.num_kv_heads) {}

  std::string check() {
    for (size_t r = 0; r < batch_.q_len.size(); ++r) {
      for (int32_t i = 0; i < batch_.q_len[r] * group_size_; ++i) request_of_row_.push_back(static_cast<int32_t>(r));
    }
    check_work_tiles();
    check_merges();
    check_coverage();
    return problem_.str();
  }

 private:
  template <typename... Parts>
  void fail(const Parts&... splits) {
    if (problem_.tellp() > 2000) return;
    (problem_ << ... << splits) << '\n';
  }

  bool fixed() const { return config_.determinism >= Determinism::kBatchInvariant; }

  void check_work_tiles() {
    if (config_.tile.schedule == Schedule::kDynamic) {
      check_dynamic_tiles();
      return;
    }
    if (plan_.num_dynamic_tiles != 0) fail("a static schedule has dynamic tiles");
    if (plan_.worker_indptr[0] != 0 || plan_.worker_indptr[plan_.num_workers] != plan_.num_work_tiles) {
      fail("worker_indptr does not cover the work tiles");
      return;
    }
    for (int32_t w = 0; w < plan_.num_workers; ++w) {
      for (int32_t i = plan_.worker_indptr[w]; i < plan_.worker_indptr[w + 1]; ++i) {
        run_work_tile(i);
        const WorkTile& work_tile = plan_.work_tiles[i];
        if ((work_tile.flags & kFinish) == 0 && work_tile.partial != -1)
          fail("work tile ", i, ": a partial row without kFinish");
      }
      if (open_) fail("worker ", w, " ends within an accumulation");
      open_.reset();
    }
    if (static_cast<int32_t>(partials_.size()) != plan_.num_partial_rows) fail("some partial rows are never written");
  }

  /// Only dynamic tiles begin accumulations, every work tile belongs to exactly one, and a split's heads are
  /// neighbours.
  void check_dynamic_tiles() {
    if (plan_.worker_indptr != nullptr) fail("a dynamic schedule has worker lists");
    const std::vector<int32_t> order = running_order(plan_);
    if (order.size() != static_cast<size_t>(plan_.num_work_tiles)) {
      fail("the dynamic tiles lead to ", order.size(), " work tiles of ", plan_.num_work_tiles);
      return;
    }
    int32_t starts = 0;
    for (const int32_t i : order) {
      if (((plan_.work_tiles[i].flags & kStart) != 0) != (i < plan_.num_dynamic_tiles))
        fail("work tile ", i, " of the dynamic tiles: kStart");
      starts += i < plan_.num_dynamic_tiles ? 1 : 0;
      run_work_tile(i);
    }
    if (open_ || starts != plan_.num_dynamic_tiles) fail("a dynamic tile ends within an accumulation");
    check_neighbours();
    if (static_cast<int32_t>(partials_.size()) != plan_.num_partial_rows) fail("some partial rows are never written");
  }

  /// Dynamic tiles of the same rows and keys are neighbours: those of all heads, or of a swizzle group. Then come the
  /// dynamic tiles of the next group.
  void check_neighbours() {
    const int32_t heads = config_.num_kv_heads;
    if (plan_.num_dynamic_tiles % heads != 0) fail("heads have different numbers of dynamic tiles");
    int32_t together = 1;
    while (together < heads && together < plan_.num_dynamic_tiles && plan_.work_tiles[together].kv_head == together)
      ++together;
    if (config_.tile.order == TileOrder::kRequestOrder && plan_.num_dynamic_tiles > 0 && together != heads) {
      fail("dynamic tiles of only ", together, " heads are neighbours");
    }
    const int32_t a_head = plan_.num_dynamic_tiles / heads;
    for (int32_t first = 0; first < heads; first += together) {
      const int32_t here = std::min(together, heads - first);
      for (int32_t i = 0; i < a_head * here; ++i) {
        const WorkTile& work_tile = plan_.work_tiles[a_head * first + i];
        const WorkTile& same = plan_.work_tiles[i / here * together];
        if (work_tile.kv_head != first + i % here || work_tile.kv_begin != same.kv_begin ||
            work_tile.row_begin != same.row_begin || work_tile.segment != same.segment ||
            work_tile.kv_end != same.kv_end) {
          fail("dynamic tile ", a_head * first + i, " is no neighbour of the other heads' for the same keys");
        }
      }
    }
  }

  /// The next work tile of a worker.
  void run_work_tile(int32_t i) {
    const WorkTile& work_tile = plan_.work_tiles[i];
    check_work_tile_alone(i, work_tile);
    if (((work_tile.flags & kStart) != 0) == open_.has_value()) fail("work tile ", i, ": kStart is wrong");
    if ((work_tile.flags & kStart) != 0 || !open_)
      open_ = Finished{work_tile.kv_head, work_tile.row_begin, work_tile.row_end, {}};
    if (open_->kv_head != work_tile.kv_head || open_->row_begin != work_tile.row_begin ||
        open_->row_end != work_tile.row_end) {
      fail("work tile ", i, ": rows or head differ from those of its kStart");
    }
    open_->work_tiles.push_back(&work_tile);
    if ((work_tile.flags & kFinish) == 0) return;
    if (work_tile.partial < 0) {
      direct_.push_back(*open_);
    } else {
      for (int32_t row = work_tile.row_begin; row < work_tile.row_end; ++row) {
        const int32_t partial = work_tile.partial + row - work_tile.row_begin;
        if (partial >= plan_.num_partial_rows) fail("work tile ", i, ": partial row ", partial, " is out of range");
        if (!partials_.emplace(partial, std::pair{row, *open_}).second)
          fail("partial row ", partial, " is written twice");
      }
    }
    open_.reset();
  }

  void check_work_tile_alone(int32_t i, const WorkTile& work_tile) {
    const auto rows = static_cast<int32_t>(request_of_row_.size());
    if (work_tile.row_begin < 0 || work_tile.row_begin >= work_tile.row_end || work_tile.row_end > rows) {
      fail("work tile ", i, ": rows [", work_tile.row_begin, ", ", work_tile.row_end, ") of ", rows);
      return;
    }
    if (work_tile.row_end - work_tile.row_begin > config_.tile.rows) fail("work tile ", i, " has too many rows");
    if (work_tile.request != request_of_row_[static_cast<size_t>(work_tile.row_begin)])
      fail("work tile ", i, ": request is wrong");
    if (work_tile.kv_head < 0 || work_tile.kv_head >= config_.num_kv_heads) fail("work tile ", i, ": kv_head is wrong");
    if (work_tile.segment < 0 || work_tile.segment >= plan_.num_segments) fail("work tile ", i, ": segment is wrong");
    if (((work_tile.flags & kFold) != 0) != fixed()) fail("work tile ", i, ": kFold is wrong");
    check_merge_of(i, work_tile);
    if (work_tile.kv_begin == work_tile.kv_end) return;
    const SegmentLengths& segment = plan_.segments[work_tile.segment];
    if (work_tile.kv_row < 0 || work_tile.kv_row >= segment.num_rows) {
      fail("work tile ", i, ": kv_row is wrong");
      return;
    }
    if (work_tile.kv_begin < 0 || work_tile.kv_begin > work_tile.kv_end ||
        work_tile.kv_end > segment.kv_len[work_tile.kv_row]) {
      fail("work tile ", i, ": keys [", work_tile.kv_begin, ", ", work_tile.kv_end, ") of ",
           segment.kv_len[work_tile.kv_row]);
    }
    if (fixed()) {
      const int32_t split = config_.fixed_split_tokens;
      if (work_tile.kv_begin / split != (work_tile.kv_end - 1) / split)
        fail("work tile ", i, " spans two fixed splits");
      if (work_tile.kv_begin % config_.tile.kv_tokens != 0) fail("work tile ", i, " does not begin at a tile");
    }
  }

  /// A work tile of a list that finishes a partial result names its combine tile.
  void check_merge_of(int32_t i, const WorkTile& work_tile) {
    const bool known = config_.tile.schedule == Schedule::kStatic && !shares() && (work_tile.flags & kFinish) != 0 &&
                       work_tile.partial >= 0;
    if (!known) {
      if (work_tile.combine_tile != -1) fail("work tile ", i, " names combine tile ", work_tile.combine_tile);
      return;
    }
    if (work_tile.combine_tile < 0 || work_tile.combine_tile >= plan_.num_combine_tiles ||
        work_tile.combine_tile >= plan_.num_workers) {
      fail("work tile ", i, " names combine tile ", work_tile.combine_tile, " of ", plan_.num_combine_tiles);
      return;
    }
    const CombineTile& combine_tile = plan_.combine_tiles[work_tile.combine_tile];
    const int32_t* const begin = plan_.combine_sources + combine_tile.source_begin;
    const int32_t* const end = plan_.combine_sources + combine_tile.source_end;
    if (std::count(begin, end, work_tile.partial) != 1 || combine_tile.row_begin != work_tile.row_begin ||
        combine_tile.row_end != work_tile.row_end || combine_tile.kv_head != work_tile.kv_head) {
      fail("work tile ", i, " is no source of combine tile ", work_tile.combine_tile);
    }
  }

  void check_merges() {
    std::set<int32_t> used;
    for (int32_t m = 0; m < plan_.num_combine_tiles; ++m) {
      const CombineTile& combine_tile = plan_.combine_tiles[m];
      if (combine_tile.row_begin >= combine_tile.row_end ||
          combine_tile.row_end - combine_tile.row_begin > config_.tile.rows) {
        fail("combine tile ", m, ": rows [", combine_tile.row_begin, ", ", combine_tile.row_end, ")");
        continue;
      }
      if (combine_tile.source_begin >= combine_tile.source_end) fail("combine tile ", m, " has no sources");
      if (!shares() && combine_tile.source_begin + 1 == combine_tile.source_end)
        fail("combine tile ", m, " is of one result alone");
      for (int32_t row = combine_tile.row_begin; row < combine_tile.row_end; ++row) {
        if (request_of_row_[static_cast<size_t>(row)] != combine_tile.request)
          fail("combine tile ", m, ": request of row ", row, " is wrong");
        auto& splits = splits_[{combine_tile.kv_head, row}];
        if (!splits.empty()) fail("row ", row, " of head ", combine_tile.kv_head, " is combined twice");
        for (int32_t i = combine_tile.source_begin; i < combine_tile.source_end; ++i) {
          const int32_t partial = plan_.combine_sources[i] + row - combine_tile.row_begin;
          const auto found = partials_.find(partial);
          if (found == partials_.end()) {
            fail("combine tile ", m, ": source ", partial, " is written by nobody");
            continue;
          }
          if (!used.insert(partial).second) fail("partial row ", partial, " is used twice");
          const auto& [partial_row, finished] = found->second;
          if (partial_row != row || finished.kv_head != combine_tile.kv_head) {
            fail("combine tile ", m, ": source ", partial, " is of row ", partial_row, " head ", finished.kv_head);
          }
          splits.push_back(&finished);
        }
        check_order(m, splits);
      }
    }
    if (used.size() != partials_.size()) fail("some partial rows are used by no combine tile");
  }

  bool shares() const {
    // Shared segments without keys count at fixed splits alone.
    return std::any_of(plan_.segments, plan_.segments + plan_.num_segments, [this](const auto& s) {
      return s.shared && (fixed() || std::any_of(s.kv_len, s.kv_len + s.num_rows, [](int32_t len) { return len > 0; }));
    });
  }

  /// Sources follow the keys: shared segments in order, then the request's own segments in order, each from its first
  /// key.
  void check_order(int32_t m, const std::vector<const Finished*>& splits) {
    std::tuple<bool, int32_t, int32_t> previous{false, -1, 0};
    for (const Finished* split : splits) {
      for (const WorkTile* work_tile : split->work_tiles) {
        if (work_tile->kv_begin == work_tile->kv_end) continue;
        const std::tuple<bool, int32_t, int32_t> here{!plan_.segments[work_tile->segment].shared, work_tile->segment,
                                                      work_tile->kv_begin};
        if (here < previous) fail("combine tile ", m, ": sources are out of order");
        previous = {std::get<0>(here), work_tile->segment, work_tile->kv_end};
      }
    }
  }

  /// Whether a request is this plan's: one of as many rows as the config says, or all of them, where they share.
  bool takes(size_t request) const {
    int32_t tokens = batch_.q_len[request];
    if (shares() && fixed()) return config_.max_rows == INT32_MAX;
    if (shares()) tokens = *std::max_element(batch_.q_len.begin(), batch_.q_len.end());
    return tokens * group_size_ >= config_.min_rows && tokens * group_size_ <= config_.max_rows;
  }

  /// Row of a segment that a request reads, by the definition.
  int32_t row_of(const OwnedSegment& segment, int32_t request) const {
    if (segment.group_indptr.empty()) return request;
    for (size_t g = 0; g + 1 < segment.group_indptr.size(); ++g) {
      if (segment.group_indptr[g] <= request && request < segment.group_indptr[g + 1]) return static_cast<int32_t>(g);
    }
    return -1;
  }

  int64_t position(int32_t request, int32_t row) const {
    int32_t first_token = 0;
    for (int32_t r = 0; r < request; ++r) first_token += batch_.q_len[static_cast<size_t>(r)];
    const int64_t index = row / group_size_ - first_token;
    if (!batch_.q_first_pos.empty()) return batch_.q_first_pos[static_cast<size_t>(request)] + index;
    return key_span(batch_.segments.size() - 1, request).second - batch_.q_len[static_cast<size_t>(request)] + index;
  }

  /// Positions at which a request's keys in segment `s` begin, or would, and end.
  std::pair<int64_t, int64_t> key_span(size_t s, int32_t request) const {
    std::pair<int64_t, int64_t> span{0, 0};
    for (size_t i = 0; i <= s; ++i) {
      const OwnedSegment& segment = batch_.segments[i];
      const int32_t kv_row = row_of(segment, request);
      if (kv_row < 0) continue;
      const auto row = static_cast<size_t>(kv_row);
      span.first = segment.first_pos.empty() ? span.second : segment.first_pos[row];
      span.second = span.first + segment.kv_len[row];
    }
    return span;
  }

  /// By the definition, one rule after the other; keys between the mask's and the span's apart.
  bool is_visible(const OwnedSegment& segment, int32_t request, int32_t row, int64_t query, int64_t key) const {
    if (segment.mask == SegmentMask::kAllVisible) return true;
    const auto r = static_cast<size_t>(request);
    const int64_t start = batch_.kv_start.empty() ? 0 : batch_.kv_start[r];
    if (!batch_.kv_start.empty() && key < start) return false;
    if (config_.attention_chunk > 0) {
      // The query's chunk begins at the last multiple that is not beyond it.
      int64_t chunk = start;
      while (chunk > query) chunk -= config_.attention_chunk;
      while (chunk + config_.attention_chunk <= query) chunk += config_.attention_chunk;
      if (key < chunk || key >= chunk + config_.attention_chunk) return false;
    }
    if (config_.window_right >= 0 && key > query + config_.window_right) return false;
    if (!batch_.spans.empty()) {
      const size_t at = 2 * static_cast<size_t>(row / group_size_);
      const bool near = config_.span_window_left < 0 || key >= query - config_.span_window_left;
      if (near && key >= batch_.spans[at] && key < batch_.spans[at + 1]) return true;
    }
    if (config_.window_left >= 0 && key < query - config_.window_left) return false;
    const bool lifted = !batch_.causal.empty() && batch_.causal[r] == 0;
    return config_.mask != MaskKind::kCausal || lifted || key <= query;
  }

  void check_coverage() {
    for (const Finished& finished : direct_) {
      for (int32_t row = finished.row_begin; row < finished.row_end; ++row) {
        auto& splits = splits_[{finished.kv_head, row}];
        if (!splits.empty()) fail("row ", row, " of head ", finished.kv_head, " is written twice");
        splits.push_back(&finished);
      }
    }
    int64_t rows = 0;
    for (size_t r = 0; r < batch_.q_len.size(); ++r) rows += takes(r) ? batch_.q_len[r] * group_size_ : 0;
    if (static_cast<int64_t>(splits_.size()) != rows * config_.num_kv_heads) {
      fail(splits_.size(), " (row, head) pairs are written of ", rows * config_.num_kv_heads);
    }
    for (const auto& [key, splits] : splits_) {
      const int32_t request = request_of_row_[static_cast<size_t>(key.second)];
      if (!takes(static_cast<size_t>(request))) fail("request ", request, " is another plan's");
    }
    std::map<const WorkTile*, bool> empty_needed;  // of work tiles without keys, whether any row has no other
    for (const auto& [key, splits] : splits_) {
      check_keys_of_row(key.first, key.second, splits);
      const bool nothing_visible = std::all_of(splits.begin(), splits.end(), is_empty);
      for (const Finished* split : splits) {
        if (is_empty(split)) empty_needed[split->work_tiles[0]] |= nothing_visible;
      }
    }
    for (const auto& [work_tile, needed] : empty_needed) {
      if (!needed)
        fail("rows [", work_tile->row_begin, ", ", work_tile->row_end,
             ") have an empty work tile that none of them needs");
    }
  }

  static bool is_empty(const Finished* split) { return split->work_tiles[0]->kv_begin == split->work_tiles[0]->kv_end; }

  void check_keys_of_row(int32_t head, int32_t row, const std::vector<const Finished*>& splits) {
    const int32_t request = request_of_row_[static_cast<size_t>(row)];
    const int64_t query = position(request, row);
    for (size_t s = 0; s < batch_.segments.size(); ++s) {
      const OwnedSegment& segment = batch_.segments[s];
      const int32_t kv_row = row_of(segment, request);
      const int32_t kv_len = kv_row < 0 ? 0 : segment.kv_len[static_cast<size_t>(kv_row)];
      std::vector<int32_t> visits(static_cast<size_t>(kv_len));
      for (const Finished* split : splits) {
        for (const WorkTile* work_tile : split->work_tiles) {
          if (work_tile->segment != static_cast<int32_t>(s) || work_tile->kv_begin == work_tile->kv_end) continue;
          if (work_tile->kv_row != kv_row) fail("row ", row, " visits row ", work_tile->kv_row, " of segment ", s);
          for (int32_t j = work_tile->kv_begin; j < std::min(work_tile->kv_end, kv_len); ++j)
            ++visits[static_cast<size_t>(j)];
        }
      }
      int64_t offset = -1;
      for (int32_t j = 0; j < kv_len; ++j) {
        do ++offset;
        while ((offset / segment.shard.interleave) % segment.shard.world != segment.shard.rank);
        const int64_t key = offset + key_span(s, request).first;
        const int32_t visited = visits[static_cast<size_t>(j)];
        if (visited > 1 || (visited == 0 && is_visible(segment, request, row, query, key))) {
          fail("row ", row, " (request ", request, ", position ", query, "), head ", head, " visits token ", j,
               " (position ", key, ") of segment ", s, " ", visited, " times");
        }
      }
    }
  }

  const SchedulerConfig& config_;
  const OwnedBatch& batch_;
  const PlanView& plan_;
  const int32_t group_size_;
  std::vector<int32_t> request_of_row_;
  std::optional<Finished> open_;  ///< the accumulation that the last work tile has not finished
  std::vector<Finished> direct_;
  std::map<int32_t, std::pair<int32_t, Finished>> partials_;                    ///< partial row -> packed row, content
  std::map<std::pair<int32_t, int32_t>, std::vector<const Finished*>> splits_;  ///< (head, row) -> what is folded
  std::ostringstream problem_;
};

}  // namespace

std::string check_plan(const SchedulerConfig& config, const OwnedBatch& batch, const PlanView& plan) {
  return Checker(config, batch, plan).check();
}

}  // namespace folio::inline v0::scheduler::testing
