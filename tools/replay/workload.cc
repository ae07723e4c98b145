#include "replay/workload.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "folio/types/error.hpp"
#include "replay/mix.hpp"

namespace folio::replay {
namespace {

// Domain tags: keep the three kinds of token apart.
constexpr uint64_t kSharedToken = 1;
constexpr uint64_t kOwnToken = 2;

int32_t scaled(int32_t length, int32_t scale) {
  return std::max(1, (length + scale - 1) / scale);
}

}  // namespace

int64_t Workload::input_tokens() const {
  int64_t sum = 0;
  for (const Request& request : requests) sum += request.input_length;
  return sum;
}

int64_t Workload::output_tokens() const {
  int64_t sum = 0;
  for (const Request& request : requests) sum += request.output_length;
  return sum;
}

int64_t Workload::computed_tokens() const {
  int64_t sum = 0;
  for (const Request& request : requests) sum += request.computed_length();
  return sum;
}

int32_t Workload::longest() const {
  int32_t longest = 0;
  for (const Request& request : requests) longest = std::max(longest, request.computed_length());
  return longest;
}

int64_t Workload::pages_for_all(int32_t page_size) const {
  int64_t sum = 0;
  for (const Request& request : requests) sum += (request.computed_length() + page_size - 1) / page_size;
  return sum;
}

Workload make_workload(const Trace& trace, int32_t scale, int64_t max_requests) {
  const bool hashed = trace.format == TraceFormat::kMooncake;
  if (scale < 1) throw Error(ErrorCode::kInvalidArgument, fmt::format("scale is {}; expected 1 or more", scale));
  if (hashed && kTokensPerHash % scale != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("scale is {}; with hash ids it must divide {}, the tokens of one hash: 1, 2, 4, ... {}",
                            scale, kTokensPerHash, kTokensPerHash));
  }
  Workload workload;
  workload.tokens_per_hash = hashed ? kTokensPerHash / scale : 0;
  for (const TraceRequest& row : trace.requests) {
    workload.requests.push_back(
        {row.arrival_ms, scaled(row.input_length, scale), scaled(row.output_length, scale), row.line, row.hash_ids});
  }
  std::stable_sort(workload.requests.begin(), workload.requests.end(),
                   [](const Request& a, const Request& b) { return a.arrival_ms < b.arrival_ms; });
  if (max_requests > 0 && static_cast<int64_t>(workload.requests.size()) > max_requests) {
    workload.requests.resize(static_cast<size_t>(max_requests));
  }
  const double first_ms = workload.requests.empty() ? 0.0 : workload.requests.front().arrival_ms;
  for (Request& request : workload.requests) request.arrival_ms -= first_ms;
  return workload;
}

void set_request_rate(Workload& workload, double per_second) {
  if (!(per_second > 0.0)) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} requests a second; expected more than 0", per_second));
  }
  if (workload.requests.size() < 2) return;
  const double last_ms = workload.requests.back().arrival_ms;
  const double wanted_ms = 1e3 * static_cast<double>(workload.requests.size() - 1) / per_second;
  if (last_ms <= 0.0 && wanted_ms > 0.0) {
    throw Error(ErrorCode::kInvalidArgument,
                "all requests of the trace arrive at once: their times cannot be scaled to a rate");
  }
  for (Request& request : workload.requests) {
    request.arrival_ms = wanted_ms > 0.0 ? request.arrival_ms * (wanted_ms / last_ms) : 0.0;
  }
}

std::vector<uint64_t> token_chain(const Workload& workload, int32_t index) {
  const Request& request = workload.requests[static_cast<size_t>(index)];
  const auto length = static_cast<size_t>(request.computed_length());
  const auto prompt = static_cast<size_t>(request.hash_ids.empty() ? 0 : request.input_length);
  const auto per_hash = static_cast<size_t>(workload.tokens_per_hash);
  std::vector<uint64_t> chain(length);
  uint64_t link = 0;
  for (size_t p = 0; p < length; ++p) {
    const uint64_t token = p < prompt ? mix(kSharedToken, request.hash_ids[p / per_hash], p % per_hash)
                                      : mix(kOwnToken, static_cast<uint64_t>(index), p);
    link = mix(link, token);
    chain[p] = link;
  }
  return chain;
}

BlockHits count_block_hits(const Trace& trace, int64_t max_requests) {
  BlockHits hits;
  std::unordered_set<uint64_t> seen;
  int64_t served = 0;
  for (const TraceRequest& request : trace.requests) {
    if (max_requests > 0 && served++ >= max_requests) break;
    int64_t matched = 0;
    while (matched < static_cast<int64_t>(request.hash_ids.size()) &&
           seen.contains(request.hash_ids[static_cast<size_t>(matched)])) {
      ++matched;
    }
    seen.insert(request.hash_ids.begin(), request.hash_ids.end());
    const int64_t length = request.input_length;
    hits.input_tokens += length;
    hits.with_partial += std::min(length, matched * kTokensPerHash);
    hits.full_blocks += std::min(length / kTokensPerHash, matched) * kTokensPerHash;
  }
  return hits;
}

}  // namespace folio::replay
