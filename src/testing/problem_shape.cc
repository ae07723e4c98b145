#include <algorithm>
#include <limits>
#include <numeric>

#include "testing/factors.hpp"
#include "testing/problem.hpp"

namespace folio::inline v0::verify {
namespace {

/// Multiplications that a case may cost; queries are cut to fit. Keeps a case near ten milliseconds.
constexpr int64_t kBudget = 12'000'000;

struct Lengths {
  int32_t q = 0;
  int32_t kv = 0;
};

int32_t num_requests(const ConformanceCase& c, Random& random) {
  switch (level<LengthsLevel>(c, kLengths)) {
    case LengthsLevel::kEdges: return random.between(5, 7);
    case LengthsLevel::kMedium: return random.between(1, 4);
    case LengthsLevel::kLong: return random.between(1, 3);
    case LengthsLevel::kSkewed: return random.between(5, 9);
    case LengthsLevel::kEmpty: return random.between(4, 8);
  }
  return 1;
}

int32_t kv_length(const ConformanceCase& c, Random& random, int32_t request, int32_t special) {
  const int32_t page = page_size_of(c);
  const int32_t edges[] = {page + 1, page - 1, page, 0, 1, 2 * page, 2 * page + 1};
  switch (level<LengthsLevel>(c, kLengths)) {
    case LengthsLevel::kEdges: return edges[request % 7];
    case LengthsLevel::kMedium: return random.between(1, 150);
    case LengthsLevel::kLong:
      if (request != special) return random.between(1, 40);
      // Beyond one fixed split of a batch-invariant plan (about 2,048 keys), or several tiles.
      return random.one_in(2) ? random.between(2040, 2200) : random.between(300, 700);
    case LengthsLevel::kSkewed: return request == special ? random.between(400, 800) : random.between(1, 20);
    case LengthsLevel::kEmpty: return random.one_in(3) ? 0 : random.between(1, 2 * page + 3);
  }
  return 1;
}

int32_t q_length(const ConformanceCase& c, Random& random, int32_t kv) {
  const bool empty = level<LengthsLevel>(c, kLengths) == LengthsLevel::kEmpty;
  if (empty && random.one_in(3)) return 0;
  int32_t q = 1;
  switch (level<QueriesLevel>(c, kQueries)) {
    case QueriesLevel::kDecode: q = 1; break;
    case QueriesLevel::kPrefill: q = random.one_in(2) ? kv : random.between(1, std::max(1, kv)); break;
    case QueriesLevel::kMixed: q = random.one_in(2) ? 1 : random.between(2, 40); break;
    case QueriesLevel::kVerify: q = 4; break;
  }
  if (empty && random.one_in(3)) return std::min(q, 40) + kv;  // more queries than keys
  return std::min(q, std::max(kv, 1));
}

/// Cuts the costliest request's queries until the whole fits the budget.
void fit_budget(const AttentionConfig& config, std::vector<Lengths>& lengths) {
  const int64_t per_pair = int64_t{config.num_q_heads} * (config.head_dim_qk + config.head_dim_v);
  const auto cost = [&](const Lengths& l) { return per_pair * l.q * std::max(l.kv, 1); };
  const auto cheaper = [&](const Lengths& a, const Lengths& b) {
    return (a.q > 1 ? cost(a) : 0) < (b.q > 1 ? cost(b) : 0);
  };
  for (;;) {
    int64_t total = 0;
    for (const Lengths& l : lengths) total += cost(l);
    const auto worst = std::max_element(lengths.begin(), lengths.end(), cheaper);
    if (total <= kBudget || worst->q <= 1) return;
    worst->q -= std::max(1, worst->q / 4);
  }
}

class ShapeBuilder {
 public:
  ShapeBuilder(const ConformanceCase& c, Random& random, Problem& problem)
      : case_(c), random_(random), problem_(problem) {}

  void build() {
    const int32_t n = num_requests(case_, random_);
    const int32_t special = random_.below(n);
    for (int32_t r = 0; r < n; ++r) {
      const int32_t kv = kv_length(case_, random_, r, special);
      lengths_.push_back({q_length(case_, random_, kv), kv});
    }
    for (size_t i = lengths_.size(); i > 1; --i) {
      std::swap(lengths_[i - 1], lengths_[static_cast<size_t>(random_.below(static_cast<int32_t>(i)))]);
    }
    fit_budget(problem_.config, lengths_);
    starts_.assign(lengths_.size(), 0);
    add_segments();
    place_queries();
  }

