#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/device_test_util.hpp"
#include "folio/backends/flashinfer.hpp"
#include "folio/context.hpp"

namespace folio::inline v0::backends::testing {

/// What outputs are filled with before the step.
inline constexpr std::byte kUnwritten{0x5a};

/// A batch by its lengths, as vLLM's backend tests name them.
struct BatchLengths {
  std::string name;
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> query_lens;
};

/// What a request begins with: the first `tokens` tokens, full pages computed before the step, of an earlier request.
struct SharedStart {
  int32_t from = 0;
  int32_t tokens = 0;
};

/// What a test varies besides the lengths.
struct LayerSetup {
  int32_t num_heads = 4;
  int32_t num_kv_heads = 2;
  int32_t head_size = 32;
  int32_t page_size = 16;
  KvCacheLayout layout = KvCacheLayout::kNhd;
  DType model_dtype = DType::kBFloat16;  ///< float32 is float16 on a GPU, whose kernels take 16 bits
  std::string cache_dtype = "auto";
  bool quantize_query = false;  ///< queries are fp8
  float scale = 0.0f;           ///< 0 = 1 / sqrt(head_size)
  std::optional<int32_t> sliding_window;
  std::optional<float> logits_soft_cap;
  bool sinks = false;
  bool alibi = false;
  float q_scale = 1.0f;
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  bool scales_per_head = false;       ///< KV head h has 1 + h times k_scale and v_scale
  MaskKind mask = MaskKind::kCausal;  ///< what is expected of the layer
  bool window_both_sides = false;     ///< likewise: as many keys to the right as to the left
  int32_t padding_tokens = 0;         ///< rows of q, k, v and output beyond the batch's
  int32_t padding_requests = 0;       ///< requests of length 0 behind the batch's
  int32_t padding_slots = 0;          ///< of the padding tokens, how many the batch counts in (slot -1)
  bool share_kv = false;              ///< the layer reads another layer's cache: its K and V are there already
  bool halves_apart = false;          ///< the cache is [2, pages, ...] in memory: all of K, then all of V
  int32_t shared_prefix = 0;          ///< full pages of tokens that all requests of that length at least have in common
  std::vector<SharedStart> starts;    ///< instead of shared_prefix: [R], of each request its own
  Determinism determinism = Determinism::kRunToRun;
  BackendProfile profile = BackendProfile::kNative;
};

/// One layer, its cache and one step's batch, laid out as an engine would, with NaN wherever nothing may be read:
/// unused slots and pages, the null page 0, padding rows; impossible page ids in unused table entries. Pages are
/// permuted. On a GPU (attention/device_test_util.hpp) the arrays are the same; lengths are their own host copies.
class BatchFixture {
 public:
  /// One request's keys and values as real numbers, as precise as the cache holds them: [position, head, component].
  struct History {
    std::vector<float> k;
    std::vector<float> v;
  };

  BatchFixture(const LayerSetup& setup, const BatchLengths& lengths, uint32_t seed = 1);

  AttentionSpec spec() const;
  EngineConfig engine_config() const;
  FlashInferLayerConfig layer_config() const;
  AttentionLayerScales scales() const;
  FlashInferMetadataBuilder make_builder(const FlashInferImpl& impl) const;

  /// Builds the metadata and runs the layer. Returns what forward returned.
  TensorView run(const FlashInferImpl& impl, FlashInferMetadataBuilder& builder);
  /// The same with a new implementation and builder.
  TensorView run();

  /// Compares the rows of the output that count with attention in float64 (all, or some hundred of a large batch), and
  /// the others with what was there before. Says what is wrong; empty if nothing is.
  std::string wrong_output() const;
  /// Compares the whole cache, element by element, with what it must hold after the step. Likewise.
  std::string wrong_cache() const;

  /// Relative error of what kernels of the fixture's dtypes round probabilities to; 2^-24 where they do not.
  double p_roundoff() const;

  int32_t num_tokens() const { return query_start_loc.back(); }
  /// The queries as they lie in q_memory, packed, wherever `query` points.
  ConstTensorView packed_query() const;
  int32_t padded_rows() const { return num_tokens() + setup.padding_tokens; }

  LayerSetup setup;
  Context context = folio::testing::device_context();
  std::vector<int32_t> query_start_loc;
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> block_table;
  std::vector<int64_t> slot_mapping;
  std::vector<float> alibi_slopes;
  std::vector<float> sinks;
  std::vector<std::byte> cache_memory;
  std::vector<std::byte> q_memory, k_memory, v_memory, out_memory;
  TensorView kv_cache;
  ConstTensorView query, key, value;
  TensorView output;
  CommonAttentionMetadata batch;

 private:
  void lay_out_pages(uint32_t seed);
  void fill_cache_and_inputs(uint32_t seed);
  void point_views();
  DType cache_dtype() const;
  DType q_dtype() const;
  float sm_scale() const;
  float head_scale(int32_t head) const;
  SharedStart start_of(size_t request) const;
  int64_t slot_of(size_t request, int32_t position) const;
  /// Index of an element of K (half 0) or V (half 1) in the cache's memory.
  int64_t cache_index(int64_t slot, int32_t half, int32_t head, int32_t component) const;

  std::vector<float> k_head_scales_, v_head_scales_;
  std::vector<History> history_;
  int64_t num_pages_ = 0;
  int32_t num_columns_ = 0;
  int32_t row_stride_ = 0;
};

/// A decoders' batch of tests/golden/backends/batches.json.
const BatchLengths& backend_batch(const std::string& name);

}  // namespace folio::inline v0::backends::testing
