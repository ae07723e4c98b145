#pragma once

#include <random>
#include <string>

#include "device_array.hpp"

namespace folio::cuda_test {

/// The lengths of one step. Requests beyond the batch's fill are empty.
struct StepLengths {
  std::vector<int32_t> cu_q;
  std::vector<int32_t> kv_len;
};

/// Which batches a graph is for. All bounds are the same.
enum class StepKind { kAny, kDecode, kSeveralTokens, kPrefill, kMixed };

/// How large a ServingStep's model and batches may be, and what of it differs from one to the other.
struct ServingSizes {
  int32_t tokens;  ///< of a step
  int32_t max_q_len;
  int32_t max_kv_len;
  int32_t head_dim;
  int32_t window_left = -1;
  bool lse = true;  ///< is asked for
};

/// A small model of two layers on a GPU: what an engine holds, and one step of it. Device arrays keep their addresses
/// from step to step, as a captured graph needs.
class ServingStep {
 public:
  static constexpr int32_t kRequests = 12;
  static constexpr int32_t kTokens = 32;
  static constexpr int32_t kMaxQLen = 5;
  static constexpr int32_t kMaxKvLen = 700;
  static constexpr int32_t kPageSize = 16;
  static constexpr int32_t kPagesPerRequest = (kMaxKvLen + kPageSize - 1) / kPageSize;
  static constexpr int32_t kPages = kRequests * kPagesPerRequest + 8;
  static constexpr int32_t kQHeads = 8;
  static constexpr int32_t kKvHeads = 2;
  static constexpr int32_t kHeadDim = 64;
  static constexpr ServingSizes kSizes{kTokens, kMaxQLen, kMaxKvLen, kHeadDim};
  static constexpr int32_t kLayers = 2;

  /// `kernel`: forced; empty = whichever `prepare` picks. `shared_levels`: of the op's bounds; steps have none.
  /// `device`: the thread's current one too, here and in `set`.
  explicit ServingStep(Determinism determinism = Determinism::kRunToRun, const std::string& kernel = "",
                       int32_t shared_levels = 0, const ServingSizes& sizes = kSizes, int32_t device = 0);

  const AttentionOp& op() const { return op_; }
  /// Lengths within the bounds, with any number of requests and tokens.
  static StepLengths random_lengths(std::mt19937& random, const ServingSizes& sizes = kSizes);
  /// Likewise, of one kind: decodes of a token each, of three, prompts without or behind a prefix, both.
  static StepLengths random_lengths(std::mt19937& random, StepKind kind);
  /// Uploads a step: lengths, a shuffled table, slots of the new tokens, queries, keys and values. The caches are
  /// filled by the first call; from then on they hold what steps wrote.
  void set(const StepLengths& lengths, std::mt19937& random);
  /// Lengths alone, as they are: also wrong ones.
  void set_lengths(const StepLengths& lengths);

  /// Enqueues plan, cache writes and attention of all layers. `host_lengths` null: the device's are planned.
  AttentionPlan enqueue(PlanBuffer& buffer, const StepLengths* host_lengths, Stream stream);
  void run_layers(const AttentionPlan& plan, Stream stream);
  AttentionPlan plan(PlanBuffer& buffer, const StepLengths& host_lengths, Stream stream) {
    return folio::plan(op_, batch(&host_lengths), buffer, stream);
  }

  /// What one layer's calls take.
  struct LayerArgs {
    CacheWriteArgs write;
    SegmentArgs segment;
    AttentionArgs args;
    AttentionArgs attention() const {
      AttentionArgs whole = args;
      whole.segments = {&segment, 1};
      return whole;
    }
  };
  LayerArgs layer_args(size_t layer) const;
  Workspace workspace() const { return {workspace_.data(), workspace_.bytes()}; }

  /// Everything a step wrote, of both layers.
  struct Output {
    std::vector<uint16_t> out;
    std::vector<float> lse;
    friend bool operator==(const Output&, const Output&) = default;
  };
  Output output() const;
  void clear_output();

 private:
  BatchView batch(const StepLengths* host_lengths);

  int32_t pages_per_request() const { return (sizes_.max_kv_len + kPageSize - 1) / kPageSize; }
  int32_t pages() const { return kRequests * pages_per_request() + 8; }
  /// Of a layer.
  size_t cache_elements() const;
  size_t q_elements() const;
  size_t kv_elements() const;

  ServingSizes sizes_;
  Context context_;
  AttentionOp op_;
  DeviceArray<int32_t> cu_q_{kRequests + 1}, kv_len_{kRequests};
  DeviceArray<int32_t> table_;
  DeviceArray<int64_t> slots_;
  DeviceArray<uint16_t> q_, new_k_, new_v_, cache_k_, cache_v_, out_;
  DeviceArray<float> lse_;
  DeviceArray<std::byte> workspace_;
  KvSegment segment_;
  bool filled_ = false;
};

}  // namespace folio::cuda_test
