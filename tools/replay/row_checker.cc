#include "replay/row_checker.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#include "replay/mix.hpp"
#include "replay/synthetic.hpp"

namespace folio::replay {
namespace {

constexpr uint64_t kSampleTag = 0x53;  // keeps the choice of samples apart from the values

/// A fast 64-bit hash of a row's bytes (a multiple of 8 of them); never 0.
uint64_t hash_row(const std::byte* row, size_t bytes) {
  uint64_t hash = bytes;
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, row + at, 8);
    hash = (hash ^ word) * 0x9fb21c651e98df25u;  // any odd constant with well-mixed bits
    hash ^= hash >> 32;
  }
  return mix(hash) | 1;
}

/// What a plain computation rounds probabilities to: e4m3 where products are of fp8, else the queries' own type,
/// bfloat16 for fp8.
DType compute_dtype(const StackConfig& stack, bool fp8_mma) {
  if (fp8_mma) return DType::kFloat8E4M3;
  return is_fp8(stack.q) ? DType::kBFloat16 : stack.q;
}

}  // namespace

RowChecker::RowChecker(const Workload& workload, const StackConfig& stack, const CheckOptions& options)
    : workload_(workload), stack_(stack), options_(options), row_hashes_(workload.requests.size()) {
  if (!(options.rate >= 0.0 && options.rate <= 1.0)) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("check rate is {}; expected 0 to 1", options.rate));
  }
  sample_below_ = static_cast<uint64_t>(std::ldexp(options.rate, 63));
  exact_.resize(static_cast<size_t>(stack.head_dim_v));
}

bool RowChecker::is_sampled(const TokenRow& token) const {
  const auto request = static_cast<uint64_t>(token.request);
  return (mix(stack_.seed ^ kSampleTag, request, static_cast<uint64_t>(token.position)) >> 1) < sample_below_;
}

void RowChecker::observe(const StepBatch& batch, const LayerOutput& output, const Scheduler& scheduler) {
  for (size_t r = 0; r + 1 < batch.cu_q.size(); ++r) {
    const bool fp8_mma = batch.cu_q[r + 1] - batch.cu_q[r] >= output.fp8_mma_from;
    for (auto t = static_cast<size_t>(batch.cu_q[r]); t < static_cast<size_t>(batch.cu_q[r + 1]); ++t) {
      const TokenRow& token = batch.rows[t];
      if (token.rejected) continue;
      const std::byte* row = output.data + t * output.row_bytes;
      const bool sampled = is_sampled(token);
      digest_row(token, output, row, sampled);
      if (sampled) check_row(token, output, row, fp8_mma, scheduler.chain_of(token.request));
    }
  }
}

void RowChecker::digest_row(const TokenRow& token, const LayerOutput& output, const std::byte* row, bool sampled) {
  const Request& request = workload_.requests[static_cast<size_t>(token.request)];
  const int32_t output_row = token.position - (request.input_length - 1);
  if (output_row < 0) return;
  std::vector<uint64_t>& hashes = row_hashes_[static_cast<size_t>(token.request)];
  const auto layers = static_cast<size_t>(stack_.num_layers);
  if (hashes.empty()) hashes.resize(static_cast<size_t>(request.output_length) * layers, 0);
  uint64_t& known = hashes[static_cast<size_t>(output_row) * layers + static_cast<size_t>(output.layer)];
  const uint64_t hash = hash_row(row, output.row_bytes);
  if (known != 0) {
    ++counts_.recomputed_rows;
    counts_.recomputed_unequal += known != hash ? 1 : 0;
    return;
  }
  known = hash;
  ++counts_.digested_rows;
  if (sampled && options_.keep_samples) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(row);
    samples_.push_back({token.request, token.position, output.layer, {bytes, bytes + output.row_bytes}});
  }
}