 private:
  void add_segments() {
    const auto kind = level<SegmentsLevel>(case_, kSegments);
    switch (kind) {
      case SegmentsLevel::kPaged: add_rows(KvSource::kPaged); break;
      case SegmentsLevel::kRagged: add_rows(KvSource::kRagged); break;
      case SegmentsLevel::kPrefixAndNew: add_prefix_and_new(); break;
      case SegmentsLevel::kCascade1: add_cascade(1); break;
      case SegmentsLevel::kCascade2: add_cascade(2); break;
      case SegmentsLevel::kShard1:
      case SegmentsLevel::kShard2:
      case SegmentsLevel::kShardPage: add_shards(kind); break;
      case SegmentsLevel::kTruncated: {
        for (int32_t& start : starts_) start = random_.below(6) * page_size_of(case_) + (random_.one_in(4) ? 3 : 0);
        add_rows(KvSource::kPaged);
        break;
      }
      case SegmentsLevel::kCross: {
        SegmentModel& encoder = new_segment(KvSource::kPaged);
        encoder.mask = SegmentMask::kAllVisible;
        for (const Lengths& l : lengths_) encoder.rows.push_back(row(l.kv, 0));
        if (random_.one_in(2)) add_rows(random_.one_in(2) ? KvSource::kPaged : KvSource::kRagged);
        break;
      }
    }
  }

  static KvRowModel row(int32_t kv_len, int32_t first_pos) {
    KvRowModel out;
    out.kv_len = kv_len;
    out.first_pos = first_pos;
    return out;
  }

  /// One row a request, unless the caller says otherwise.
  SegmentModel& new_segment(KvSource source) {
    SegmentModel& segment = problem_.segments.emplace_back();
    segment.source = source;
    segment.row_of_request.resize(lengths_.size());
    std::iota(segment.row_of_request.begin(), segment.row_of_request.end(), 0);
    return segment;
  }

  /// Every request's keys, from its start on.
  void add_rows(KvSource source) {
    SegmentModel& segment = new_segment(source);
    for (size_t r = 0; r < lengths_.size(); ++r) segment.rows.push_back(row(lengths_[r].kv, starts_[r]));
  }

  void add_prefix_and_new() {
    SegmentModel& prefix = new_segment(KvSource::kPaged);
    for (const Lengths& l : lengths_) prefix.rows.push_back(row(std::max(0, l.kv - l.q), 0));
    for (size_t r = 0; r < lengths_.size(); ++r) {
      starts_[r] = std::max(0, lengths_[r].kv - lengths_[r].q);
      lengths_[r].kv -= starts_[r];
    }
    add_rows(KvSource::kRagged);
  }

  /// Shared prefixes: neighbouring requests in groups; the first and last few may belong to none.
  void add_cascade(int32_t levels) {
    const auto n = static_cast<int32_t>(lengths_.size());
    for (int32_t depth = 0; depth < levels; ++depth) {
      SegmentModel& shared = new_segment(depth == 1 && random_.one_in(4) ? KvSource::kRagged : KvSource::kPaged);
      shared.shared = true;
      std::fill(shared.row_of_request.begin(), shared.row_of_request.end(), -1);
      const int32_t first = depth == 0 ? 0 : random_.below(std::min(2, n));
      const int32_t end = random_.one_in(3) ? n : std::max(first + 1, n - random_.below(2));
      const int32_t num_groups = depth + 1 == levels && levels > 1 ? random_.between(1, 3) : random_.between(1, 2);
      for (int32_t g = 0; g < num_groups; ++g) {
        shared.rows.push_back(row(random_.one_in(5) ? page_size_of(case_) * 2 : random_.below(60), 0));
        shared.rows.back().first_pos = -1;  // known once its first request is
      }
      for (int32_t r = first; r < end; ++r) {
        const int32_t g = (r - first) * num_groups / (end - first);
        KvRowModel& group = shared.rows[static_cast<size_t>(g)];
        // Positions of a group's row are those of its first request; the others follow it, as a shared prefix would.
        if (group.first_pos < 0) group.first_pos = starts_[static_cast<size_t>(r)];
        shared.row_of_request[static_cast<size_t>(r)] = g;
        starts_[static_cast<size_t>(r)] = group.first_pos + group.kv_len;
      }
      for (KvRowModel& group : shared.rows) group.first_pos = std::max(0, group.first_pos);
    }
    add_rows(random_.one_in(3) ? KvSource::kRagged : KvSource::kPaged);
  }

