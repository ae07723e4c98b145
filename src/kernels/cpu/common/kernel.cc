#include "kernels/cpu/common/kernel.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string_view>
#include <utility>

#include "core/error.hpp"
#include "folio/types/nvfp4.hpp"

namespace folio::inline v0::kernels::cpu {
namespace {

bool is_wide_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

std::string refuse_head_dim(const char* name, int32_t given, int32_t most) {
  if (given >= 8 && given <= most && given % 8 == 0) return {};
  return core::message(name, " is ", given, "; kernels here take multiples of 8 up to ", most);
}

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

std::string refusal(const AttentionConfig& config, bool applies_rope, bool decodes_ds_mla) {
  std::string why = refuse_head_dim("head_dim_qk", config.head_dim_qk, kMaxHeadDimQk);
  if (why.empty()) why = refuse_head_dim("head_dim_v", config.head_dim_v, kMaxHeadDimV);
  if (!why.empty()) return why;
  if (!is_wide_float(config.q) && !is_fp8(config.q)) {
    return core::message("q is ", config.q, "; kernels here take float32, float16, bfloat16, fp8_e4m3 and fp8_e5m2");
  }
  for (const auto& [name, kv] : {std::pair{"kv", config.kv}, {"ragged_kv", config.ragged_kv}}) {
    const bool int8_cache = kv == DType::kInt8 && name == std::string_view("kv");
    if (!is_wide_float(kv) && !is_fp8(kv) && !int8_cache) {
      return core::message(name, " is ", kv, "; kernels here take float32, float16, bfloat16, fp8_e4m3 and fp8_e5m2",
                           name == std::string_view("kv") ? ", and int8" : "");
    }
  }
  if (!is_wide_float(config.out) && !is_fp8(config.out) && config.out != DType::kFloat4E2M1x2) {
    return core::message("out is ", config.out,
                         "; kernels here write float32, float16, bfloat16, fp8_e4m3, fp8_e5m2 and fp4_e2m1x2 (NVFP4)");
  }
  if (config.out == DType::kFloat4E2M1x2 && config.head_dim_v % kNvfp4BlockSize != 0) {
    return core::message("head_dim_v is ", config.head_dim_v, " with an NVFP4 output, which takes multiples of ",
                         kNvfp4BlockSize);
  }
  if (config.features.has(Feature::kRopeLlama) && !applies_rope) {
    return "Feature::kRopeLlama is asked for; this kernel applies no rotary embedding: rotate q and K before the call, "
           "or "
           "use the generic kernels";
  }
  if (config.kv_format == KvFormat::kFp8DsMla && !decodes_ds_mla) {
    return "kv_format is fp8_ds_mla; this kernel takes strided and packed caches, the generic kernels take fp8_ds_mla";
  }
  if (config.kv_format == KvFormat::kCpuPacked && config.kv == DType::kFloat32) {
    return "kv_format is kCpuPacked with float32; packed caches are 16-bit, fp8 or int8";
  }
  if (config.kv_format == KvFormat::kCpuPacked && (config.page_size < 16 || config.page_size % 2 != 0)) {
    return core::message("kv_format is kCpuPacked with page_size ", config.page_size,
                         "; packed pages have an even number of tokens, 16 or more");
  }
  return {};
}

std::string needs_v3(const platform::CpuFeatures& features) {
  return features.x86_64_v3() ? "" : "the CPU or the OS lacks x86-64-v3 (AVX2, FMA, F16C, BMI2)";
}

/// Rows such that queries, accumulators and a converted tile stay within a megabyte of cache.
scheduler::TileShape tile(const AttentionConfig& config) {
  return {.rows = config.head_dim_qk + config.head_dim_v <= 512 ? 64 : 32,
          .kv_tokens = kTileTokens,
          .schedule = scheduler::Schedule::kDynamic,
          .order = scheduler::TileOrder::kLpt};
}

size_t scratch_bytes(const AttentionConfig& config, const scheduler::TileShape& shape) {
  return carve_scratch(config, shape, nullptr).bytes;
}

size_t collective_scratch_bytes(const Collective& collective, const AttentionConfig& config,
                                const scheduler::TileShape& tile) {
  if (collective.scratch_bytes == nullptr) return 0;
  return collective.scratch_bytes(tile.rows, config.head_dim_qk, config.head_dim_v, config.q);
}

int32_t padded(int32_t value, int32_t to) {
  return (value + to - 1) / to * to;
}

WorkerScratch carve_scratch(const AttentionConfig& config, const scheduler::TileShape& tile, std::byte* memory,
                            size_t collective_scratch_bytes) {
  const auto rows = static_cast<size_t>(padded(tile.rows, kMaxRowPadding));
  const auto qk = static_cast<size_t>(padded(config.head_dim_qk, kDimPadding));
  const auto v = static_cast<size_t>(padded(config.head_dim_v, kDimPadding));
  const size_t tokens = kTileTokens;
  Carver carver(memory);
  const auto take_state = [&] {
    SoftmaxState state;
    state.row_max = carver.take<float>(rows);
    state.row_sum = carver.take<float>(rows);
    state.acc = carver.take<float>(rows * v);
    return state;
  };
  WorkerScratch scratch;
  scratch.tile.q = carver.take<float>(rows * qk);
  const int32_t reordered = padded(config.head_dim_qk, kReorderPadding);
  scratch.tile.reordered_stride = reordered;
  scratch.tile.reordered_q = carver.take<float>(rows * static_cast<size_t>(reordered));
  scratch.tile.k = carver.take<float>(kUpcastKeys * static_cast<size_t>(reordered));
  scratch.tile.v = carver.take<float>(tokens * v);
  scratch.tile.p = carver.take<float>(rows * tokens);
  scratch.tile.rescale = carver.take<float>(rows);
  scratch.tile.visible = carver.take<uint64_t>(2 * rows);
  scratch.tile.rows = carver.take<const unsigned char*>(4 * tokens);
  // A float key, or a pair of 16-bit values.
  const size_t zeros = sizeof(float) * std::max(qk, v);
  unsigned char* const zero_bytes = carver.take<unsigned char>(zeros);
  if (zero_bytes != nullptr) std::fill_n(zero_bytes, zeros, static_cast<unsigned char>(0));
  scratch.tile.zeros = zero_bytes;
  scratch.tile.pairs = carver.take<unsigned char>(4 * sizeof(float) * v);
  if (config.kv_format == KvFormat::kFp8DsMla) scratch.tile.decoded = carver.take<float>(tokens * qk);
  if (config.kv == DType::kInt8) scratch.tile.token_scales = carver.take<float>(4 * tokens);
  scratch.tile.collective = carver.take<unsigned char>(collective_scratch_bytes);
  if (config.features.has(Feature::kRopeLlama)) {
    scratch.tile.rope = carver.take<double>(static_cast<size_t>(padded(config.head_dim_qk / 2, kDimPadding)));
  }
  scratch.rows = carver.take<QueryRow>(rows);
  scratch.running = take_state();
  scratch.split = take_state();
  scratch.bytes = carver.used();
  return scratch;
}

void set_rope_frequencies(const RopeArgs& rope, int32_t head_dim, double* frequencies) {
  const double quarters_per_radian = 2.0 / std::numbers::pi;
  for (int32_t d = 0; d < padded(head_dim / 2, kDimPadding); ++d) {
    const double speed =
        std::pow(static_cast<double>(rope.theta), -2.0 * d / head_dim) / static_cast<double>(rope.scale);
    frequencies[d] = d < head_dim / 2 ? speed * quarters_per_radian : 0.0;
  }
}

}  // namespace folio::inline v0::kernels::cpu
