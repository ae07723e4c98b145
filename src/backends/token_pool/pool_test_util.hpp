#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/device_test_util.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/distributed.hpp"
#include "folio/pools.hpp"

namespace folio::inline v0::backends::testing {

/// Where a request's pages lie.
enum class SlotLayout { kShuffled, kInterleaved, kDescending };

/// What a test varies.
struct PoolSetup {
  int32_t num_heads = 4;
  int32_t num_kv_heads = 2;
  int32_t head_dim = 16;
  int32_t v_head_dim = 16;
  DType q_dtype = DType::kFloat32;  ///< on a GPU, whose kernels take 16 bits, float32 is float16; so below
  DType kv_dtype = DType::kFloat32;
  int32_t page_size = 1;         ///< the pool's and the allocator's
  int32_t kernel_page_size = 0;  ///< the backend's; 0 = page_size
  KvPoolLayout pool_layout = KvPoolLayout::kTokenMajor;
  SlotLayout slots = SlotLayout::kShuffled;
  std::optional<int32_t> window;
  float logit_cap = 0.0f;
  bool logit_caps = false;  ///< the configuration has logit_cap though this layer has none
  bool encoder_decoder = false;
  bool joint_pages = false;  ///< a request's encoder and decoder tokens are one run of pages; else each has its own
  ExtendPath extend_path = ExtendPath::kAuto;
  Determinism determinism = Determinism::kRunToRun;
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  distributed::ProcessGroup* group = nullptr;  ///< this fixture is that rank: its tokens, slots and query heads
  int32_t interleave = 1;
  std::string combine = "ag_rs";
  bool replicated_queries = false;
  bool all_heads_out = false;
  DType partial = DType::kUnset;  ///< TokenPoolConfig::dcp_partial_dtype
};

/// A batch by its lengths. Decodes: one new token a request; verify: `fresh` drafts each, behind the sequence.
struct PoolLengths {
  ForwardMode mode = ForwardMode::kExtend;
  std::vector<int32_t> prefix = {};   ///< tokens in the cache before the step
  std::vector<int32_t> fresh = {};    ///< new tokens
  std::vector<int32_t> encoder = {};  ///< slots of each request's encoder
  std::vector<int32_t> parents = {};  ///< verify: of every request's drafts alike, -1 = the root; empty: chains
};

/// One layer, its pool, its request table and one step's batch, as an engine would have them: NaN in every slot that no
/// request of the batch owns (the dummy slot included) and in those of new tokens until they are written, impossible
/// slots in unused entries of the table. Of a group's rank it is that rank's part of what all ranks' fixtures have
/// alike: lengths, histories, the new tokens' keys and values.
class PoolFixture {
 public:
  PoolFixture(const PoolSetup& setup, const PoolLengths& lengths, uint32_t seed = 1);
  PoolFixture(const PoolFixture&) = delete;
  PoolFixture& operator=(const PoolFixture&) = delete;

  TokenPoolConfig config() const;
  /// The model's layer: with the setup's window, if it has one.
  RadixAttention layer() const;
  RadixAttention full_layer() const;
  RadixAttention cross_layer() const;

  /// init_forward_metadata and forward with a new backend; what is wrong with the output, empty if nothing is.
  std::string wrong_step(const RadixAttention& layer);
  std::string wrong_step() { return wrong_step(layer()); }
  void forward(TokenPoolBackend& backend, const RadixAttention& layer, bool save_kv_cache = true);
  /// Compares every row of the output with attention in float64 over the keys that the layer's queries see.
  /// `fresh_from_k`: new tokens' keys are those of k and v, not what the cache made of them.
  std::string wrong_output(const RadixAttention& layer, bool fresh_from_k) const;
  /// Compares the whole of a layer's cache with what it must hold after the step. Likewise.
  std::string wrong_cache(int32_t layer_id = 0) const;

  void clear_output();
  int32_t num_tokens() const { return cu_q.back(); }
  size_t num_requests() const { return seq_lens.size(); }
  int32_t slot(size_t request, int32_t position) const;    ///< of a decoder token; -1: another rank's
  int32_t column(size_t request, int32_t position) const;  ///< where the row has it; of this rank's tokens

  PoolSetup setup;
  PoolLengths lengths;
  Context context = folio::testing::device_context();
  std::vector<int32_t> cu_q, seq_lens;  ///< seq_lens as the batch has them: without drafts
  std::vector<int32_t> rows;            ///< of the table
  std::vector<int32_t> table;
  int32_t table_rows = 0, columns = 0;
  int32_t max_context_len = 0;
  std::vector<std::vector<std::byte>> pool_memory;  ///< on a GPU; else it is the pool's own
  std::unique_ptr<KvPool> pool;
  std::vector<int64_t> out_cache_loc, encoder_out_cache_loc;
  std::vector<uint8_t> tree_mask;
  std::vector<std::byte> q_memory, k_memory, v_memory, encoder_k_memory, encoder_v_memory, out_memory;
  ConstTensorView q, k, v, encoder_k, encoder_v;
  TensorView out;
  ForwardBatch batch;

 private:
  struct History {  ///< [position, KV head, component], as k and v have it, and as the cache makes of it
    std::vector<float> k, v, cached_k, cached_v;
  };
  int32_t own(int32_t tokens) const;   ///< how many of a sequence's first tokens this rank has
  int32_t ranks_of(bool given) const;  ///< ranks whose heads a tensor has
  int32_t encoder_slot(size_t request, int32_t position) const;
  void lay_out(uint32_t seed);
  void fill(uint32_t seed);
  void build_tree();
  void make_pool(const KvPoolConfig& config);
  bool sees(const RadixAttention& layer, size_t request, int32_t query, int32_t key) const;
  int32_t depth(int32_t draft) const;

  std::vector<History> history_, encoder_history_;
};

/// Of threads over this run's device.
distributed::ThreadGroupOptions group_options();
/// distributed::run_ranks with them.
void run_ranks(int32_t world, const std::function<void(distributed::ProcessGroup& group)>& body);

/// Batches that GraphInputs has padded, in the test's own memory: a GPU need not reach what the library allocates.
class OwnBatch {
 public:
  /// Valid until the next call. Allocates nothing once warm.
  ForwardBatch copy(const ForwardBatch& padded);

 private:
  std::vector<int32_t> rows_, seq_lens_, encoder_lens_;
  std::vector<int64_t> slots_, window_slots_;
  std::vector<uint8_t> tree_mask_;
};

}  // namespace folio::inline v0::backends::testing
