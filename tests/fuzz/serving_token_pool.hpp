#pragma once

// The engine's requests through the token-pool backend: their slots as rows of a request table.
#include <optional>

#include "folio/backends/token_pool.hpp"
#include "serving_step.hpp"

namespace serving {

class TokenPoolServing {
 public:
  TokenPoolServing(FuzzInput& input, const folio::AttentionConfig& config, const folio::KvPool& pool)
      : config_(config), pool_(pool), rows_(kMostRequests, kMostTokens) {
    using namespace folio::backends;
    TokenPoolConfig options;
    options.num_heads = config.num_q_heads;
    options.num_kv_heads = config.num_kv_heads;
    options.head_dim = config.head_dim_qk;
    options.v_head_dim = config.head_dim_v;
    options.kv_cache_dtype = options.q_dtype = folio::DType::kFloat32;
    const auto kinds = input.take<uint8_t>();
    const bool token_major = pool.config().layout == folio::KvPoolLayout::kTokenMajor;
    options.page_size = token_major && kinds % 2 != 0 ? 1 : config.page_size;
    options.max_context_len = kMostTokens;
    options.req_to_token = rows_.table();
    options.max_req_pool_size = kMostRequests;
    if (config.window_left >= 0) options.sliding_window_size = config.window_left;
    features_.sm_scale = 0.5f;
    if (kinds % 3 == 0) features_.logits_soft_cap = 2.0f;
    options.logit_cap = features_.logits_soft_cap > 0.0f;
    options.determinism = config.determinism;
    options.extend_path = static_cast<ExtendPath>(input.take_between(0, 2));
    if (options.determinism == folio::Determinism::kScheduleInvariant) options.extend_path = ExtendPath::kAuto;
    backend_.emplace(shared_context(), options);
    layer_.num_heads = config.num_q_heads;
    layer_.head_dim = config.head_dim_qk;
    layer_.v_head_dim = config.head_dim_v;
    layer_.num_kv_heads = config.num_kv_heads;
    layer_.scaling = features_.sm_scale;
    layer_.logit_cap = features_.logits_soft_cap;
    layer_.sliding_window_size = config.window_left;
  }
  TokenPoolServing(const TokenPoolServing&) = delete;
  TokenPoolServing& operator=(const TokenPoolServing&) = delete;

  void step(FuzzInput& input, std::vector<StepEntry> entries, const std::vector<Request>& requests) {
    using folio::backends::ForwardMode;
    const auto mode = static_cast<ForwardMode>(input.take_between(1, 6));
    int32_t drafts = 1;
    if (mode == ForwardMode::kDecode || mode == ForwardMode::kTargetVerify) {
      if (mode == ForwardMode::kTargetVerify) drafts = shortest(entries, requests, input.take_between(1, 6));
      for (StepEntry& entry : entries) entry.q_len = drafts;
    }
    Batch batch(make_step(entries, requests, config_), requests, *this);
    batch.forward.forward_mode = mode;
    if (mode == ForwardMode::kTargetVerify) {
      for (int32_t& len : batch.seq_lens) len -= drafts;
      batch.forward.spec_info.draft_token_num = drafts;
    }
    if (folio::backends::is_extend(mode)) batch.forward.extend_prefix_lens = batch.step.q_first_pos;
    backend_->init_forward_metadata(batch.forward);
    if (mode == ForwardMode::kIdle) {
      run(batch, false);
      FUZZ_CHECK(std::all_of(batch.out.begin(), batch.out.end(), [](float x) { return x == 0.0f; }));
      return;
    }
    batch.tokens.spoil(pool_);
    run(batch, true);
    check(batch, requests, layer_.sliding_window_size);
    run(batch, false);  // as a layer that shares the first one's cache
    check(batch, requests, layer_.sliding_window_size);
    if (config_.window_left < 0) return;
    layer_.sliding_window_size = -1;  // a layer of the other kind
    run(batch, false);
    check(batch, requests, -1);
    layer_.sliding_window_size = config_.window_left;
  }

