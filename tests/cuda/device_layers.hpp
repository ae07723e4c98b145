#pragma once

#include <numeric>
#include <random>

#include "device_array.hpp"
#include "folio/backends/flash_attn.hpp"
#include "folio/backends/flashinfer.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::cuda_test {

using namespace folio::backends;

/// The lengths of one step's requests.
struct StepRequests {
  std::vector<int32_t> seq_lens, query_lens;
  int32_t num_tokens() const { return std::accumulate(query_lens.begin(), query_lens.end(), 0); }
};

/// What an engine keeps on a GPU for an attention backend: two layers' tensors, whose addresses stay, and a batch.
class DeviceLayers {
 public:
  static constexpr int32_t kRequests = 8, kTokens = 64, kMaxLen = 700, kPageSize = 16;
  static constexpr int32_t kColumns = (kMaxLen + kPageSize - 1) / kPageSize, kPages = kRequests * kColumns + 1;
  static constexpr int32_t kHeads = 8, kKvHeads = 2, kDim = 64;
  static constexpr size_t kLayers = 2;
  static constexpr size_t kQ = size_t{kTokens} * kHeads * kDim, kKv = size_t{kTokens} * kKvHeads * kDim;
  static constexpr size_t kCache = size_t{kPages} * 2 * kPageSize * kKvHeads * kDim;

  DeviceLayers() { cache.set(random_values(kLayers * kCache)); }

  static EngineConfig engine(DecodeGraphMode graphs, Determinism determinism) {
    EngineConfig config;
    config.model.dtype = DType::kBFloat16;
    config.model.num_attention_heads = kHeads;
    config.model.num_kv_heads = kKvHeads;
    config.model.max_model_len = kMaxLen;
    config.scheduler.max_num_seqs = kRequests;
    config.scheduler.max_num_batched_tokens = kTokens;
    config.speculative = SpeculativeConfig{.num_speculative_tokens = 2, .parallel_drafting = false};
    config.compilation.decode_graph_mode = graphs;
    config.determinism = determinism;
    return config;
  }
  static AttentionSpec spec() { return {kPageSize, kKvHeads, kDim, DType::kBFloat16}; }
  /// Layer 0 has ALiBi and a soft cap, layer 1 a window and sinks.
  template <typename Config>
  static Config layer(size_t index) {
    static const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f, 0.5f, 0.25f, 0.125f, 0.0625f};
    static const std::vector<float> sinks{-1.0f, 0.0f, 1.0f, 2.0f, -2.0f, 0.5f, 0.25f, 0.0f};
    Config config;
    config.num_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_size = kDim;
    config.scale = 0.125f;
    config.model_dtype = DType::kBFloat16;
    if (index == 0) {
      config.alibi_slopes = slopes;
      config.logits_soft_cap = 20.0f;
    } else {
      config.sliding_window = 38;
      config.sinks = ConstTensorView(sinks.data(), DType::kFloat32, {kHeads});
    }
    return config;
  }

  /// A step of those requests, its tokens padded to `padded_tokens`; the first `shared_pages` pages are the first
  /// request's.
  CommonAttentionMetadata set(const StepRequests& requests, int32_t padded_tokens, int32_t shared_pages = 0) {
    const auto count = requests.seq_lens.size();
    std::vector<int32_t> pages(kPages - 1);
    std::iota(pages.begin(), pages.end(), 1);
    std::shuffle(pages.begin(), pages.end(), random);
    std::vector<int32_t>& rows = table_host;
    rows.assign(size_t{kRequests} * kColumns, INT32_MAX);  // unused entries are never read
    std::vector<int64_t> all_slots;
    cu_q_host.assign(1, 0);
    seq_lens_host = requests.seq_lens;
    CommonAttentionMetadata batch;
    for (size_t r = 0; r < count; ++r) {
      const int32_t seq_len = requests.seq_lens[r];
      const int32_t query_len = requests.query_lens[r];
      for (int32_t column = 0; column * kPageSize < seq_len; ++column) {
        const size_t at = r * kColumns + static_cast<size_t>(column);
        rows[at] = column < shared_pages ? pages[static_cast<size_t>(column)] : pages[at];
      }
      cu_q_host.push_back(cu_q_host.back() + query_len);
      for (int32_t position = seq_len - query_len; position < seq_len; ++position) {
        const size_t at = r * kColumns + static_cast<size_t>(position / kPageSize);
        all_slots.push_back(int64_t{rows[at]} * kPageSize + position % kPageSize);
      }
      batch.max_query_len = std::max(batch.max_query_len, query_len);
      batch.max_seq_len = std::max(batch.max_seq_len, seq_len);
    }
    all_slots.resize(kTokens, -1);
    const auto padded = [](std::vector<int32_t> values, size_t size) {
      values.resize(size, -1);
      return values;
    };
    table.set(rows);
    slots.set(all_slots);
    cu_q.set(padded(cu_q_host, kRequests + 1));
    seq_lens.set(padded(seq_lens_host, kRequests));
    q.set(random_values(kLayers * kQ));
    k.set(random_values(kLayers * kKv));
    v.set(random_values(kLayers * kKv));
    batch.where = Where::kDevice;
    batch.query_start_loc = {cu_q.data(), count + 1};
    batch.seq_lens = {seq_lens.data(), count};
    batch.query_start_loc_host = cu_q_host;
    batch.seq_lens_host = seq_lens_host;
    batch.num_reqs = static_cast<int32_t>(count);
    batch.num_actual_tokens = padded_tokens;
    batch.block_table = {table.data(), batch.num_reqs, kColumns, kColumns};
    batch.block_table_host = {table_host.data(), batch.num_reqs, kColumns, kColumns};
    batch.slot_mapping = {slots.data(), static_cast<size_t>(padded_tokens)};
    return batch;
  }

  ConstTensorView query(size_t layer) const {
    return {q.data() + layer * kQ, DType::kBFloat16, {kTokens, kHeads, kDim}};
  }
  ConstTensorView key(size_t layer) const {
    return {k.data() + layer * kKv, DType::kBFloat16, {kTokens, kKvHeads, kDim}};
  }
  ConstTensorView value(size_t layer) const {
    return {v.data() + layer * kKv, DType::kBFloat16, {kTokens, kKvHeads, kDim}};
  }
  TensorView output(size_t layer) const { return {out.data() + layer * kQ, DType::kBFloat16, {kTokens, kHeads, kDim}}; }

  std::vector<uint16_t> random_values(size_t count) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::vector<uint16_t> values(count);
    for (uint16_t& value : values) value = float_to_bfloat16(uniform(random));
    return values;
  }

  std::mt19937 random{5};
  DeviceArray<uint16_t> q{kLayers * kQ}, k{kLayers * kKv}, v{kLayers * kKv}, out{kLayers * kQ}, cache{kLayers * kCache};
  DeviceArray<int32_t> cu_q{kRequests + 1}, seq_lens{kRequests}, table{size_t{kRequests} * kColumns};
  DeviceArray<int64_t> slots{kTokens};
  std::vector<int32_t> cu_q_host, seq_lens_host, table_host;
};

