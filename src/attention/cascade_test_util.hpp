#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "folio/folio.hpp"

namespace folio::inline v0::attention {

enum class CascadeLayout { kNhd, kHnd, kPacked };

/// What attention over a cascade is tested with.
struct CascadeSetup {
  DType q = DType::kFloat32;
  DType kv = DType::kFloat32;
  CascadeLayout layout = CascadeLayout::kNhd;
  int32_t page_size = 16;
  int32_t window_left = -1;
  bool alibi = false;
  bool sinks = false;
  float soft_cap = 0.0f;
  Determinism determinism = Determinism::kRunToRun;
  bool dense = true;  ///< the engine's table: dense with a first column, or CSR
};

/// A batch that shares pages on several levels, in a pool whose other tokens are NaN: nine requests (decodes, a
/// speculative decode, an append, a padding request in the middle) over one system prompt and two chats.
class CascadeScene {
 public:
  explicit CascadeScene(const CascadeSetup& setup);

  const AttentionOp& op() const { return op_; }
  CascadeBatch batch() const;
  /// Costs under which every shared page pays.
  CascadeCosts eager_costs() const;

  /// Plans and runs it with these segments into `out` and `lse`; returns what was planned.
  PlanSummary run_with(const Cascade& cascade);
  /// The first value that is further from the oracle, which reads the batch as one segment, than rounding explains; or
  /// empty.
  std::string wrong_result() const;

  std::vector<int32_t> q_len, kv_len, cu_q{0};
  std::vector<float> out, lse;

 private:
  void make_tables();
  void make_pool();
  AttentionArgs layer_args() const;
  PageTableView table() const;

  CascadeSetup setup_;
  Context context_ = Context::cpu({.executor = {}, .num_threads = 3, .force_kernel = {}});
  AttentionOp op_;
  std::vector<std::vector<int32_t>> pages_;
  std::vector<int32_t> table_, indptr_;
  int32_t num_pages_ = 0, columns_ = 0;
  std::vector<std::byte> pool_, magnitudes_, q_;  ///< `magnitudes_`: the pool with |v| instead of v
  KvCacheView cache_, magnitude_cache_;
  std::vector<float> slopes_, sinks_;
};

}  // namespace folio::inline v0::attention