  /// A batch of decodes captured once and replayed with other requests, padded by the dummy row.
  void captured(FuzzInput& input, std::vector<StepEntry> entries, const std::vector<Request>& requests) {
    using folio::backends::ForwardMode;
    for (StepEntry& entry : entries) entry.q_len = 1;
    const auto size = static_cast<int32_t>(entries.size()) + input.take_between(0, 2);
    if (size < 1 || size > kMostRequests) return;
    Batch batch(make_step(entries, requests, config_), requests, *this);
    batch.forward.forward_mode = ForwardMode::kDecode;
    backend_->init_cuda_graph_state(kMostRequests, kMostRequests);
    const std::vector<int32_t> dummy_rows(static_cast<size_t>(size), 0), ones(static_cast<size_t>(size), 1);
    backend_->init_forward_metadata_capture_cuda_graph(size, size, dummy_rows, ones, ForwardMode::kDecode);
    batch.pad(size, config_);
    int64_t sum = 0;
    for (const int32_t len : batch.seq_lens) sum += len;
    backend_->init_forward_metadata_replay_cuda_graph(size, batch.rows, batch.seq_lens, sum, ForwardMode::kDecode,
                                                      batch.seq_lens);
    batch.tokens.spoil(pool_);
    run(batch, true);
    check(batch, requests, layer_.sliding_window_size);
    FUZZ_CHECK(refused(folio::ErrorCode::kInvalidArgument, [&] {
      backend_->init_forward_metadata_replay_cuda_graph(size, batch.rows, batch.seq_lens, sum + 1, ForwardMode::kDecode,
                                                        batch.seq_lens);
    }));
  }

  /// What cannot be is refused and changes nothing: the next step finds the cache as it was.
  void refuse(FuzzInput& input, const std::vector<StepEntry>& entries, const std::vector<Request>& requests) {
    if (entries.empty()) return;
    const auto kBad = folio::ErrorCode::kInvalidArgument;
    Batch batch(make_step(entries, requests, config_), requests, *this);
    batch.forward.forward_mode = folio::backends::ForwardMode::kExtend;
    batch.forward.extend_prefix_lens = batch.step.q_first_pos;
    const size_t request = input.take<uint8_t>() % entries.size();
    folio::backends::ForwardBatch wrong = batch.forward;
    std::vector<int32_t> values = batch.seq_lens;
    switch (input.take<uint8_t>() % 5) {
      case 0: wrong.batch_size = kMostRequests + 1 + input.take<uint8_t>(); break;
      case 1: wrong.seq_lens = wrong.seq_lens.first(entries.size() - 1); break;
      case 2:
        values[request] = kMostTokens + 1 + input.take<uint8_t>();
        wrong.seq_lens = values;
        break;
      case 3:
        values = batch.step.q_first_pos;
        values[request] = -1 - input.take<uint8_t>();
        wrong.extend_prefix_lens = values;
        break;
      default:
        values = batch.rows;
        values[request] = kMostRequests + 1 + input.take<uint8_t>();
        wrong.req_pool_indices = values;
    }
    FUZZ_CHECK(refused(kBad, [&] { backend_->init_forward_metadata(wrong); }));
    FUZZ_CHECK(std::holds_alternative<std::monostate>(backend_->forward_metadata()));
    FUZZ_CHECK(refused(kBad, [&] { run(batch, true); }));
    if (batch.step.rows() > 0) {  // a slot that is not the row's: the token would be lost
      backend_->init_forward_metadata(batch.forward);
      std::vector<int64_t> slots = batch.tokens.slots;
      int64_t& slot = slots[input.take<uint8_t>() % slots.size()];
      slot = slot == config_.page_size ? slot + 1 : config_.page_size;
      batch.forward.out_cache_loc = slots;
      FUZZ_CHECK(refused(kBad, [&] { run(batch, true); }));
    }
    FUZZ_CHECK(std::all_of(batch.out.begin(), batch.out.end(), [](float x) { return x == kUntouched; }));
  }

