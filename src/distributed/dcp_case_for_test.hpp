#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "folio/distributed.hpp"

namespace folio::inline v0::distributed::testing {

struct RequestLengths {
  int32_t seq_len = 0;  ///< new tokens included
  int32_t q_len = 0;
};

/// A batch, a model and how the KV cache is divided.
struct DcpSetup {
  std::string name;
  int32_t world = 2;
  int32_t interleave = 1;
  DcpCombine combine = DcpCombine::kAllGatherReduceScatter;
  bool replicated_queries = false;
  bool hnd = false;
  int32_t page_size = 32;
  int32_t heads = 4;  ///< of one rank
  int32_t kv_heads = 2;
  int32_t dim_qk = 16;
  int32_t dim_v = 24;
  DType model = DType::kFloat32;
  DType cache = DType::kFloat32;
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  MaskKind mask = MaskKind::kCausal;
  int32_t window_left = -1;
  bool alibi = false;
  bool sinks = false;
  float soft_cap = 0.0f;
  Determinism determinism = Determinism::kRunToRun;
  int32_t num_cached = 0;
  bool write_new_tokens = true;  ///< into the caches; otherwise the step does, by Rank::new_slots
  int32_t sampled_rows = 0;      ///< of a rank's results, how many are compared; 0 = all
  bool lse = true;               ///< results have LSEs to compare
  int32_t padding_rows = 3;      ///< of q, k, v and out behind the batch
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

  DcpConfig config() const;
  DcpBatch batch() const;
  /// The arguments of one rank. `out` and `lse` are the case's own.
  DcpArgs args(int32_t rank);

  int32_t tokens() const { return cu_q.back(); }
  int32_t rows() const { return tokens() + setup.padding_rows; }

  DcpSetup setup;
  std::vector<int32_t> cu_q{0}, seq_lens;

  struct Rank {
    std::vector<std::byte> q, k, v, out;
    std::vector<std::byte> cache;  ///< K's half, then V's
    std::vector<float> lse;
    std::vector<int32_t> table;
    int64_t num_pages = 0;
    int32_t columns = 0;
    std::vector<int64_t> new_slots;  ///< [T]: where the new tokens belong, -1 = on another rank
    std::vector<float> slopes, sinks;
    DType weights = DType::kFloat32;  ///< what the kernels round softmax weights to
  };
  std::vector<Rank> ranks;

 private:
  KvCacheView cache_view(Rank& rank) const;
  void make_keys(uint32_t seed);
  void make_rank(int32_t rank, uint32_t seed);
  void make_queries(uint32_t seed);

  /// Real keys and values as the step sees them: [all tokens of all requests, kv_heads, dim].
  std::vector<float> keys_, values_;
  std::vector<float> new_keys_, new_values_;  ///< of new tokens, as the model has them: [T, kv_heads, dim]
  std::vector<int32_t> indptr_{0};            ///< rows of keys_ per request
};

}  // namespace folio::inline v0::distributed::testing