  /// A context dealt to ranks; the batch holds all of them, or one; new tokens may follow, whole.
  void add_shards(SegmentsLevel kind) {
    const int32_t world = random_.between(2, 3);
    const int32_t interleave = kind == SegmentsLevel::kShard1   ? 1
                               : kind == SegmentsLevel::kShard2 ? 2
                                                                : page_size_of(case_);
    const bool whole_world = random_.one_in(2);
    const int32_t only = random_.below(world);
    for (int32_t& start : starts_) start = random_.one_in(3) ? random_.below(20) : 0;
    for (int32_t rank = 0; rank < world; ++rank) {
      if (!whole_world && rank != only) continue;
      SegmentModel& segment = new_segment(KvSource::kPaged);
      segment.shard = {world, rank, interleave};
      for (size_t r = 0; r < lengths_.size(); ++r) {
        int32_t local = 0;
        for (int32_t g = 0; g < lengths_[r].kv; ++g) local += g / interleave % world == rank;
        segment.rows.push_back(row(local, starts_[r]));
      }
    }
    for (size_t r = 0; r < lengths_.size(); ++r) starts_[r] += lengths_[r].kv;
    new_tokens_after_shards_ = random_.one_in(2);
    if (!new_tokens_after_shards_) return;
    SegmentModel& segment = new_segment(KvSource::kRagged);
    for (size_t r = 0; r < lengths_.size(); ++r) segment.rows.push_back(row(lengths_[r].q, starts_[r]));
  }

  void place_queries() {
    const bool sharded = is_sharded(level<SegmentsLevel>(case_, kSegments));
    problem_.default_q_first_pos = !sharded && random_.one_in(2);
    for (size_t r = 0; r < lengths_.size(); ++r) {
      RequestModel& request = problem_.requests.emplace_back();
      request.q_len = lengths_[r].q;
      int32_t end = starts_[r];
      if (!sharded) {
        const KvRowModel& last = problem_.segments.back().rows[r];
        end = last.first_pos + last.kv_len;
      } else if (new_tokens_after_shards_) {
        end += lengths_[r].q;
      }
      request.q_first_pos = end - request.q_len;
      if (!problem_.default_q_first_pos && random_.one_in(3)) request.q_first_pos += random_.between(-3, 3);
    }
  }

  const ConformanceCase& case_;
  Random& random_;
  Problem& problem_;
  std::vector<Lengths> lengths_;
  std::vector<int32_t> starts_;  ///< per request, the position where its next segment begins
  bool new_tokens_after_shards_ = false;
};

int32_t pick_window(Random& random, int32_t longest) {
  const int32_t choices[] = {0, 1, 2, random.below(40), random.below(std::max(1, longest)), 63};
  return choices[random.below(6)];
}

void choose_windows(const ConformanceCase& c, Random& random, Problem& problem) {
  int32_t longest = 1;
  for (size_t r = 0; r < problem.requests.size(); ++r) longest = std::max(longest, problem.num_keys(r));
  const auto window = level<WindowLevel>(c, kWindow);
  problem.config.window_left = -1;
  problem.config.window_right = -1;
  if (window == WindowLevel::kLeft || window == WindowLevel::kBoth)
    problem.config.window_left = pick_window(random, longest);
  if (window == WindowLevel::kBoth) problem.config.window_right = pick_window(random, longest);
  if (window == WindowLevel::kWide) {
    constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
    problem.config.window_left = random.one_in(2) ? kMost : longest + random.below(1000);
    problem.config.window_right = random.one_in(2) ? kMost : longest + random.below(1000);
  }
}

}  // namespace

int32_t Problem::num_keys(size_t request) const {
  int32_t keys = 0;
  for (const SegmentModel& segment : segments) {
    const int32_t row = segment.row_of_request[request];
    if (row >= 0) keys += segment.rows[static_cast<size_t>(row)].kv_len;
  }
  return keys;
}

int32_t SegmentModel::position(const KvRowModel& row, int32_t token) const {
  const int32_t stripe = token / shard.interleave;
  return row.first_pos + (stripe * shard.world + shard.rank) * shard.interleave + token % shard.interleave;
}

void make_shape(const ConformanceCase& c, Random random, Problem& problem) {
  problem.config = kernel_question(c);
  const bool small_heads = group_size_of(c) <= 8 && head_dims_of(c).qk <= 256;
  problem.config.num_kv_heads = random.between(1, small_heads ? 3 : 2);
  if (problem.config.kv_format == KvFormat::kFp8DsMla) problem.config.num_kv_heads = 1;
  problem.config.num_q_heads = problem.config.num_kv_heads * group_size_of(c);
  // The default of AttentionConfig, spelled out.
  const bool quantized = is_fp8(problem.config.kv) || problem.config.kv == DType::kInt8;
  problem.config.ragged_kv = quantized ? problem.config.q : problem.config.kv;
  ShapeBuilder(c, random, problem).build();
  choose_windows(c, random, problem);
  problem.options.force_kernel = c.kernel;
  problem.options.num_workers = num_workers_of(c);
}

}  // namespace folio::inline v0::verify