 private:
  /// A step's batch, with rows of the request table that it gives back.
  struct Batch {
    Batch(const Step& given, const std::vector<Request>& requests, TokenPoolServing& owner)
        : step(given), tokens(step, requests, owner.config_), table(owner.rows_), rows(step.requests.size()) {
      FUZZ_CHECK(table.alloc(rows));
      for (size_t i = 0; i < rows.size(); ++i) table.write(rows[i], 0, requests[step.requests[i]].slots);
      held = rows;
      seq_lens = step.kv_len;
      const size_t row = static_cast<size_t>(owner.config_.num_q_heads) * static_cast<size_t>(owner.config_.head_dim_v);
      out.assign(static_cast<size_t>(step.rows()) * row, kUntouched);
      forward.batch_size = static_cast<int32_t>(rows.size());
      forward.req_pool_indices = rows;
      forward.seq_lens = seq_lens;
      forward.out_cache_loc = tokens.slots;
      forward.token_to_kv_pool = &owner.pool_;
    }
    ~Batch() {
      for (const int32_t row : held) table.free(row);
    }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    /// Rows of padding requests: one token each, in the dummy slot of the dummy row.
    void pad(int32_t size, const folio::AttentionConfig& config) {
      const auto count = static_cast<size_t>(size), fresh = count - rows.size();
      rows.resize(count, 0);
      seq_lens.resize(count, 1);
      tokens.slots.resize(count, 0);
      const auto grow = [&](std::vector<float>& values, int32_t heads, int32_t dim, float value) {
        values.resize(values.size() + fresh * static_cast<size_t>(heads) * static_cast<size_t>(dim), value);
      };
      grow(step.q, config.num_q_heads, config.head_dim_qk, 0.0f);
      grow(tokens.k_rows, config.num_kv_heads, config.head_dim_qk, 0.0f);
      grow(tokens.v_rows, config.num_kv_heads, config.head_dim_v, 0.0f);
      grow(out, config.num_q_heads, config.head_dim_v, kUntouched);
      tokens.k = {tokens.k_rows.data(), folio::DType::kFloat32, {size, config.num_kv_heads, config.head_dim_qk}};
      tokens.v = {tokens.v_rows.data(), folio::DType::kFloat32, {size, config.num_kv_heads, config.head_dim_v}};
      forward.batch_size = size;
      forward.req_pool_indices = rows;
      forward.seq_lens = seq_lens;
      forward.out_cache_loc = tokens.slots;
    }

    Step step;
    NewTokens tokens;
    folio::ReqToTokenPool& table;
    std::vector<int32_t> rows, held, seq_lens;
    std::vector<float> out;
    folio::backends::ForwardBatch forward;
  };

  static int32_t shortest(const std::vector<StepEntry>& entries, const std::vector<Request>& requests, int32_t most) {
    for (const StepEntry& entry : entries) most = std::min(most, requests[entry.request].length());
    return most;
  }

  void run(Batch& batch, bool save) {
    const auto row_q = int64_t{config_.num_q_heads} * config_.head_dim_qk;
    const auto row_v = int64_t{config_.num_q_heads} * config_.head_dim_v;
    const auto tokens = static_cast<int64_t>(batch.tokens.slots.size());
    const folio::ConstTensorView q(batch.step.q.data(), folio::DType::kFloat32, {tokens, row_q});
    const folio::TensorView out(batch.out.data(), folio::DType::kFloat32, {tokens, row_v});
    layer_.forward(*backend_, q, batch.tokens.k, batch.tokens.v, batch.forward, out, save);
  }

  void check(Batch& batch, const std::vector<Request>& requests, int32_t window) {
    folio::AttentionConfig config = config_;
    config.window_left = window;
    for (size_t i = 0; i < batch.step.requests.size(); ++i) {
      const Request& request = requests[batch.step.requests[i]];
      check_rows(config, request, batch.step.q_len(i), 0, request.length(), {batch.out, {}},
                 static_cast<size_t>(batch.step.cu_q[i]), features_);
    }
    std::fill(batch.out.begin(), batch.out.end(), kUntouched);
  }

  folio::AttentionConfig config_;
  const folio::KvPool& pool_;
  LayerFeatures features_;
  folio::ReqToTokenPool rows_;
  std::optional<folio::backends::TokenPoolBackend> backend_;
  folio::backends::RadixAttention layer_;
};

}  // namespace serving
