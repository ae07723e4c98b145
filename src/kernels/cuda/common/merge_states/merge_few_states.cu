#include "kernels/cuda/common/merge_states/merge_states.hpp"

#include <numbers>

#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/numeric_conversion.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kFewStatesThreads = 256;
constexpr int32_t kMaxStates = 8;
constexpr int32_t kMaxRows = 128;  // of a CTA at a time
constexpr int64_t kPiecesPerBlock = 2048;
constexpr int64_t kManyBlocks = 512;  // fewer leave SMs without work
constexpr float kEmpty = -1.0f;       // instead of a weight
constexpr float kMasked = -2.0f;

/// How a launch divides its rows.
struct Rows {
  FastDiv per_row;  ///< pieces
  FastDiv heads;
  int32_t num_states = 0;
  uint32_t num_rows = 0;
  uint32_t tile = 1;  ///< rows of a CTA at a time
};

/// What a tile's rows have in shared memory.
struct Tile {
  float weights[kMaxRows][kMaxStates];
  const std::byte* sources[2][kMaxRows];  ///< where state 0 of a source has the row
  std::byte* out[kMaxRows];
};

/// State s: its source, and its number there.
struct State {
  const CombineSource& source;
  int64_t number;
  __device__ State(const CombineParams& params, int64_t s)
      : source(s < params.sources[0].num_states ? params.sources[0] : params.sources[1]),
        number(s < params.sources[0].num_states ? s : s - params.sources[0].num_states) {}
};

/// A row's weights, and its LSE where that is wanted.
__device__ void weigh_row(const CombineParams& params, const Rows& rows, uint32_t row, float (&weights)[kMaxStates]) {
  const int64_t token = rows.heads.quotient(row);
  const int64_t head = rows.heads.remainder(row);
  if (params.mask != nullptr && params.mask[token] == 0) {
    weights[0] = kMasked;
    return;
  }
  double lses[kMaxStates];
  double top = -INFINITY;
#pragma unroll
  for (int32_t s = 0; s < kMaxStates; ++s) {
    if (s >= rows.num_states) break;
    const State state(params, s);
    const CombineSource& source = state.source;
    const double lse = source.lse[token * source.lse_token_stride + head * source.lse_head_stride +
                                  state.number * source.lse_state_stride];
    lses[s] = source.base == LseBase::k2 ? lse * std::numbers::ln2 : lse;
  }
#pragma unroll
  for (int32_t s = 0; s < kMaxStates; ++s) {
    if (s >= rows.num_states) break;
    if (isinf(lses[s])) continue;
    if (lses[s] > top || isnan(lses[s])) top = lses[s];  // nothing is greater than a NaN: it stays
  }
  float sum = 0.0f;
#pragma unroll
  for (int32_t s = 0; s < kMaxStates; ++s) {
    if (s >= rows.num_states) break;
    weights[s] = kEmpty;
    if (isinf(lses[s])) continue;
    weights[s] = static_cast<float>(exp(static_cast<double>(static_cast<float>(lses[s] - top))));
    sum = __fadd_rn(sum, weights[s]);
  }
  const float inverse = __fdiv_rn(1.0f, sum);
#pragma unroll
  for (int32_t s = 0; s < kMaxStates; ++s) {
    if (s >= rows.num_states) break;
    if (weights[s] != kEmpty) weights[s] = __fmul_rn(weights[s], inverse);
  }
  if (params.lse.data == nullptr) return;
  double lse = top;
  if (top != -INFINITY) lse += static_cast<double>(static_cast<float>(log(static_cast<double>(sum))));
  params.lse.data[token * params.lse.token_stride + head * params.lse.head_stride] =
      static_cast<float>(params.lse.base == LseBase::k2 ? lse * std::numbers::log2e : lse);
}

__device__ void place_row(const CombineParams& params, const Rows& rows, uint32_t row, Tile& tile, uint32_t at) {
  const int64_t token = rows.heads.quotient(row);
  const int64_t head = rows.heads.remainder(row);
  for (int32_t i = 0; i < 2; ++i) {
    const CombineSource& source = params.sources[i];
    tile.sources[i][at] = element_at(static_cast<const std::byte*>(source.out), source.dtype,
                                     token * source.token_stride + head * source.head_stride);
  }
  tile.out[at] = element_at(static_cast<std::byte*>(params.out), params.out_dtype,
                            token * params.out_token_stride + head * params.out_head_stride);
}

