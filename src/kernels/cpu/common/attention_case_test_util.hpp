#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention_kernel.hpp"
#include "scheduler/plan_test_util.hpp"
#include "scheduler/scheduler.hpp"
#include "testing/random.hpp"

/// What tests of attention kernels share: a batch with all its arguments, filled with values from a seed and with NaN
/// wherever a kernel has no business, runs of a kernel over it, and the comparison with the oracle.
namespace folio::inline v0::kernels::testing {

/// How a case's arguments are laid out and which optional ones it has.
struct CaseOptions {
  bool dense_table = false;
  bool hnd = false;                    ///< strided caches: [page][head][token][dim] instead of [page][token][head][dim]
  bool pages_nearly_in_order = false;  ///< of every 16 pages, all but two neighbours in order; else shuffled
  bool v_aliases_k = false;
  bool soft_cap = false;
  bool alibi = false;
  bool sinks = false;
  bool scales_per_head = false;
  bool scales_per_request = false;
  LseBase lse_base = LseBase::kE;
  float magnitude = 1.0f;  ///< of queries, keys and values
};

/// A segment's arguments with their memory.
struct OwnedArgs {
  std::vector<unsigned char> k, v;
  std::vector<int32_t> indptr, indices;
  std::vector<float> k_scale, v_scale;
  std::vector<float> k_token_scales, v_token_scales;  ///< of int8 caches; v's are k's where V aliases K
};

class AttentionCase {
 public:
  /// `config` with its dtypes resolved. Lengths come from `batch`.
  AttentionCase(const AttentionConfig& config, scheduler::testing::OwnedBatch batch, const CaseOptions& options,
                uint32_t seed);
  AttentionCase(const AttentionCase&) = delete;
  AttentionCase& operator=(const AttentionCase&) = delete;

  const AttentionConfig& config() const { return config_; }
  const AttentionArgs& args() const { return args_; }
  AttentionArgs& mutable_args() { return args_; }
  BatchView view() { return batch_.view(); }
  scheduler::testing::OwnedBatch& batch() { return batch_; }
  std::vector<OwnedArgs>& memory() { return memory_; }

  struct Result {
    std::vector<float> out;            ///< [num_tokens, num_q_heads, head_dim_v], as float
    std::vector<unsigned char> bytes;  ///< the same as stored
    std::vector<float> lse;
    scheduler::PlanView plan;  ///< counts only: its arrays are gone
    DType p_dtype;             ///< the kernel's
  };
  /// Plans and runs, one worker after the other, in workspace full of NaN, with KV splits of 32 tokens and more.
  /// `tile_rows` 0 = the kernel's.
  Result run(const AttentionKernel& kernel, int32_t num_workers, int32_t tile_rows = 0,
             int32_t fixed_split_tokens = 128);

  /// `seed` says which worker claims what in later runs.
  void set_claims(uint32_t seed) { claims_ = seed; }

  /// Empty if `result` lies within what the error of a plain float32 computation and the rounding of P and of the
  /// output allow, and padding is untouched; else the first row at fault.
  std::string compare(const Result& result);

 private:
  void fill_queries();
  void fill_segment(size_t s);
  /// Scales of NaN, [page][head][slot] or [page][slot][head], for the whole of an int8 cache.
  void lay_out_token_scales(KvCacheView& cache, OwnedArgs& memory) const;
  /// Random scales of one slot's heads.
  void fill_token_scales(const KvCacheView& cache, int64_t page, int64_t slot);
  void fill_mask();
  /// One worker after the other claims a few work tiles, until none is left.
  void run_workers(const AttentionKernel& kernel, AttentionParams params) const;
  /// The attention of |V|, component by component: how far the rounding of P moves an output.
  std::vector<double> mean_abs_v();
  Scale make_scale(std::vector<float>& values, int32_t rows);
  float random_value(DType dtype);
  void store_values(unsigned char* data, DType dtype, int64_t first, int64_t step, int32_t count);

  AttentionConfig config_;
  scheduler::testing::OwnedBatch batch_;
  CaseOptions options_;
  std::mt19937 random_;
  verify::Random values_;  // of queries, keys and values: there are millions
  int32_t num_tokens_ = 0;
  uint32_t claims_ = 0;
  std::vector<unsigned char> q_;
  std::vector<OwnedArgs> memory_;
  std::vector<KvSegment> segments_;
  std::vector<SegmentArgs> segment_args_;
  std::vector<float> slopes_, sinks_, q_scale_;
  std::vector<uint8_t> mask_;
  AttentionArgs args_;
  std::vector<double> want_, want_lse_, sizes_;
  std::vector<float> plain_, plain_lse_;
};

}  // namespace folio::inline v0::kernels::testing
