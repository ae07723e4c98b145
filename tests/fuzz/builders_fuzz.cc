// The metadata builders and layers of both engine backends, from arbitrary offsets, lengths, tables, slots and options.
// A step that is accepted must be attention over the keys that its table names, by the float64 oracle; what is refused
// leaves output and cache alone.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention_oracle.hpp"
#include "calls.hpp"
#include "folio/backends/flash_attn.hpp"
#include "folio/backends/flashinfer.hpp"

namespace {

using namespace folio::backends;
using folio::DType;
using Ints = std::vector<int32_t>;

constexpr float kUntouched = -12345.0f;
constexpr int64_t kMostRows = 64;  // of a step that is run

/// It looks at every page id: arbitrary ones are refused, not read.
const folio::Context& validating_context() {
  static const folio::Context context = [] {
    folio::ContextOptions options;
    options.num_threads = 1;
    options.validate_tables = true;
    return folio::Context::cpu(options);
  }();
  return context;
}

/// Mostly in [low, high], sometimes anything.
int32_t take_usual(FuzzInput& input, int32_t low, int32_t high) {
  const auto kind = input.take<uint8_t>();
  return kind < 252 ? low + kind % (high - low + 1) : input.take<int32_t>();
}

/// A group of one layer. Sizes that a cache of this target has are `sensible`; others are given to constructors only.
struct Model {
  explicit Model(FuzzInput& input) {
    spec.num_kv_heads = take_usual(input, 1, 2);
    const bool small = spec.num_kv_heads >= 1 && spec.num_kv_heads <= 2;
    num_heads = small ? spec.num_kv_heads * input.take_between(1, 2) : take_usual(input, 1, 4);
    spec.head_size = input.take<uint8_t>() < 250 ? 8 * input.take_between(1, 2) : input.take<int32_t>();
    spec.page_size = take_usual(input, 1, 4);
    spec.dtype = DType::kFloat32;
    num_pages = input.take_between(1, 16);
    const auto kinds = input.take<uint8_t>();
    hnd = kinds % 2 != 0;
    if (kinds % 3 == 0) sliding_window = take_usual(input, 1, 9);
    if (kinds % 5 == 0) logits_soft_cap = 2.0f;
    engine.model.dtype = DType::kFloat32;
    engine.model.num_attention_heads = num_heads;
    engine.model.num_kv_heads = spec.num_kv_heads;
    engine.cache.layout = hnd ? KvCacheLayout::kHnd : KvCacheLayout::kNhd;
    engine.determinism = static_cast<folio::Determinism>(input.take_between(0, 3));
    const auto limits = input.take<uint8_t>();
    if (limits % 4 == 1) engine.scheduler.max_num_seqs = take_usual(input, 1, 5);
    if (limits % 8 >= 6) engine.model.max_model_len = take_usual(input, 1, 30);
    if (limits % 16 >= 14) engine.scheduler.max_num_batched_tokens = take_usual(input, 1, 40);
    if (limits >= 224) engine.compilation.decode_graph_mode = DecodeGraphMode::kFull;
    if (limits >= 240) engine.compilation.max_capture_size = take_usual(input, 1, 8);
    if (limits % 32 == 3) engine.speculative = SpeculativeConfig{take_usual(input, 1, 3), false};
    if (limits % 64 == 5) engine.use_block_table_kernels = true;
    sensible = small && spec.head_size >= 8 && spec.head_size <= 16 && spec.page_size >= 1 && spec.page_size <= 4;
    if (!sensible) return;
    elements = num_pages * spec.page_size * spec.num_kv_heads * spec.head_size;
    strides = hnd ? folio::KvStrides{spec.page_size * spec.num_kv_heads * spec.head_size, spec.head_size,
                                     spec.page_size * spec.head_size}
                  : folio::KvStrides{spec.page_size * spec.num_kv_heads * spec.head_size,
                                     spec.num_kv_heads * spec.head_size, spec.head_size};
  }

  /// Where component `i` of all heads of a slot lies.
  size_t at(int64_t slot, int64_t i) const {
    return static_cast<size_t>(slot / spec.page_size * strides.page + slot % spec.page_size * strides.token +
                               i / spec.head_size * strides.head + i % spec.head_size);
  }

