#include "scheduler/plan_test_util.hpp"

#include <utility>

#include "core/error.hpp"

namespace folio::inline v0::scheduler::testing {
namespace {

class RandomCase {
 public:
  explicit RandomCase(std::mt19937& random) : random_(random) {}

  Case make() {
    make_config();
    make_queries();
    make_segments();
    make_mask();
    if (chance(30)) make_rules();
    return case_;
  }

 private:
  int32_t pick(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(random_); }
  bool chance(int32_t percent) { return pick(1, 100) <= percent; }

  void make_config() {
    SchedulerConfig& config = case_.config;
    config.num_kv_heads = pick(1, 3);
    config.num_q_heads = config.num_kv_heads * pick(1, 4);
    config.page_size = 4;
    config.mask = static_cast<MaskKind>(pick(0, 2));
    if (chance(40)) config.window_left = pick(0, 12);
    if (chance(30)) config.window_right = pick(0, 12);
    config.determinism = static_cast<Determinism>(pick(0, 3));
    config.tile = {.rows = pick(1, 9), .kv_tokens = pick(1, 6)};
    config.num_workers = pick(1, 7);
    config.fixed_split_tokens = config.tile.kv_tokens * pick(1, 4);
    config.tile_cost = pick(0, 8);
    config.row_cost = pick(config.tile_cost == 0 ? 1 : 0, 2);
    if (chance(40)) config.start_row_cost = pick(0, 5);
    if (chance(50)) config.start_free_rows = pick(0, 4);
  }

  void make_queries() {
    const int32_t requests = pick(0, 6);
    const int32_t longest = chance(40) ? 1 : 9;
    for (int32_t r = 0; r < requests; ++r) case_.batch.q_len.push_back(chance(15) ? 0 : pick(1, longest));
    case_.batch.padding_tokens = chance(30) ? pick(1, 5) : 0;
    requests_ = requests;
  }

  void make_segments() {
    const int32_t count = pick(1, 3);
    const int32_t longest = chance(20) ? 90 : 25;
    bool sharded = false;
    bool after_shard = false;
    for (int32_t s = 0; s < count; ++s) {
      OwnedSegment segment;
      segment.source = chance(30) ? KvSource::kRagged : KvSource::kPaged;
      if (chance(20)) segment.mask = SegmentMask::kAllVisible;
      if (chance(20)) {
        segment.shard = {.world = pick(2, 3), .rank = 0, .interleave = pick(1, 4)};
        segment.shard.rank = pick(0, segment.shard.world - 1);
        sharded = true;
      }
      int32_t rows = requests_;
      if (chance(35)) {
        segment.group_indptr.push_back(chance(50) ? 0 : pick(0, requests_));
        while (segment.group_indptr.back() < requests_ && chance(85)) {
          segment.group_indptr.push_back(pick(segment.group_indptr.back(), requests_));
        }
        rows = static_cast<int32_t>(segment.group_indptr.size()) - 1;
      }
      for (int32_t row = 0; row < rows; ++row) segment.kv_len.push_back(chance(15) ? 0 : pick(1, longest));
      // Behind a shard, and for groups whose requests differ, positions cannot be left out.
      if (chance(50) || (s > 0 && (after_shard || !segment.group_indptr.empty()))) {
        for (int32_t row = 0; row < rows; ++row) segment.first_pos.push_back(pick(0, 30));
      }
      after_shard = after_shard || segment.shard.world > 1;
      case_.batch.segments.push_back(segment);
    }
    if (sharded || chance(40)) {
      for (int32_t r = 0; r < requests_; ++r) case_.batch.q_first_pos.push_back(pick(-4, 60));
    }
  }

  void make_mask() {
    if (case_.config.mask != MaskKind::kCustom || chance(50)) return;
    case_.batch.scope = CustomMaskScope::kTail;
    for (int32_t r = 0; r < requests_; ++r) {
      int32_t keys = 0;
      for (const OwnedSegment& segment : case_.batch.segments) {
        if (segment.group_indptr.empty()) {
          keys += segment.kv_len[static_cast<size_t>(r)];
          continue;
        }
        for (size_t g = 0; g + 1 < segment.group_indptr.size(); ++g) {
          if (segment.group_indptr[g] <= r && r < segment.group_indptr[g + 1]) keys += segment.kv_len[g];
        }
      }
      case_.batch.tail_len.push_back(pick(0, keys));
    }
  }

