#include "backends/flashinfer/batch_test_util.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/golden_test.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends::testing {
namespace {

constexpr int32_t kFirstPage = 1;        ///< page 0 is the null page: no request owns it
constexpr int32_t kNoPage = 0x7ffffff0;  ///< in table entries that may not be read
constexpr std::byte kPoison{0xff};       ///< a NaN in every dtype

/// Uniform in [-1, 1), the same on every platform.
class Uniform {
 public:
  explicit Uniform(uint32_t seed) : random_(seed) {}
  float operator()() { return static_cast<float>(random_() >> 8) * 0x1p-23f - 1.0f; }

 private:
  std::mt19937 random_;
};

/// Rounds `value` to what an element of `dtype` holds under `scale`, stores it, and returns the real number it stands
/// for.
float store(std::vector<std::byte>& memory, DType dtype, int64_t index, float value, float scale = 1.0f) {
  store_from_float(memory.data(), dtype, index, value / scale);
  return load_as_float(memory.data(), dtype, index) * scale;
}

/// [n, list]: the list n times.
std::vector<int32_t> repeated(const nlohmann::json& entry) {
  const auto once = entry.at(1).get<std::vector<int32_t>>();
  std::vector<int32_t> values;
  for (auto n = entry.at(0).get<int32_t>(); n > 0; --n) values.insert(values.end(), once.begin(), once.end());
  return values;
}

float rounded(DType dtype, float value) {
  float memory = 0.0f;
  store_from_float(&memory, dtype, 0, value);
  return load_as_float(&memory, dtype, 0);
}

}  // namespace

BatchFixture::BatchFixture(const LayerSetup& given, const BatchLengths& lengths, uint32_t seed)
    : setup(given), query_start_loc{0}, seq_lens(lengths.seq_lens) {
  if (folio::testing::on_gpu() && setup.model_dtype == DType::kFloat32) setup.model_dtype = DType::kFloat16;
  for (int32_t len : lengths.query_lens) query_start_loc.push_back(query_start_loc.back() + len);
  for (int32_t i = 0; i < setup.padding_requests; ++i) {
    query_start_loc.push_back(query_start_loc.back());
    seq_lens.push_back(0);
  }
  if (setup.sinks) {
    for (int32_t head = 0; head < setup.num_heads; ++head) {
      sinks.push_back(-1.0f + 2.0f * static_cast<float>(head) / static_cast<float>(std::max(1, setup.num_heads - 1)));
    }
  }
  if (setup.alibi) {
    for (int32_t head = 0; head < setup.num_heads; ++head) alibi_slopes.push_back(std::ldexp(0.5f, -head));
  }
  for (int32_t head = 0; head < setup.num_kv_heads; ++head) {
    k_head_scales_.push_back(setup.k_scale * head_scale(head));
    v_head_scales_.push_back(setup.v_scale * head_scale(head));
  }
  lay_out_pages(seed);
  fill_cache_and_inputs(seed);
  point_views();
}

DType BatchFixture::cache_dtype() const {
  return kv_cache_dtype_from_name(setup.cache_dtype, setup.model_dtype);
}
DType BatchFixture::q_dtype() const {
  return setup.quantize_query ? DType::kFloat8E4M3 : setup.model_dtype;
}
float BatchFixture::sm_scale() const {
  return setup.scale > 0.0f ? setup.scale : 1.0f / std::sqrt(static_cast<float>(setup.head_size));
}

void BatchFixture::lay_out_pages(uint32_t seed) {
  num_columns_ = 1;
  int32_t num_used = 0;
  for (int32_t len : seq_lens) {
    const int32_t pages = (len + setup.page_size - 1) / setup.page_size;  // an upper bound where pages are shared
    num_columns_ = std::max(num_columns_, pages);
    num_used += pages;
  }
  row_stride_ = num_columns_ + 3;
  num_pages_ = kFirstPage + num_used + 2;
  std::vector<int32_t> pages(static_cast<size_t>(num_pages_ - kFirstPage));
  std::iota(pages.begin(), pages.end(), kFirstPage);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(seed));

  block_table.assign(seq_lens.size() * static_cast<size_t>(row_stride_), kNoPage);
  auto next = pages.begin();
  for (size_t request = 0; request < seq_lens.size(); ++request) {
    for (int32_t at = 0; at < seq_lens[request]; at += setup.page_size) {
      const auto column = static_cast<size_t>(at / setup.page_size);
      const SharedStart start = start_of(request);
      const size_t shared = static_cast<size_t>(start.from) * static_cast<size_t>(row_stride_) + column;
      block_table[request * static_cast<size_t>(row_stride_) + column] =
          at < start.tokens ? block_table[shared] : *next++;
    }
  }
}

float BatchFixture::head_scale(int32_t head) const {
  return setup.scales_per_head ? static_cast<float>(1 + head) : 1.0f;
}