  /// Both halves, K in front; slot s is row s of the oracle.
  std::vector<float> cache() const {
    std::vector<float> values(static_cast<size_t>(2 * elements));
    for (int64_t slot = 0; slot < num_pages * spec.page_size; ++slot) {
      for (int64_t i = 0; i < int64_t{spec.num_kv_heads} * spec.head_size; ++i) {
        values[at(slot, i)] = oracle::component(oracle::kKey, slot, i);
        values[static_cast<size_t>(elements) + at(slot, i)] = oracle::component(oracle::kValue, slot, i);
      }
    }
    return values;
  }

  folio::AttentionConfig attention() const {
    folio::AttentionConfig config;
    config.num_q_heads = num_heads;
    config.num_kv_heads = spec.num_kv_heads;
    config.head_dim_qk = config.head_dim_v = spec.head_size;
    config.q = config.kv = DType::kFloat32;
    config.window_left = sliding_window ? *sliding_window - 1 : -1;
    return config;
  }

  template <typename LayerConfig>
  LayerConfig layer() const {
    LayerConfig config;
    config.num_heads = num_heads;
    config.head_size = spec.head_size;
    config.scale = 0.25f;
    config.num_kv_heads = spec.num_kv_heads;
    config.sliding_window = sliding_window;
    config.logits_soft_cap = logits_soft_cap;
    config.model_dtype = DType::kFloat32;
    return config;
  }

  AttentionSpec spec;
  EngineConfig engine;
  int32_t num_heads = 0;
  std::optional<int32_t> sliding_window;
  std::optional<float> logits_soft_cap;
  int64_t num_pages = 0, elements = 0;
  folio::KvStrides strides;
  bool hnd = false, sensible = false;
};

/// A batch whose arrays are mostly in agreement.
struct Batch {
  Batch(FuzzInput& input, const Model& model) {
    const auto count = static_cast<size_t>(input.take_between(0, 4));
    for (size_t r = 0; r < count; ++r) {
      const int32_t q_len = input.take<uint8_t>() % 2 == 0 ? 1 : input.take_between(0, 6);
      starts.push_back(starts.back() + q_len);
      lens.push_back(q_len + (input.take<uint8_t>() % 4 == 0 ? 0 : input.take_between(0, 12)));
    }
    const int spoilt = input.take<uint8_t>() % 32;  // half of them not at all
    const auto pick = [&](Ints& values) {
      if (!values.empty()) values[input.take<uint8_t>() % values.size()] = input.take_length(16);
    };
    if (spoilt == 1) pick(starts);
    if (spoilt == 2) pick(lens);
    if (spoilt == 3) starts = input.take_lengths(input.take<uint8_t>() % 5, 8);
    view.num_reqs = spoilt == 4 ? input.take_length(5) : static_cast<int32_t>(count);
    view.num_actual_tokens = starts.empty() ? 0 : starts.back();
    if (spoilt == 5) view.num_actual_tokens = input.take_length(20);
    for (size_t r = 0; r < count && r + 1 < starts.size(); ++r) {
      const int64_t q_len = int64_t{starts[r + 1]} - starts[r];
      view.max_query_len = std::max(view.max_query_len, static_cast<int32_t>(std::clamp<int64_t>(q_len, 0, 1000)));
    }
    for (const int32_t len : lens) view.max_seq_len = std::max(view.max_seq_len, len);
    if (spoilt == 6) view.max_query_len = input.take_length(8);
    if (spoilt == 7) view.max_seq_len = input.take_length(20);
    const int32_t page = std::clamp(model.spec.page_size, 1, 8);
    columns = 18 / page + 1;
    stride = columns + input.take_between(0, 2);
    // Neighbours begin alike more often than not.
    for (size_t i = 0; i < count * static_cast<size_t>(stride); ++i) {
      const bool same = i >= static_cast<size_t>(stride) && input.take<uint8_t>() % 4 != 0;
      table.push_back(same ? table[i - static_cast<size_t>(stride)]
                           : take_usual(input, 0, static_cast<int32_t>(model.num_pages) - 1));
    }
    view.block_table = {table.data(), static_cast<int32_t>(count), columns, stride};
    if (spoilt == 8) view.block_table.num_rows = input.take_length(5);
    if (spoilt == 9) view.block_table.num_columns = input.take_length(stride);
    if (spoilt == 10) view.block_table.data = nullptr;
    if (spoilt == 11) view.causal = false;
    // No new key is stored, but where slots are spoilt: the cache then stays what the oracle has.
    slots.assign(static_cast<size_t>(std::clamp(view.num_actual_tokens, 0, 64)), -1);
    if (spoilt == 12 && !slots.empty()) slots.back() = model.num_pages * page + input.take<uint8_t>();
    if (spoilt == 13) slots.resize(input.take<uint8_t>() % 70, -1);
    if (spoilt == 14) upper = input.take_lengths(input.take<uint8_t>() % 6, 20);
    if (spoilt == 15) prefilling.assign(input.take<uint8_t>() % 6, input.take<uint8_t>() % 3);
    view.query_start_loc = starts;
    view.seq_lens = lens;
    view.slot_mapping = slots;
    view.seq_lens_host_upper_bound = upper;
    view.is_prefilling = prefilling;
    common_prefix = input.take<uint8_t>() < 240 ? page * input.take_between(0, 4) : input.take_length(20);
    // Tokens that all name the first one's pages for: what the engine promises is not more.
    for (size_t r = 0; r < count; ++r) {
      int32_t same = 0;
      while (same < columns &&
             table[static_cast<size_t>(same)] == table[r * static_cast<size_t>(stride) + static_cast<size_t>(same)]) {
        ++same;
      }
      if (common_prefix > 0) common_prefix = std::min(common_prefix, same * page);
    }
    if (count == 0 && common_prefix > 0) common_prefix = 0;
  }