/// The pieces of a tile's rows. States are read two at a time, of two pieces.
template <int32_t kBytes, int32_t kElements>
__device__ void combine_pieces(const CombineParams& params, const Rows& rows, uint32_t num_rows, const Tile& tile) {
  constexpr int32_t kUnroll = 2;
  const uint32_t total = num_rows * rows.per_row.divisor();
  const int32_t out_piece = kElements * size_of(params.out_dtype);
  const Divisor scale = is_fp8(params.out_dtype) ? Divisor(scale_at(params.out_scale, 0, 0)) : Divisor();
  const auto first_states = static_cast<int32_t>(params.sources[0].num_states);
  const int64_t state_bytes[2] = {params.sources[0].state_stride * kBytes, params.sources[1].state_stride * kBytes};
  for (uint32_t first = threadIdx.x; first < total; first += kFewStatesThreads * kUnroll) {
    float acc[kUnroll][kElements] = {};
    bool started[kUnroll] = {};
    uint32_t row[kUnroll], piece[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = min(first + u * kFewStatesThreads, total - 1);
      row[u] = rows.per_row.quotient(i);
      piece[u] = i - row[u] * rows.per_row.divisor();
    }
    for (int32_t s = 0; s < rows.num_states; s += 2) {
      Raw<kBytes, kElements> raw[kUnroll][2];
#pragma unroll
      for (int32_t k = 0; k < 2; ++k) {
        const int32_t state = min(s + k, rows.num_states - 1);
        const bool second = state >= first_states;
        const int64_t in_row = second ? (state - first_states) * state_bytes[1] : state * state_bytes[0];
#pragma unroll
        for (int32_t u = 0; u < kUnroll; ++u) {
          raw[u][k] = load_raw<kBytes, kElements>(tile.sources[second ? 1 : 0][row[u]] + in_row +
                                                  piece[u] * kElements * kBytes);
        }
      }
#pragma unroll
      for (int32_t k = 0; k < 2; ++k) {
        if (s + k >= rows.num_states) break;
        const DType dtype = params.sources[s + k >= first_states ? 1 : 0].dtype;
#pragma unroll
        for (int32_t u = 0; u < kUnroll; ++u) {
          const float weight = tile.weights[row[u]][s + k];
          if (weight == kEmpty) continue;
          float values[kElements];
          decode(raw[u][k], dtype, values);
#pragma unroll
          for (int32_t e = 0; e < kElements; ++e) {
            const float part = __fmul_rn(weight, values[e]);
            acc[u][e] = started[u] ? __fadd_rn(acc[u][e], part) : part;  // no sum from 0, which would lose a -0
          }
          started[u] = true;
        }
      }
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      if (first + u * kFewStatesThreads >= total || tile.weights[row[u]][0] == kMasked) continue;
      if (is_fp8(params.out_dtype)) scale.divide<kElements>(acc[u]);
      store_floats<kElements>(tile.out[row[u]] + piece[u] * out_piece, params.out_dtype, acc[u]);
    }
  }
}

template <int32_t kBytes, int32_t kElements>
__global__ void __launch_bounds__(kFewStatesThreads, 3)
    few_kernel(const __grid_constant__ CombineParams params, const __grid_constant__ Rows rows) {
  __shared__ Tile tile;
  for (uint32_t first = blockIdx.x * rows.tile; first < rows.num_rows; first += gridDim.x * rows.tile) {
    const uint32_t count = min(rows.tile, rows.num_rows - first);
    if (threadIdx.x < count) {
      place_row(params, rows, first + threadIdx.x, tile, threadIdx.x);
      weigh_row(params, rows, first + threadIdx.x, tile.weights[threadIdx.x]);
    }
    __syncthreads();
    combine_pieces<kBytes, kElements>(params, rows, count, tile);
    __syncthreads();
  }
}

template <typename Byte>
Byte* moved(Byte* data, int64_t elements, DType dtype) {
  return data + elements * size_of(dtype);
}

/// The tokens [first, first + count).
CombineParams slice_of(const CombineParams& whole, int64_t first, int64_t count) {
  CombineParams params = whole;
  params.num_tokens = count;
  for (CombineSource& source : params.sources) {
    if (source.num_states == 0) continue;
    source.out = moved(static_cast<const std::byte*>(source.out), first * source.token_stride, source.dtype);
    source.lse += first * source.lse_token_stride;
  }
  params.out = moved(static_cast<std::byte*>(params.out), first * params.out_token_stride, params.out_dtype);
  if (params.lse.data != nullptr) params.lse.data += first * params.lse.token_stride;
  if (params.mask != nullptr) params.mask += first;
  return params;
}

}  // namespace

bool is_wide(const CombineParams& params) {
  bool wide = params.head_dim % kWide == 0 &&
              is_wide(params.out, params.out_dtype, {params.out_token_stride, params.out_head_stride});
  for (const CombineSource& source : params.sources) {
    if (source.num_states == 0) continue;
    wide = wide && is_wide(source.out, source.dtype, {source.state_stride, source.token_stride, source.head_stride});
  }
  return wide;
}

bool enqueue_few_states(const CombineParams& params, bool wide, Stream stream) {
  const int64_t num_states = params.sources[0].num_states + params.sources[1].num_states;
  const CombineSource& last = params.sources[params.sources[1].num_states > 0 ? 1 : 0];
  const int32_t bytes = size_of(last.dtype);
  if (num_states == 0 || num_states > kMaxStates) return false;
  if (params.sources[0].num_states > 0 && size_of(params.sources[0].dtype) != bytes) return false;
  const int32_t per_row = wide ? params.head_dim / kWide : params.head_dim;
  for_slices(params.num_tokens, int64_t{per_row} * params.num_heads, [&](int64_t first, int64_t count) {
    Rows rows;
    rows.per_row = FastDiv(per_row);
    rows.heads = FastDiv(params.num_heads);
    rows.num_states = static_cast<int32_t>(num_states);
    rows.num_rows = static_cast<uint32_t>(count * params.num_heads);
    const int64_t most = std::min<int64_t>(kPiecesPerBlock / per_row, rows.num_rows / kManyBlocks);
    rows.tile = static_cast<uint32_t>(std::clamp<int64_t>(most, 1, kMaxRows));
    auto* const wide_kernel = bytes == 2 ? few_kernel<2, kWide> : few_kernel<4, kWide>;
    auto* const single_kernel = bytes == 2 ? few_kernel<2, 1> : few_kernel<4, 1>;
    auto* const kernel = wide ? wide_kernel : single_kernel;
    kernel<<<grid_for(rows.num_rows, rows.tile), kFewStatesThreads, 0, native(stream)>>>(slice_of(params, first, count),
                                                                                         rows);
    check_launch("the merge of a few states");
  });
  return true;
}

}  // namespace folio::inline v0::kernels::cuda