SharedStart BatchFixture::start_of(size_t request) const {
  if (!setup.starts.empty()) return request < setup.starts.size() ? setup.starts[request] : SharedStart{};
  return {0, request > 0 && seq_lens[request] >= setup.shared_prefix ? setup.shared_prefix : 0};
}

int64_t BatchFixture::slot_of(size_t request, int32_t position) const {
  const size_t column = static_cast<size_t>(position / setup.page_size);
  return int64_t{block_table[request * static_cast<size_t>(row_stride_) + column]} * setup.page_size +
         position % setup.page_size;
}

int64_t BatchFixture::cache_index(int64_t slot, int32_t half, int32_t head, int32_t component) const {
  const auto& strides = kv_cache.strides;
  return slot / setup.page_size * strides[0] + half * strides[1] + slot % setup.page_size * strides[2] +
         head * strides[3] + component;
}

void BatchFixture::fill_cache_and_inputs(uint32_t seed) {
  const auto shape =
      FlashInferBackend::get_kv_cache_shape(num_pages_, setup.page_size, setup.num_kv_heads, setup.head_size);
  kv_cache = FlashInferBackend::kv_cache_tensor(nullptr, DType::kUnset, shape, setup.layout);
  if (setup.halves_apart) {
    kv_cache.strides[0] /= 2;
    kv_cache.strides[1] = kv_cache.strides[0] * num_pages_;
  }
  const int64_t cache_elements = num_pages_ * 2 * setup.page_size * setup.num_kv_heads * setup.head_size;
  cache_memory.assign(static_cast<size_t>(cache_elements * size_of(cache_dtype())), kPoison);
  const auto rows = static_cast<size_t>(padded_rows());
  const size_t kv_row = static_cast<size_t>(setup.num_kv_heads * setup.head_size);
  const size_t q_row = static_cast<size_t>(setup.num_heads * setup.head_size);
  const auto model_bytes = static_cast<size_t>(size_of(setup.model_dtype));
  k_memory.assign(rows * kv_row * model_bytes, kPoison);
  v_memory = k_memory;
  q_memory.assign(rows * q_row * static_cast<size_t>(size_of(q_dtype())), kPoison);
  out_memory.assign(rows * q_row * model_bytes, kUnwritten);

  Uniform uniform(seed);
  // New tokens come as K and V rows; what the cache will make of them is found in a buffer of its own.
  std::vector<std::byte> elsewhere(4);
  history_.resize(seq_lens.size());
  for (size_t request = 0; request < seq_lens.size(); ++request) {
    const int32_t query_len = query_start_loc[request + 1] - query_start_loc[request];
    const int32_t first_new = seq_lens[request] - query_len;
    const SharedStart start = start_of(request);
    const History& from = history_[static_cast<size_t>(start.from)];
    for (int32_t position = 0; position < seq_lens[request]; ++position) {
      const int64_t slot = slot_of(request, position);
      const bool is_new = position >= first_new;
      const int64_t row = query_start_loc[request] + (position - first_new);
      for (int32_t i = 0; i < setup.num_kv_heads * setup.head_size; ++i) {
        const int32_t head = i / setup.head_size;
        const int32_t component = i % setup.head_size;
        if (position < start.tokens) {
          const auto at = static_cast<size_t>(position * setup.num_kv_heads * setup.head_size + i);
          history_[request].k.push_back(from.k[at]);
          history_[request].v.push_back(from.v[at]);
          continue;
        }
        const float k = rounded(setup.model_dtype, uniform());
        const float v = rounded(setup.model_dtype, 2.0f * uniform());
        const bool in_cache = !is_new || setup.share_kv;
        std::vector<std::byte>& memory = in_cache ? cache_memory : elsewhere;
        const int64_t k_index = in_cache ? cache_index(slot, 0, head, component) : 0;
        const int64_t v_index = in_cache ? cache_index(slot, 1, head, component) : 0;
        history_[request].k.push_back(store(memory, cache_dtype(), k_index, k, setup.k_scale * head_scale(head)));
        history_[request].v.push_back(store(memory, cache_dtype(), v_index, v, setup.v_scale * head_scale(head)));
        if (is_new) {
          store(k_memory, setup.model_dtype, row * static_cast<int64_t>(kv_row) + i, k);
          store(v_memory, setup.model_dtype, row * static_cast<int64_t>(kv_row) + i, v);
        }
      }
      if (is_new) slot_mapping.push_back(slot);
    }
  }
  Uniform query_values(seed + 1);  // apart, so that a request's queries do not depend on the requests behind it
  for (int64_t i = 0; i < num_tokens() * static_cast<int64_t>(q_row); ++i) {
    store(q_memory, q_dtype(), i, 2.0f * query_values());
  }
  slot_mapping.insert(slot_mapping.end(), static_cast<size_t>(setup.padding_slots), -1);
}