void RowChecker::fill_problem(const TokenRow& token, int32_t layer, int32_t q_head, std::span<const uint64_t> chain) {
  const int32_t kv_head = q_head / (stack_.num_q_heads / stack_.num_kv_heads);
  problem_.head_dim_qk = stack_.head_dim_qk;
  problem_.head_dim_v = stack_.head_dim_v;
  problem_.kv_len = token.position + 1;
  problem_.window_left = stack_.has_window(layer) ? stack_.window_left : -1;
  problem_.logits_soft_cap = stack_.logits_soft_cap;
  const auto dim_qk = static_cast<size_t>(stack_.head_dim_qk);
  const auto dim_v = static_cast<size_t>(stack_.head_dim_v);
  problem_.q.resize(dim_qk);
  problem_.k.resize(dim_qk * static_cast<size_t>(problem_.kv_len));
  problem_.v.resize(dim_v * static_cast<size_t>(problem_.kv_len));
  fill_row_as_stored(query_row_key(stack_.seed, token.request, token.position, layer, q_head), stack_.q, 1.0f,
                     stack_.head_dim_qk, problem_.q.data());
  for (size_t p = 0; p < static_cast<size_t>(problem_.kv_len); ++p) {
    fill_row_as_stored(kv_row_key(stack_.seed, InputKind::kKey, chain[p], layer, kv_head), stack_.kv, kFp8Scale,
                       stack_.head_dim_qk, problem_.k.data() + p * dim_qk);
    if (stack_.latent) {
      std::copy_n(problem_.k.data() + p * dim_qk, dim_v, problem_.v.data() + p * dim_v);
      continue;
    }
    fill_row_as_stored(kv_row_key(stack_.seed, InputKind::kValue, chain[p], layer, kv_head), stack_.kv, kFp8Scale,
                       stack_.head_dim_v, problem_.v.data() + p * dim_v);
  }
}

void RowChecker::check_row(const TokenRow& token, const LayerOutput& output, const std::byte* row, bool fp8_mma,
                           std::span<const uint64_t> chain) {
  const uint64_t choice = mix(stack_.seed ^ kSampleTag, static_cast<uint64_t>(token.request),
                              static_cast<uint64_t>(token.position), static_cast<uint64_t>(output.layer) + 1);
  const auto q_head = static_cast<int32_t>(choice % static_cast<uint64_t>(stack_.num_q_heads));
  fill_problem(token, output.layer, q_head, chain);
  oracle_row(problem_, exact_);
  const RowTolerance tolerance = row_tolerance(problem_, exact_, compute_dtype(stack_, fp8_mma));
  ++counts_.rows;
  bool failed = false;
  for (int32_t d = 0; d < stack_.head_dim_v; ++d) {
    const double got = load_as_float(row, output.dtype, int64_t{q_head} * stack_.head_dim_v + d);
    const double exact = exact_[static_cast<size_t>(d)];
    const double error = std::abs(got - exact);
    const double allowed = tolerance.allowed(exact, output.dtype);
    counts_.worst_error = std::max(counts_.worst_error, error);
    counts_.worst_share = std::max(counts_.worst_share, error / allowed);
    if (error <= allowed) continue;  // false for a NaN
    failed = true;
    if (counts_.first_failure.empty()) {
      counts_.first_failure = fmt::format(
          "request {} (line {}), position {}, layer {}, q head {}, component {}: {:.9g}, the oracle says {:.9g} +- "
          "{:.3g}",
          token.request, workload_.requests[static_cast<size_t>(token.request)].line, token.position, output.layer,
          q_head, d, got, exact, allowed);
    }
  }
  counts_.failures += failed ? 1 : 0;
}

uint64_t RowChecker::digest() const {
  uint64_t digest = 0;
  for (size_t request = 0; request < row_hashes_.size(); ++request) {
    for (const uint64_t hash : row_hashes_[request]) digest = mix(digest, hash);
    digest = mix(digest, request);
  }
  return digest;
}

void RowChecker::write_samples(OutputFile& file) const {
  std::vector<const Sample*> ordered;
  for (const Sample& sample : samples_) ordered.push_back(&sample);
  std::sort(ordered.begin(), ordered.end(), [](const Sample* a, const Sample* b) {
    return std::tie(a->request, a->position, a->layer) < std::tie(b->request, b->position, b->layer);
  });
  for (const Sample* sample : ordered) {
    std::string line = fmt::format("{} {} {} ", sample->request, sample->position, sample->layer);
    for (const unsigned char byte : sample->bits) fmt::format_to(std::back_inserter(line), "{:02x}", byte);
    line += '\n';
    file.write(line);
  }
}

}  // namespace folio::replay