/// The two backends by one set of names.
struct FlashInferSide {
  using Impl = FlashInferImpl;
  using LayerConfig = FlashInferLayerConfig;
  using Builder = FlashInferMetadataBuilder;
  using Options = FlashInferOptions;
  static Options options(DecodeGraphMode) { return {}; }
  static FlashInferMetadata build(Builder& builder, int32_t common_prefix_len, const CommonAttentionMetadata& batch,
                                  Stream stream) {
    return builder.build(common_prefix_len, batch, stream);
  }
  static TensorView cache(uint16_t* data) {
    const auto shape = FlashInferBackend::get_kv_cache_shape(DeviceLayers::kPages, DeviceLayers::kPageSize,
                                                             DeviceLayers::kKvHeads, DeviceLayers::kDim);
    return FlashInferBackend::kv_cache_tensor(data, DType::kBFloat16, shape, KvCacheLayout::kNhd);
  }
  static void write(const Impl&, const DeviceLayers&, size_t, const FlashInferMetadata&, Stream) {}
};
struct FlashAttentionSide {
  using Impl = FlashAttentionImpl;
  using LayerConfig = FlashAttentionLayerConfig;
  using Builder = FlashAttentionMetadataBuilder;
  using Options = FlashAttentionOptions;
  static Options options(DecodeGraphMode graphs) {
    Options options;
    if (graphs == DecodeGraphMode::kFull) options.steps_in_flight = 1;
    return options;
  }
  static FlashAttentionMetadata build(Builder& builder, int32_t common_prefix_len, const CommonAttentionMetadata& batch,
                                      Stream stream) {
    return builder.build(common_prefix_len, batch, /*fast_build=*/false, stream);
  }
  static TensorView cache(uint16_t* data) {
    const auto shape = FlashAttentionBackend::get_kv_cache_shape(DeviceLayers::kPages, DeviceLayers::kPageSize,
                                                                 DeviceLayers::kKvHeads, DeviceLayers::kDim);
    return FlashAttentionBackend::kv_cache_tensor(data, DType::kBFloat16, shape, KvCacheLayout::kNhd);
  }
  static void write(const Impl& impl, const DeviceLayers& layers, size_t layer, const FlashAttentionMetadata& metadata,
                    Stream stream) {
    impl.do_kv_cache_update({}, layers.key(layer), layers.value(layer),
                            cache(layers.cache.data() + layer * DeviceLayers::kCache), metadata.slot_mapping, stream);
  }
};

/// A model of two layers behind a backend.
template <typename Side>
struct BackendModel {
  using Builder = typename Side::Builder;

  explicit BackendModel(const Context& given = Context::cuda(0)) : context(given) {
    for (size_t layer = 0; layer < DeviceLayers::kLayers; ++layer) {
      impls.emplace_back(context, DeviceLayers::layer<typename Side::LayerConfig>(layer));
    }
  }
  Builder make(DecodeGraphMode graphs, Determinism determinism) const {
    return make(DeviceLayers::engine(graphs, determinism), Side::options(graphs));
  }
  Builder make(const EngineConfig& engine, const typename Side::Options& options) const {
    std::vector<AttentionLayer<typename Side::Impl>> layers;
    for (const auto& impl : impls) layers.push_back({"layer" + std::to_string(layers.size()), &impl});
    return Builder(context, DeviceLayers::spec(), layers, engine, options);
  }
  template <typename Metadata>
  void forward(const DeviceLayers& layers, const Metadata& metadata, Stream stream) const {
    for (size_t layer = 0; layer < impls.size(); ++layer) {
      Side::write(impls[layer], layers, layer, metadata, stream);
      impls[layer].forward({}, layers.query(layer), layers.key(layer), layers.value(layer),
                           Side::cache(layers.cache.data() + layer * DeviceLayers::kCache), &metadata,
                           layers.output(layer), {}, stream);
    }
  }

  Context context;
  std::vector<typename Side::Impl> impls;
};

}  // namespace folio::cuda_test