ConstTensorView BatchFixture::packed_query() const {
  return {q_memory.data(), q_dtype(), {padded_rows(), setup.num_heads, setup.head_size}};
}

void BatchFixture::point_views() {
  kv_cache.data = cache_memory.data();
  query = packed_query();
  if (!setup.share_kv) {
    key = ConstTensorView(k_memory.data(), setup.model_dtype, {padded_rows(), setup.num_kv_heads, setup.head_size});
    value = ConstTensorView(v_memory.data(), setup.model_dtype, {padded_rows(), setup.num_kv_heads, setup.head_size});
  }
  output = TensorView(out_memory.data(), setup.model_dtype, {padded_rows(), setup.num_heads, setup.head_size});

  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.num_reqs = static_cast<int32_t>(seq_lens.size());
  batch.num_actual_tokens = num_tokens() + setup.padding_slots;
  for (int32_t i = 0; i < batch.num_reqs; ++i) batch.max_query_len = std::max(batch.max_query_len, batch.query_len(i));
  for (int32_t len : seq_lens) batch.max_seq_len = std::max(batch.max_seq_len, len);
  batch.block_table = {block_table.data(), batch.num_reqs, num_columns_, row_stride_};
  batch.slot_mapping = slot_mapping;
  if (folio::testing::on_gpu()) batch.where = Where::kDevice;
  batch.query_start_loc_host = query_start_loc;
  batch.seq_lens_host = seq_lens;
  batch.block_table_host = batch.block_table;
}

AttentionSpec BatchFixture::spec() const {
  return {setup.page_size, setup.num_kv_heads, setup.head_size, cache_dtype()};
}

EngineConfig BatchFixture::engine_config() const {
  EngineConfig config;
  config.model.dtype = setup.model_dtype;
  config.model.num_attention_heads = setup.num_heads;
  config.model.num_kv_heads = setup.num_kv_heads;
  config.cache.cache_dtype = setup.cache_dtype;
  config.cache.layout = setup.layout;
  config.determinism = setup.determinism;
  return config;
}

FlashInferLayerConfig BatchFixture::layer_config() const {
  FlashInferLayerConfig config;
  config.num_heads = setup.num_heads;
  config.head_size = setup.head_size;
  config.scale = sm_scale();
  config.num_kv_heads = setup.num_kv_heads;
  config.alibi_slopes = alibi_slopes;
  config.sliding_window = setup.sliding_window;
  config.kv_cache_dtype = setup.cache_dtype;
  config.model_dtype = setup.model_dtype;
  config.logits_soft_cap = setup.logits_soft_cap;
  config.profile = setup.profile;
  if (setup.share_kv) config.kv_sharing_target_layer_name = "model.layers.0.attn";
  if (setup.sinks) config.sinks = ConstTensorView(sinks.data(), DType::kFloat32, {setup.num_heads});
  return config;
}

AttentionLayerScales BatchFixture::scales() const {
  AttentionLayerScales scales;
  scales.q.value = setup.q_scale;
  scales.k.value = setup.k_scale;
  scales.v.value = setup.v_scale;
  if (setup.scales_per_head) {
    scales.k = {1.0f, k_head_scales_.data(), ScaleGranularity::kPerHead, 0};
    scales.v = {1.0f, v_head_scales_.data(), ScaleGranularity::kPerHead, 0};
  }
  return scales;
}

FlashInferMetadataBuilder BatchFixture::make_builder(const FlashInferImpl& impl) const {
  const std::vector<AttentionLayer<FlashInferImpl>> layers{{"model.layers.1.attn", &impl}};
  FlashInferOptions options;
  options.profile = setup.profile;
  options.quantize_query = setup.quantize_query;
  return FlashInferMetadataBuilder(context, spec(), layers, engine_config(), options);
}

TensorView BatchFixture::run(const FlashInferImpl& impl, FlashInferMetadataBuilder& builder) {
  const FlashInferMetadata metadata = builder.build(0, batch);
  if (!FlashInferBackend::forward_includes_kv_cache_update(impl.profile())) {
    impl.do_kv_cache_update(scales(), key, value, kv_cache, metadata.slot_mapping);
  }
  return impl.forward(scales(), query, key, value, kv_cache, &metadata, output);
}

TensorView BatchFixture::run() {
  const FlashInferImpl impl(context, layer_config());
  FlashInferMetadataBuilder builder = make_builder(impl);
  return run(impl, builder);
}

const BatchLengths& backend_batch(const std::string& name) {
  static const std::vector<BatchLengths> batches = [] {
    std::vector<BatchLengths> all;
    for (const auto& batch : folio::testing::golden_cases("backends/batches", "decoder")) {
      all.push_back({batch.name, repeated(batch.data.at("seq_lens")), repeated(batch.data.at("query_lens"))});
    }
    return all;
  }();
  return *std::ranges::find(batches, name, &BatchLengths::name);
}

}  // namespace folio::inline v0::backends::testing
