#include <algorithm>
#include <limits>

#include "testing/factors.hpp"
#include "testing/problem.hpp"

namespace folio::inline v0::verify {
namespace {

/// Positions of a request's keys, those of segments that are masked alone: [begin, end).
SpanModel masked_keys(const Problem& problem, size_t request) {
  SpanModel keys{std::numeric_limits<int32_t>::max(), 0};
  for (const SegmentModel& segment : problem.segments) {
    const int32_t index = segment.row_of_request[request];
    if (index < 0 || segment.mask == SegmentMask::kAllVisible) continue;
    const KvRowModel& row = segment.rows[static_cast<size_t>(index)];
    if (row.kv_len == 0) continue;
    keys.begin = std::min(keys.begin, segment.position(row, 0));
    keys.end = std::max(keys.end, segment.position(row, row.kv_len - 1) + 1);
  }
  return keys.begin < keys.end ? keys : SpanModel{};
}

int32_t pick_chunk(const ConformanceCase& c, Random& random) {
  const int32_t choices[] = {1, 3, page_size_of(c), 2 * page_size_of(c) + 1, 64, std::numeric_limits<int32_t>::max()};
  return choices[random.below(6)];
}

/// None, within the first keys, among the queries, or beyond them all.
int32_t pick_start(Random& random, const SpanModel& keys, const RequestModel& request) {
  switch (random.below(5)) {
    case 0: return keys.begin - random.below(5);
    case 1: return request.q_first_pos + random.below(request.q_len + 1);
    case 2: return keys.end + random.below(3);
    default: return keys.begin + random.below(std::max(1, keys.end - keys.begin));
  }
}

/// Images: runs of neighbouring positions, apart from one another. A query has the one that it lies in.
void place_images(Random& random, const SpanModel& keys, RequestModel& request) {
  const int32_t longest = random.one_in(3) ? 80 : 12;
  for (int32_t begin = keys.begin - random.below(4); begin < keys.end;) {
    const SpanModel image{begin, begin + random.between(1, longest)};
    for (int32_t i = 0; i < request.q_len; ++i) {
      const int32_t position = request.q_first_pos + i;
      if (position >= image.begin && position < image.end) request.spans[static_cast<size_t>(i)] = image;
    }
    begin = image.end + random.below(longest);
  }
}

/// Spans that begin and end anywhere, some of them empty or the wrong way round.
void place_anywhere(Random& random, const SpanModel& keys, RequestModel& request) {
  for (SpanModel& span : request.spans) {
    if (random.one_in(3)) continue;
    const int32_t reach = keys.end - keys.begin + 8;
    span.begin = keys.begin - 4 + random.below(reach);
    span.end = keys.begin - 4 + random.below(reach);
  }
}

}  // namespace

void make_rules(const ConformanceCase& c, Random random, Problem& problem) {
  if (is_on(c, kChunks)) problem.config.attention_chunk = pick_chunk(c, random);
  if (level<SpansLevel>(c, kSpans) == SpansLevel::kBeyond && random.one_in(2)) {
    problem.config.span_window_left = random.below(40);
  }
  for (size_t r = 0; r < problem.requests.size(); ++r) {
    RequestModel& request = problem.requests[r];
    const SpanModel keys = masked_keys(problem, r);
    if (is_on(c, kRequestCausal)) request.causal = !random.one_in(2);
    if (is_on(c, kKvStart)) request.kv_start = pick_start(random, keys, request);
    if (level<SpansLevel>(c, kSpans) == SpansLevel::kOff) continue;
    request.spans.resize(static_cast<size_t>(request.q_len));
    if (random.one_in(3)) {
      place_anywhere(random, keys, request);
    } else if (!random.one_in(4)) {
      place_images(random, keys, request);
    }
  }
}

}  // namespace folio::inline v0::verify
