#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "folio/distributed.hpp"

namespace folio::inline v0::distributed::testing {

struct RequestLengths {
  int32_t seq_len = 0;  ///< new tokens included; of cross attention the encoder's
  int32_t q_len = 0;
  int32_t id = -1;  ///< whose values: the same in every case with that seed. -1 = the request's place in the batch
};

/// A batch, a model and how the KV cache is divided.
struct DcpSetup {
  std::string name;
  int32_t world = 2;
  int32_t interleave = 1;
  DcpCombine combine = DcpCombine::kAllGatherReduceScatter;
  bool replicated_queries = false;
  bool all_heads_out = false;
  bool hnd = false;
  int32_t page_size = 32;
  int32_t heads = 4;  ///< of one rank
  int32_t kv_heads = 2;
  int32_t dim_qk = 16;
  int32_t dim_v = 24;
  DType model = DType::kFloat32;
  DType cache = DType::kFloat32;
  DType query = DType::kUnset;    ///< fp8; kUnset = the model's
  DType partial = DType::kUnset;  ///< DcpConfig::partial_dtype
  ScaleGranularity q_granularity = ScaleGranularity::kPerTensor;
  std::vector<float> q_scales;  ///< of fp8 queries, as q_granularity has them (packed); empty = 1
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  MaskKind mask = MaskKind::kCausal;
  int32_t window_left = -1;
  int32_t window_right = -1;
  int32_t attention_chunk = 0;
  bool alibi = false;
  bool sinks = false;
  std::optional<std::array<float, 2>> sink_range;  ///< of the first head of all ranks and of the last; evenly between
  float soft_cap = 0.0f;
  float query_amplitude = 1.0f;  ///< values of q lie in [-a, a); a power of two keeps them the same but for the factor
  float kv_amplitude = 1.0f;
  Determinism determinism = Determinism::kRunToRun;
  int32_t num_cached = 0;
  bool cross = false;            ///< cross attention: every key is cached, or written by the step
  bool encoder = false;          ///< of the engine backends: no token is cached, every query sees every key
  bool write_new_tokens = true;  ///< into the caches; otherwise the step does, by Rank::new_slots
  int32_t sampled_rows = 0;      ///< of a rank's results, how many are compared; 0 = all
  bool lse = true;               ///< results have LSEs to compare
  int32_t padding_rows = 3;      ///< of q, k, v and out behind the batch
  int32_t padding_slots = 0;     ///< of those, how many Rank::new_slots counts in, as -1
  std::vector<RequestLengths> requests;
};

/// A whole problem with every rank's part of it. NaN wherever a rank may not read: slots that nobody owns, padding
/// rows.
class DcpCase {
 public:
  explicit DcpCase(const DcpSetup& setup, uint32_t seed = 1);

  /// One rank's step: builds a DcpAttention, plans, runs into NaN-filled memory, and keeps what came out.
  void run(ProcessGroup& group, const Context& context);

  /// The same with a DcpAttention that the caller has made.
  void run(DcpAttention& attention);

  /// All ranks, in threads, each with a context of its own.
  void run_in_threads();

  /// Compares one rank's outputs and LSEs with attention in float64 over the undivided cache. Empty if all is well.
  std::string wrong_output(int32_t rank) const;
  std::string wrong_outputs() const;  ///< of all ranks
  /// Compares one rank's cache, byte by byte, with what it must hold once the step has written the new tokens: theirs
  /// in their slots and everything else as it was. Only where the case has not written them itself. Empty if all is
  /// well.
  std::string wrong_cache(int32_t rank) const;

  DcpConfig config() const;
  DcpBatch batch() const;
  /// The arguments of one rank. `out` and `lse` are the case's own.
  DcpArgs args(int32_t rank);

  int32_t tokens() const { return cu_q.back(); }
  int32_t rows() const { return tokens() + setup.padding_rows; }

  DcpSetup setup;
  int32_t out_heads() const { return setup.heads * (setup.all_heads_out ? setup.world : 1); }
  /// Rows of Rank::k and v.
  int32_t key_rows() const { return (setup.cross ? indptr_.back() : tokens()) + setup.padding_rows; }
  DType query_dtype() const { return setup.query == DType::kUnset ? setup.model : setup.query; }
  /// The scale of fp8 queries; it points into the setup.
  Scale q_scale() const;
  /// Sinks of all ranks' heads.
  const std::vector<float>& all_sinks() const { return all_sinks_; }

  std::vector<int32_t> cu_q{0}, seq_lens;

  struct Rank {
    std::vector<std::byte> q, k, v, out;
    std::vector<std::byte> cache;             ///< K's half, then V's
    std::vector<std::byte> cache_afterwards;  ///< with the new tokens, where the step writes them
    std::vector<float> lse;
    std::vector<int32_t> table;
    int64_t num_pages = 0;
    int32_t columns = 0;
    std::vector<int64_t> new_slots;  ///< where the tokens that the step writes belong, -1 = on another rank
    std::vector<float> slopes, sinks;
    DType p_dtype = DType::kFloat32;  ///< what the kernels round probabilities p to
  };
  std::vector<Rank> ranks;

 private:
  KvCacheView cache_view(const Rank& rank, std::vector<std::byte>& memory) const;
  uint32_t id_of(size_t request) const;
  /// Keys of a request that the step brings with it.
  int32_t num_new(size_t request) const;
  void make_keys(uint32_t seed);
  void make_rank(int32_t rank, uint32_t seed);
  void make_queries(uint32_t seed);

  /// Real keys and values as the step sees them: [all tokens of all requests, kv_heads, dim].
  std::vector<float> keys_, values_;
  std::vector<std::byte> model_keys_, model_values_;  ///< the same in the model's dtype
  std::vector<float> new_keys_, new_values_;          ///< of new tokens, as the model has them: [.., kv_heads, dim]
  std::vector<float> all_sinks_;                      ///< of all ranks
  std::vector<int32_t> indptr_{0};                    ///< rows of keys_ per request
};

}  // namespace folio::inline v0::distributed::testing
