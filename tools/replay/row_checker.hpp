#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "replay/attention_stack.hpp"
#include "replay/output_file.hpp"
#include "replay/row_problem.hpp"
#include "replay/workload.hpp"

namespace folio::replay {

struct CheckOptions {
  double rate = 0.01;         ///< share of computed rows that are compared with the oracle, 0 to 1
  bool keep_samples = false;  ///< keep the sampled rows' bits for write_samples
};

struct CheckCounts {
  int64_t rows = 0;  ///< (row, layer) pairs compared with the oracle, one head each
  int64_t failures = 0;
  double worst_error = 0.0;  ///< largest |output - oracle|
  double worst_share = 0.0;  ///< largest error as a share of what is allowed
  std::string first_failure;
  int64_t digested_rows = 0;       ///< (row, layer) pairs in the digest
  int64_t recomputed_rows = 0;     ///< of which were computed again after a preemption
  int64_t recomputed_unequal = 0;  ///< ... with other bits
};

/// Watches the outputs of a replay.
///
/// Digest: the bits of all heads of the rows that give tokens (the last prompt token and the generated ones), in every
/// layer. Every schedule computes those rows, so that replays which must agree have equal digests.
///
/// Oracle: of all computed rows a share, chosen by (seed, request, position) and so alike under any schedule, is
/// compared with the float64 oracle, one head a layer. Keys and values are made anew from the token chain, not read
/// from the cache: a wrong cache write, page table, prefix hit or eviction shows as an error. Rows may differ by what
/// rounding does, those computed by FP8 MMA (LayerOutput::fp8_mma_from) by what these lose.
class RowChecker {
 public:
  RowChecker(const Workload& workload, const StackConfig& stack, const CheckOptions& options);

  /// The outputs of one layer of a step. `chain_of` gives a running request's token chain.
  void observe(const StepBatch& batch, const LayerOutput& output, const Scheduler& scheduler);

  const CheckCounts& counts() const { return counts_; }

  /// Over all digested rows by request, position and layer; independent of the order they were computed in.
  uint64_t digest() const;

  /// Writes the sampled rows that give tokens, one line each: request, position, layer, the row's bits in hexadecimal.
  void write_samples(OutputFile& file) const;

 private:
  struct Sample {
    int32_t request, position, layer;
    std::vector<unsigned char> bits;
  };
  bool is_sampled(const TokenRow& token) const;
  void digest_row(const TokenRow& token, const LayerOutput& output, const std::byte* row, bool sampled);
  void check_row(const TokenRow& token, const LayerOutput& output, const std::byte* row, bool fp8_mma,
                 std::span<const uint64_t> chain);
  void fill_problem(const TokenRow& token, int32_t layer, int32_t q_head, std::span<const uint64_t> chain);

  const Workload& workload_;
  StackConfig stack_;
  CheckOptions options_;
  uint64_t sample_below_;
  std::vector<std::vector<uint64_t>> row_hashes_;  ///< [request][output row * layers + layer]; 0 = not computed yet
  std::vector<Sample> samples_;
  RowProblem problem_;
  std::vector<double> exact_;
  CheckCounts counts_;
};

}  // namespace folio::replay