  Ints starts = {0}, lens, table, upper;
  std::vector<int64_t> slots;
  std::vector<uint8_t> prefilling;
  int32_t columns = 0, stride = 0, common_prefix = 0;
  CommonAttentionMetadata view;
};

/// Whether a request's keys lie in a page that the cache does not have.
bool names_bad_pages(const Model& model, const CommonAttentionMetadata& view) {
  if (view.block_table.data == nullptr) return false;
  for (int32_t r = 0; r < view.num_reqs; ++r) {
    for (int32_t p = 0; p < view.seq_lens[static_cast<size_t>(r)]; p += model.spec.page_size) {
      const int32_t page = view.block_table.data[r * view.block_table.row_stride + p / model.spec.page_size];
      if (page < 0 || page >= model.num_pages) return true;
    }
  }
  return false;
}

/// `run(q, k, v, cache, out)` of an accepted step against the oracle.
template <typename Run>
void check_step(const Model& model, const Batch& batch, const folio::TensorView& layout, const Run& run) {
  const CommonAttentionMetadata& view = batch.view;
  const int64_t tokens = view.num_actual_tokens;
  if (tokens > kMostRows) return;
  const int64_t heads = model.num_heads, kv_heads = model.spec.num_kv_heads, dim = model.spec.head_size;
  std::vector<float> cache = model.cache();
  const std::vector<float> before = cache;
  const std::vector<float> q = oracle::rows(oracle::kQuery, tokens, heads * dim);
  const std::vector<float> fresh(static_cast<size_t>(tokens * kv_heads * dim), 1000.0f);
  std::vector<float> out(static_cast<size_t>(tokens * heads * dim), kUntouched);
  folio::TensorView tensor = layout;
  tensor.data = cache.data();
  const folio::ConstTensorView k(fresh.data(), DType::kFloat32, {tokens, kv_heads, dim});
  const bool done = accepted([&] {
    run({q.data(), DType::kFloat32, {tokens, heads, dim}}, k, tensor,
        folio::TensorView(out.data(), DType::kFloat32, {tokens, heads, dim}));
  });
  FUZZ_CHECK(cache == before);
  if (!done) {
    // Validation finds a page that is not there when its part of the batch is run: parts before it are written then.
    FUZZ_CHECK(names_bad_pages(model, view) ||
               std::all_of(out.begin(), out.end(), [](float x) { return x == kUntouched; }));
    return;
  }
  folio::AttentionConfig config = model.attention();
  if (!view.causal && !model.sliding_window) config.mask = folio::MaskKind::kNone;
  folio::AttentionArgs args;
  args.sm_scale = 0.25f;
  args.logits_soft_cap = model.logits_soft_cap.value_or(0.0f);
  for (int32_t r = 0; r < view.num_reqs; ++r) {
    const auto at = static_cast<size_t>(r);
    oracle::Request request;
    request.first_row = view.query_start_loc[at];
    request.q_len = view.query_start_loc[at + 1] - view.query_start_loc[at];
    for (int32_t p = 0; p < view.seq_lens[at]; ++p) {
      const int32_t page = view.block_table.data[r * view.block_table.row_stride + p / model.spec.page_size];
      request.keys.push_back(int64_t{page} * model.spec.page_size + p % model.spec.page_size);
    }
    oracle::check(config, args, request, out, nullptr, folio::LseBase::kE);
  }
}

/// The cache's tensor without memory: [pages, 2, ...] or [2, pages, ...].
folio::TensorView cache_tensor(const Model& model, bool halves_first) {
  const int64_t page_size = model.spec.page_size, heads = model.spec.num_kv_heads, dim = model.spec.head_size;
  folio::TensorView tensor(nullptr, DType::kFloat32, {model.num_pages, 2, page_size, heads, dim});
  tensor.strides = {model.strides.page, model.elements, model.strides.token, model.strides.head, 1};
  if (halves_first) {
    std::swap(tensor.shape[0], tensor.shape[1]);
    std::swap(tensor.strides[0], tensor.strides[1]);
  }
  return tensor;
}

void check_flashinfer(FuzzInput& input) {
  const Model model(input);
  FlashInferOptions options;
  options.cascade = static_cast<CascadeMode>(take_usual(input, 0, 2));
  options.max_cascade_levels = take_usual(input, 1, 4);
  if (input.take<uint8_t>() == 255) options.capture_sizes = input.take_lengths(input.take<uint8_t>() % 4, 8);
  std::optional<FlashInferImpl> impl;
  std::optional<FlashInferMetadataBuilder> builder;
  if (!accepted([&] {
        impl.emplace(validating_context(), model.layer<FlashInferLayerConfig>());
        const AttentionLayer<FlashInferImpl> named{"layer", &*impl};
        builder.emplace(validating_context(), model.spec, std::span(&named, 1), model.engine, options);
      })) {
    return;
  }
  for (int steps = input.take_between(1, 3); steps > 0; --steps) {
    const Batch batch(input, model);
    std::optional<FlashInferMetadata> metadata;
    if (!accepted([&] { metadata = builder->build(batch.common_prefix, batch.view); }) || !model.sensible) continue;
    FUZZ_CHECK(metadata->split.num_decodes + metadata->split.num_prefills == batch.view.num_reqs);
    accepted([&] { static_cast<void>(builder->paged_kv_arrays(*metadata)); });
    check_step(model, batch, cache_tensor(model, false),
               [&](const folio::ConstTensorView& q, const folio::ConstTensorView& fresh, const folio::TensorView& cache,
                   const folio::TensorView& out) { impl->forward({}, q, fresh, fresh, cache, &*metadata, out); });
  }
}

void check_flash_attention(FuzzInput& input) {
  const Model model(input);
  FlashAttentionOptions options;
  options.cascade = static_cast<CascadeMode>(take_usual(input, 0, 2));
  options.max_cascade_levels = take_usual(input, 1, 4);
  options.steps_in_flight = input.take<uint8_t>() < 250 ? input.take_between(1, 3) : -input.take<uint8_t>();
  const auto kinds = input.take<uint8_t>();
  if (kinds % 3 != 0) options.aot_schedule = kinds % 3 == 1;
  if (kinds % 8 == 7) options.max_num_splits_for_graphs = take_usual(input, 1, 4);
  std::optional<FlashAttentionImpl> impl;
  std::optional<FlashAttentionMetadataBuilder> builder;
  if (!accepted([&] {
        impl.emplace(validating_context(), model.layer<FlashAttentionLayerConfig>());
        const AttentionLayer<FlashAttentionImpl> named{"layer", &*impl};
        builder.emplace(validating_context(), model.spec, std::span(&named, 1), model.engine, options);
      })) {
    return;
  }
  for (int steps = input.take_between(1, 3); steps > 0; --steps) {
    const Batch batch(input, model);
    const bool fast_build = input.take<uint8_t>() % 4 == 0;
    std::optional<FlashAttentionMetadata> metadata;
    if (!accepted([&] { metadata = builder->build(batch.common_prefix, batch.view, fast_build); })) continue;
    if (!model.sensible) continue;
    check_step(model, batch, cache_tensor(model, true),
               [&](const folio::ConstTensorView& q, const folio::ConstTensorView& fresh, const folio::TensorView& cache,
                   const folio::TensorView& out) {
                 impl->do_kv_cache_update({}, fresh, fresh, cache, metadata->slot_mapping);
                 impl->forward({}, q, fresh, fresh, cache, &*metadata, out);
               });
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  if (input.take<uint8_t>() % 2 == 0) {
    check_flashinfer(input);
  } else {
    check_flash_attention(input);
  }
  return 0;
}
