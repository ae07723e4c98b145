#include "kernels/cpu/common/attention/scratch.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace folio::inline v0::kernels::cpu {
namespace {

class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(memory) {}

  template <typename T>
  T* take(size_t count) {
    constexpr size_t kAlignment = 64;
    auto* const part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }
  size_t used() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

}  // namespace

int32_t padded(int32_t value, int32_t to) {
  return (value + to - 1) / to * to;
}

WorkerScratch carve_scratch(const AttentionConfig& config, const scheduler::TileShape& tile, std::byte* memory,
                            size_t own_bytes) {
  const auto rows = static_cast<size_t>(padded(tile.rows, kMostRowPadding));
  const auto qk = static_cast<size_t>(padded(config.head_dim_qk, kDimPadding));
  const auto v = static_cast<size_t>(padded(config.head_dim_v, kDimPadding));
  const size_t tokens = kTileTokens;
  Carver carver(memory);
  const auto take_states = [&] {
    RowStates states;
    states.max = carver.take<float>(rows);
    states.sum = carver.take<float>(rows);
    states.acc = carver.take<float>(rows * v);
    return states;
  };
  WorkerScratch scratch;
  scratch.item.q = carver.take<float>(rows * qk);
  const int32_t ordered = padded(config.head_dim_qk, kOrderedPadding);
  scratch.item.ordered_stride = ordered;
  scratch.item.ordered_q = carver.take<float>(rows * static_cast<size_t>(ordered));
  scratch.item.k = carver.take<float>(kConvertedKeys * static_cast<size_t>(ordered));
  scratch.item.v = carver.take<float>(tokens * v);
  scratch.item.p = carver.take<float>(rows * tokens);
  scratch.item.rescale = carver.take<float>(rows);
  scratch.item.visible = carver.take<uint64_t>(2 * rows);
  scratch.item.rows = carver.take<const unsigned char*>(4 * tokens);
  // A float key, or a pair of 16-bit values.
  const size_t zeros = sizeof(float) * std::max(qk, v);
  unsigned char* const zero_bytes = carver.take<unsigned char>(zeros);
  if (zero_bytes != nullptr) std::fill_n(zero_bytes, zeros, static_cast<unsigned char>(0));
  scratch.item.zeros = zero_bytes;
  scratch.item.pairs = carver.take<unsigned char>(4 * sizeof(float) * v);
  scratch.item.own = carver.take<unsigned char>(own_bytes);
  if (config.features.has(Feature::kRopeLlama)) {
    scratch.item.rope = carver.take<double>(static_cast<size_t>(padded(config.head_dim_qk / 2, kDimPadding)));
  }
  scratch.rows = carver.take<ItemRow>(rows);
  scratch.running = take_states();
  scratch.split = take_states();
  scratch.bytes = carver.used();
  return scratch;
}

void set_rope(const RopeArgs& rope, int32_t head_dim, double* quarter_turns) {
  const double quarters_per_radian = 2.0 / std::numbers::pi;
  for (int32_t d = 0; d < padded(head_dim / 2, kDimPadding); ++d) {
    const double speed =
        std::pow(static_cast<double>(rope.theta), -2.0 * d / head_dim) / static_cast<double>(rope.scale);
    quarter_turns[d] = d < head_dim / 2 ? speed * quarters_per_radian : 0.0;
  }
}

}  // namespace folio::inline v0::kernels::cpu
