#pragma once

// One step of the serving fuzzer's engine: some requests' last tokens, in the order of the batch, as the core takes
// them and as vLLM's runner describes them.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "calls.hpp"
#include "folio/backends/attention_metadata.hpp"
#include "folio/backends/engine_config.hpp"
#include "serving_model.hpp"

namespace serving {

constexpr float kUntouched = -12345.0f;

/// One thread: the order of the calls is what is tried here.
inline const folio::Context& shared_context() {
  static const folio::Context context = folio::Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  return context;
}

/// The last `q_len` tokens of a request, by its number.
struct StepEntry {
  size_t request = 0;
  int32_t q_len = 0;
};

/// Rows of some requests' last tokens, in the order of the batch, and the pages that hold their keys.
struct Step {
  std::vector<size_t> requests;
  std::vector<int32_t> cu_q = {0}, kv_len, q_first_pos;
  std::vector<int32_t> indptr = {0}, pages;
  std::vector<float> q;
  int32_t rows() const { return cu_q.back(); }
  int32_t q_len(size_t i) const { return cu_q[i + 1] - cu_q[i]; }
};

inline Step make_step(const std::vector<StepEntry>& entries, const std::vector<Request>& requests,
                      const folio::AttentionConfig& config) {
  Step step;
  for (const StepEntry& entry : entries) {
    const Request& request = requests[entry.request];
    step.requests.push_back(entry.request);
    step.cu_q.push_back(step.rows() + entry.q_len);
    step.kv_len.push_back(request.length());
    step.q_first_pos.push_back(request.length() - entry.q_len);
    for (int32_t p = 0; p < request.length(); p += config.page_size) {
      step.pages.push_back(request.slots[static_cast<size_t>(p)] / config.page_size);
    }
    step.indptr.push_back(static_cast<int32_t>(step.pages.size()));
    for (int32_t p = request.length() - entry.q_len; p < request.length(); ++p) {
      append_row(step.q, request.tokens[static_cast<size_t>(p)], p, kQuery, config.num_q_heads, config.head_dim_qk);
    }
  }
  return step;
}

/// The step's new keys and values and the slots that they belong in: what backends write themselves.
struct NewTokens {
  NewTokens(const Step& step, const std::vector<Request>& requests, const folio::AttentionConfig& config) {
    for (size_t i = 0; i < step.requests.size(); ++i) {
      const Request& request = requests[step.requests[i]];
      for (int32_t p = step.q_first_pos[i]; p < request.length(); ++p) {
        const int32_t token = request.tokens[static_cast<size_t>(p)];
        append_row(k_rows, token, p, kKey, config.num_kv_heads, config.head_dim_qk);
        append_row(v_rows, token, p, kValue, config.num_kv_heads, config.head_dim_v);
        slots.push_back(request.slots[static_cast<size_t>(p)]);
      }
    }
    const auto tokens = static_cast<int64_t>(slots.size());
    k = {k_rows.data(), folio::DType::kFloat32, {tokens, config.num_kv_heads, config.head_dim_qk}};
    v = {v_rows.data(), folio::DType::kFloat32, {tokens, config.num_kv_heads, config.head_dim_v}};
  }
  NewTokens(const NewTokens&) = delete;
  NewTokens& operator=(const NewTokens&) = delete;

  /// Something else in their slots, so that only a backend that writes them reads what it must.
  void spoil(const folio::KvPool& pool) const {
    const std::vector<float> other_k(k_rows.size(), 1000.0f), other_v(v_rows.size(), 1000.0f);
    folio::ConstTensorView wrong_k = k, wrong_v = v;
    wrong_k.data = other_k.data();
    wrong_v.data = other_v.data();
    folio::write_kv_cache(shared_context(), pool.write_args(0, wrong_k, wrong_v, slots));
  }

  std::vector<float> k_rows, v_rows;
  std::vector<int64_t> slots;
  folio::ConstTensorView k, v;
};

/// The step as vLLM's runner describes it: a dense table with impossible pages beyond every request's own.
struct RunnerBatch {
  RunnerBatch(const Step& given, const std::vector<Request>& requests, const folio::AttentionConfig& config)
      : step(given), tokens(step, requests, config) {
    constexpr int32_t kNoPage = 0x7ffffff0;
    const auto num_reqs = static_cast<int32_t>(step.requests.size());
    const int32_t columns = (kMostTokens + config.page_size - 1) / config.page_size, stride = columns + 1;
    table.assign(static_cast<size_t>(num_reqs) * static_cast<size_t>(stride), kNoPage);
    common_prefix = num_reqs > 0 ? kMostTokens : 0;
    for (size_t i = 0; i < step.requests.size(); ++i) {
      const auto first = step.pages.begin() + step.indptr[i], last = step.pages.begin() + step.indptr[i + 1];
      std::copy(first, last, table.begin() + static_cast<std::ptrdiff_t>(i) * stride);
      const auto differs = std::mismatch(first, last, step.pages.begin(), step.pages.begin() + step.indptr[1]).first;
      common_prefix = std::min(common_prefix, static_cast<int32_t>(differs - first) * config.page_size);
      metadata.max_query_len = std::max(metadata.max_query_len, step.q_len(i));
      metadata.max_seq_len = std::max(metadata.max_seq_len, step.kv_len[i]);
    }
    metadata.query_start_loc = step.cu_q;
    metadata.seq_lens = step.kv_len;
    metadata.num_reqs = num_reqs;
    metadata.num_actual_tokens = step.rows();
    metadata.block_table = {table.data(), num_reqs, columns, stride};
    metadata.slot_mapping = tokens.slots;
    out.assign(static_cast<size_t>(step.rows() + kPaddingRows) * row_size(config), kUntouched);
    query = {step.q.data(), folio::DType::kFloat32, {step.rows(), config.num_q_heads, config.head_dim_qk}};
    output = {out.data(), folio::DType::kFloat32, {step.rows() + kPaddingRows, config.num_q_heads, config.head_dim_v}};
  }
  RunnerBatch(const RunnerBatch&) = delete;
  RunnerBatch& operator=(const RunnerBatch&) = delete;