  /// Masks as rules, each by itself or together.
  void make_rules() {
    SchedulerConfig& config = case_.config;
    if (chance(50)) config.attention_chunk = pick(1, 20);
    if (chance(50)) {
      config.features = config.features | Feature::kKvStart;
      for (int32_t r = 0; r < requests_; ++r) case_.batch.kv_start.push_back(pick(-3, 40));
    }
    if (config.mask != MaskKind::kCausal) return;
    if (chance(50)) {
      config.features = config.features | Feature::kRequestCausal;
      for (int32_t r = 0; r < requests_; ++r) case_.batch.causal.push_back(chance(50) ? 1 : 0);
    }
    if (chance(30)) return;
    config.features = config.features | Feature::kSpans;
    config.span_window_left = chance(50) ? -1 : pick(0, 12);
    for (const int32_t length : case_.batch.q_len) {
      for (int32_t i = 0; i < length; ++i) {
        const int32_t begin = pick(-3, 60);
        case_.batch.spans.push_back(begin);
        case_.batch.spans.push_back(begin + pick(-2, 25));
      }
    }
  }

  std::mt19937& random_;
  Case case_;
  int32_t requests_ = 0;
};

std::string text_of(const WorkTile& work_tile) {
  std::string text = core::message("  request ", work_tile.request, " head ", work_tile.kv_head, " rows ",
                                   work_tile.row_begin, '-', work_tile.row_end, " segment ", work_tile.segment, " row ",
                                   work_tile.kv_row, " keys ", work_tile.kv_begin, '-', work_tile.kv_end);
  if ((work_tile.flags & kStart) != 0) text += " start";
  if ((work_tile.flags & kFold) != 0) text += " fold";
  if ((work_tile.flags & kFinish) != 0) text += " finish -> ";
  if ((work_tile.flags & kFinish) != 0)
    text += work_tile.partial < 0 ? "out" : core::message("partial ", work_tile.partial);
  return text + '\n';
}

}  // namespace

BatchView OwnedBatch::view() {
  cu_q_.assign(1, 0);
  for (const int32_t length : q_len) cu_q_.push_back(cu_q_.back() + length);
  views_.clear();
  for (const OwnedSegment& segment : segments) {
    KvSegment one;
    one.source = segment.source;
    one.kv_len = segment.kv_len.data();
    one.first_pos = segment.first_pos.empty() ? nullptr : segment.first_pos.data();
    one.group_indptr = segment.group_indptr.empty() ? nullptr : segment.group_indptr.data();
    one.num_groups = segment.group_indptr.empty() ? 0 : static_cast<int32_t>(segment.group_indptr.size()) - 1;
    one.mask = segment.mask;
    one.shard = segment.shard;
    views_.push_back(one);
  }
  BatchView batch;
  batch.num_requests = static_cast<int32_t>(q_len.size());
  batch.num_tokens = cu_q_.back() + padding_tokens;
  batch.cu_q = cu_q_.data();
  batch.q_first_pos = q_first_pos.empty() ? nullptr : q_first_pos.data();
  batch.segments = views_;
  batch.custom_mask.scope = scope;
  batch.custom_mask.tail_len = tail_len.empty() ? nullptr : tail_len.data();
  batch.kv_start = kv_start.empty() ? nullptr : kv_start.data();
  batch.causal = causal.empty() ? nullptr : causal.data();
  batch.spans = spans.empty() ? nullptr : spans.data();
  return batch;
}

OwnedBatch paged_batch(std::vector<int32_t> q_len, std::vector<int32_t> kv_len) {
  OwnedBatch batch;
  batch.q_len = std::move(q_len);
  batch.segments.emplace_back();
  batch.segments[0].kv_len = std::move(kv_len);
  return batch;
}

Case random_case(std::mt19937& random) {
  return RandomCase(random).make();
}

std::string describe(const PlanView& plan) {
  std::string text;
  for (int32_t w = 0; w < plan.num_workers && plan.worker_indptr != nullptr; ++w) {
    text += core::message("worker ", w, '\n');
    for (int32_t i = plan.worker_indptr[w]; i < plan.worker_indptr[w + 1]; ++i) text += text_of(plan.work_tiles[i]);
  }
  for (int32_t dynamic_tile = 0; dynamic_tile < plan.num_dynamic_tiles; ++dynamic_tile) {
    text += core::message("tile ", dynamic_tile, '\n');
    for (int32_t i = dynamic_tile;; i = plan.work_tiles[i].partial) {
      text += text_of(plan.work_tiles[i]);
      if ((plan.work_tiles[i].flags & kFinish) != 0) break;
    }
  }
  for (int32_t m = 0; m < plan.num_combine_tiles; ++m) {
    const CombineTile& combine_tile = plan.combine_tiles[m];
    text += core::message("combine request ", combine_tile.request, " head ", combine_tile.kv_head, " rows ",
                          combine_tile.row_begin, '-', combine_tile.row_end, " <-");
    for (int32_t i = combine_tile.source_begin; i < combine_tile.source_end; ++i)
      text += core::message(' ', plan.combine_sources[i]);
    text += '\n';
  }
  return text;
}

}  // namespace folio::inline v0::scheduler::testing