  static size_t row_size(const folio::AttentionConfig& config) {
    return static_cast<size_t>(config.num_q_heads) * static_cast<size_t>(config.head_dim_v);
  }

  bool untouched() const {
    return std::all_of(out.begin(), out.end(), [](float x) { return x == kUntouched; });
  }

  /// Every row against the oracle; the padding is as it was. The output is then as before the step.
  void check(const folio::AttentionConfig& config, const std::vector<Request>& requests,
             const LayerFeatures& features) {
    const auto rows_end =
        out.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(step.rows()) * row_size(config));
    FUZZ_CHECK(std::all_of(rows_end, out.end(), [](float x) { return x == kUntouched; }));
    const StepOutput got = {{out.begin(), rows_end}, {}};
    for (size_t i = 0; i < step.requests.size(); ++i) {
      const Request& request = requests[step.requests[i]];
      check_rows(config, request, step.q_len(i), 0, request.length(), got, static_cast<size_t>(step.cu_q[i]), features);
    }
    std::fill(out.begin(), out.end(), kUntouched);
  }

  static constexpr int64_t kPaddingRows = 2;
  Step step;
  NewTokens tokens;
  std::vector<int32_t> table;
  std::vector<float> out;
  int32_t common_prefix = 0;  ///< tokens in pages that all requests begin with
  folio::backends::CommonAttentionMetadata metadata;
  folio::ConstTensorView query;
  folio::TensorView output;
};

/// A layer's scale, soft cap, sinks and slopes; most layers have few of them.
inline LayerFeatures take_features(FuzzInput& input, int32_t num_q_heads) {
  LayerFeatures features;
  const auto kinds = input.take<uint8_t>();
  features.sm_scale = kinds % 2 == 0 ? 0.5f : 0.125f;
  if ((kinds & 2) != 0) features.logits_soft_cap = 2.0f;
  for (int32_t head = 0; head < num_q_heads; ++head) {
    if ((kinds & 4) != 0) features.sinks.push_back(0.5f * static_cast<float>(head) - 0.5f);
    if ((kinds & 8) != 0) features.alibi_slopes.push_back(0.25f / static_cast<float>(1 + head));
  }
  return features;
}

/// What both metadata builders are configured with.
inline folio::backends::EngineConfig engine_config(const folio::AttentionConfig& config, bool hnd) {
  folio::backends::EngineConfig engine;
  engine.model.dtype = folio::DType::kFloat32;
  engine.model.num_attention_heads = config.num_q_heads;
  engine.model.num_kv_heads = config.num_kv_heads;
  engine.model.max_model_len = kMostTokens;
  engine.cache.layout = hnd ? folio::backends::KvCacheLayout::kHnd : folio::backends::KvCacheLayout::kNhd;
  engine.scheduler.max_num_seqs = kMostRequests;
  engine.scheduler.max_num_batched_tokens = kMostRequests * kMostTokens;
  engine.determinism = config.determinism;
  return engine;
}

/// A change to a batch that makes it contradict itself; `scratch` keeps what it points into.
inline void spoil_batch(FuzzInput& input, folio::backends::CommonAttentionMetadata& batch,
                        std::vector<int32_t>& scratch) {
  FUZZ_CHECK(batch.num_reqs > 0);
  const auto request = static_cast<size_t>(input.take<uint8_t>() % batch.num_reqs);
  scratch.assign(batch.seq_lens.begin(), batch.seq_lens.end());
  switch (input.take<uint8_t>() % 7) {
    case 0: batch.num_reqs = -1 - input.take<uint8_t>(); break;
    case 1: batch.block_table.num_rows = batch.num_reqs - 1; break;
    case 2: batch.block_table.row_stride = batch.block_table.num_columns - 1; break;
    case 3: batch.max_seq_len = batch.seq_lens[request] - 1; break;
    case 4: batch.seq_lens = batch.seq_lens.first(static_cast<size_t>(batch.num_reqs) - 1); break;
    case 5:
      scratch[request] = -1 - input.take<uint8_t>();
      batch.seq_lens = scratch;
      break;
    default:
      scratch[request] = kMostTokens + 1 + input.take<uint8_t>();
      batch.seq_lens = scratch;
      batch.max_seq_len = 1 << 20;
  }
}

}  // namespace serving
