#pragma once

#include "kernels/cuda/sm90/prefill/producer.cuh"

/// The producer warpgroup where all K and V are fp8 data of one dtype. It loads fp8 data and dequantizes it, exactly,
/// to tiles of float16: the consumers do not notice. A producer warp has 32 tokens of a KV tile.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

constexpr int32_t kFp8Dim = 128;    ///< components of a token: a row of 128 bytes
constexpr int32_t kWarpAtoms = 4;   ///< atoms of tokens of a KV tile that a producer warp has
constexpr int32_t kLaneChunks = 8;  ///< 16-byte chunks of fp8 data of a KV tile that a lane has
static_assert(kMaxFp8TmaTokens == kAtomRows * kWarpAtoms && kFp8RowBytes == kFp8Dim);

/// TMA brings fp8 data to memory of its own, a KV tile at a time. A warp reads its tokens to registers, issues the next
/// TMA, and dequantizes them to the stage. So loads do not wait for stages, and producer warps not for each other.
template <Fp8 kFp8, Variant kVariant>
class Fp8Producer : public Producer<__half, kFp8Dim, kFp8Dim, kVariant, kWarpgroupWarps> {
  using Base = Producer<__half, kFp8Dim, kFp8Dim, kVariant, kWarpgroupWarps>;
  friend Base;
  friend typename Base::Fetcher;
  using Base::commit_work_tile;
  using Base::copy_q;
  using Base::kBlockN;
  using Base::lane_;
  using Base::memory_;
  using Base::next_k_stage;
  using Base::next_v_stage;
  using Base::params_;
  using Base::q_buffer;
  using Base::q_offset_;
  using Base::storage_;
  using Base::token_begin;
  using Base::warp_;
  using typename Base::KvTiles;
  using typename Base::TmaTile;

 public:
  __device__ __forceinline__ Fp8Producer(const PrefillParams& params, unsigned char* memory, SharedStorage& storage)
      : Base(params, memory, storage), lane_layout_(lane_) {}

  __device__ __forceinline__ void run() { this->run_as(*this); }

 private:
  static constexpr bool kLateQ = false;

  /// Loads Q and commits the work tile.
  __device__ __forceinline__ void load_q(int32_t tile_buffer) const {
    const AttentionParams& params = params_.attention;
    if (params.q_wide && is_fp8(params.q_dtype)) {
      upcast_q(tile_buffer);
    } else {
      copy_q(tile_buffer);
    }
    if (params.q_dtype == DType::kBFloat16) convert_q(tile_buffer);
    commit_work_tile(tile_buffer);
  }

  /// Copies fp8 Q, upcast to float16. Eight loads at a time share their latency.
  __device__ __forceinline__ void upcast_q(int32_t tile_buffer) const {
    constexpr int32_t kChunks = kFp8Dim / kElementsPer16B;
    constexpr int32_t kAtOnce = 8;
    const AttentionParams& params = params_.attention;
    const auto* const data = static_cast<const uint8_t*>(params.q) + lane_ % kChunks * kElementsPer16B;
#pragma unroll 1
    for (int32_t first = 0; first < kChunks; first += kAtOnce) {
      uint2 fp8[kAtOnce];
#pragma unroll
      for (int32_t i = 0; i < kAtOnce; ++i) {
        const int64_t at = __shfl_sync(kAllLanes, q_offset_[0], (32 * (first + i) + lane_) / kChunks);
        fp8[i] = at < 0 ? uint2{} : *reinterpret_cast<const uint2*>(data + at);
      }
#pragma unroll
      for (int32_t i = 0; i < kAtOnce; ++i) {
        const int32_t row = 32 * warp_ + (32 * (first + i) + lane_) / kChunks;
        store_upcast_fp8x8<__half>(
            q_buffer(tile_buffer) + static_cast<uint32_t>(q_tile_offset(kFp8Dim, row, lane_ % kChunks)), fp8[i],
            params.q_dtype);
      }
    }
  }

  /// Converts bfloat16 Q to float16 in place.
  __device__ __forceinline__ void convert_q(int32_t tile_buffer) const {
    constexpr int32_t kChunks = kFp8Dim / kElementsPer16B;
    ptx::cp_async_wait_all();
    __syncwarp();
    const uint32_t q = q_buffer(tile_buffer);
#pragma unroll 4
    for (int32_t i = lane_; i < 32 * kChunks; i += 32) {
      const int32_t row = 32 * warp_ + i / kChunks;
      const uint32_t at = q + static_cast<uint32_t>(q_tile_offset(kFp8Dim, row, i % kChunks));
      uint4 chunk = ptx::ld_shared_16(at);
      uint32_t most = max_magnitude(chunk, 0);
#pragma unroll
      for (int32_t lanes = 1; lanes < kChunks; lanes *= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, lanes));
      const int32_t exponent = float16_row_exponent(most);
      to_float16(chunk, exponent);
      ptx::st_shared_16(at, chunk);
      if (i % kChunks == 0) storage_.rows[tile_buffer].scale[row] *= power_of_two(exponent);
    }
    ptx::fence_view_async_shared();
  }

  __device__ __forceinline__ void load_tiles(const KvTiles& tiles, const SegmentParams& segment,
                                             const SegmentLoad& load, const int32_t* pages,
                                             const scheduler::WorkTile& work_tile) {
    if (load.tma_tokens == 0) {
      load_by_threads(tiles, segment, load, pages, work_tile);
    } else if (load.tma_tokens == 8) {
      load_by_tma<4>(tiles, params_.maps[work_tile.segment], load, pages, work_tile.kv_head);
    } else if (load.tma_tokens == 16) {
      load_by_tma<2>(tiles, params_.maps[work_tile.segment], load, pages, work_tile.kv_head);
    } else {
      load_by_tma<1>(tiles, params_.maps[work_tile.segment], load, pages, work_tile.kv_head);
    }
  }

  /// Where the warp's tokens land, and the barrier of their TMA. Its phases count the loads of K and V tiles, of which
  /// a work tile has an even number.
  __device__ __forceinline__ uint32_t landing() const {
    return memory_ + static_cast<uint32_t>(kFp8Landing + warp_ * kWarpAtoms * kFp8AtomBytes);
  }
  __device__ __forceinline__ uint32_t landed_barrier() const {
    return ptx::shared_address(storage_.fp8_landed) + 8 * static_cast<uint32_t>(warp_);
  }

  /// The lane's coordinates of TMA tiles, of the KV tiles that the one looked up last is among, and of those before. 0
  /// where no row sees the tokens: whatever lands is masked.
  struct Fp8TmaQueue {
    int32_t here;
    int32_t before;
    int32_t block;  ///< number of the former
    TmaTile next;
  };
  /// Coordinates of the warp's TMA tiles of KV tile `i`.
  template <int32_t TmaTiles>
  struct TmaCoordinates {
    int32_t at[TmaTiles];
    __device__ __forceinline__ TmaCoordinates(const Fp8TmaQueue& queue, int32_t i) {
      const int32_t mine = i / (32 / TmaTiles) == queue.block ? queue.here : queue.before;
#pragma unroll
      for (int32_t b = 0; b < TmaTiles; ++b) at[b] = __shfl_sync(kAllLanes, mine, i % (32 / TmaTiles) * TmaTiles + b);
    }
  };
  template <int32_t TmaTiles>
  __device__ __forceinline__ void issue_tma(const TmaCoordinates<TmaTiles>& coordinates, const CUtensorMap& map,
                                            int32_t head, uint64_t policy) const {
    constexpr int32_t kTmaBytes = kWarpAtoms / TmaTiles * kFp8AtomBytes;
    if (!ptx::elect_one()) return;
    ptx::mbarrier_arrive_expect_tx(landed_barrier(), kWarpAtoms * kFp8AtomBytes);
#pragma unroll
    for (int32_t b = 0; b < TmaTiles; ++b) {
      ptx::tma_load_5d(landing() + static_cast<uint32_t>(b * kTmaBytes), &map, landed_barrier(), 0, 0, 0, head,
                       coordinates.at[b], policy);
    }
  }

  /// Reads the warp's tokens of the load that lands.
  __device__ __forceinline__ void read_landed(uint4 (&fp8)[kLaneChunks], uint32_t parity) const {
    ptx::mbarrier_wait_warp(landed_barrier(), parity);
#pragma unroll
    for (int32_t c = 0; c < kLaneChunks; ++c) {
      fp8[c] =
          ptx::ld_shared_16(landing() + static_cast<uint32_t>(c / 2 * kFp8AtomBytes) + fp8_offset(lane_layout_, c % 2));
    }
    // The next TMA overwrites what was read here, and would overtake loads that still wait for shared memory.
    uint32_t of_all_chunks = 0;
#pragma unroll
    for (const uint4& chunk : fp8) of_all_chunks ^= chunk.w;
    ptx::wait_loaded(of_all_chunks, landing());
    __syncwarp();
  }

  /// Pages of a multiple of eight tokens; the warp has `TmaTiles` of a KV tile. K0, K1, V0, K2, V1, ..., and the last V
  /// tile. TMA is one load ahead.
  template <int32_t TmaTiles>
  __device__ __forceinline__ void load_by_tma(const KvTiles& tiles, const PrefillParams::Maps& maps,
                                              const SegmentLoad& load, const int32_t* pages, int32_t head) {
    using Coordinates = TmaCoordinates<TmaTiles>;
    constexpr int32_t kAtOnce = 32 / TmaTiles;  // KV tiles whose TMA tiles the lanes look up
    const uint64_t policy = ptx::evict_last_policy();
    Fp8TmaQueue queue{0, 0, -1, this->template find_fp8_tma_tile<TmaTiles>(tiles, 0, load, pages)};
    const auto look_up = [&](int32_t i) {
      if (i % kAtOnce != 0) return;
      queue.before = queue.here;
      queue.here = queue.next.atom < 0 ? 0 : queue.next.page * load.atoms_per_page + queue.next.atom;
      ++queue.block;
      queue.next = this->template find_fp8_tma_tile<TmaTiles>(tiles, i + kAtOnce, load,
                                                              pages);  // completes before it is used
    };
    uint4 fp8[kLaneChunks];
    look_up(0);
    issue_tma<TmaTiles>(Coordinates(queue, 0), maps.k, head, policy);
#pragma unroll 1
    for (int32_t i = 0; i <= tiles.count; ++i) {
      if (i < tiles.count) {
        const bool k_is_next = i == 0 && tiles.count > 1;
        if (k_is_next) look_up(1);
        const Coordinates next(queue, k_is_next ? 1 : max(i - 1, 0));
        read_landed(fp8, i > 0 ? 1 : 0);
        issue_tma<TmaTiles>(next, k_is_next ? maps.k : maps.v, head, policy);
        const PipelineStage stage = next_k_stage();
        producer_acquire(stage);
        store_chunks(stage, fp8);
        if (has_visible_bits(kVariant) && tiles.is_masked(i))
          this->template store_visible_bits<kWarpgroupWarps>(tiles.first_token(i), stage.index);
        producer_commit(stage);
      }
      if (i == 0) continue;
      const bool k_is_next = i + 1 < tiles.count;
      if (k_is_next) look_up(i + 1);
      const Coordinates next(queue, k_is_next ? i + 1 : i);
      read_landed(fp8, i == tiles.count ? 1 : 0);
      if (i < tiles.count) issue_tma<TmaTiles>(next, k_is_next ? maps.k : maps.v, head, policy);
      const PipelineStage stage = next_v_stage();
      producer_acquire(stage);
      store_v(tiles, i - 1, stage, fp8);
      producer_commit(stage);
      if (this->is_prefetch_due(i, tiles.count)) this->prefetch_next_tile(*this);
    }
  }

  /// Writes the lane's chunks to the stage, dequantized.
  __device__ __forceinline__ void store_chunks(const PipelineStage& stage, const uint4 (&fp8)[kLaneChunks]) const {
    const uint32_t mine = stage.tile + static_cast<uint32_t>(warp_ * kWarpAtoms * atom_row_bytes(kFp8Dim));
#pragma unroll
    for (int32_t c = 0; c < kLaneChunks; ++c) {
      store_dequantized(mine + static_cast<uint32_t>(c / 2 * atom_row_bytes(kFp8Dim) + c % 2 * atom_bytes(kFp8Dim)),
                        lane_layout_, dequantized<__half, kFp8>(fp8[c]));
    }
  }
  /// The same of V. Where some rows see a tile in part, tokens that no row sees become zeros,
  /// and NaN and Inf in others are flagged.
  __device__ __forceinline__ void store_v(const KvTiles& tiles, int32_t i, const PipelineStage& stage,
                                          uint4 (&fp8)[kLaneChunks]) const {
    if (tiles.is_edge(i)) [[unlikely]] {
      const int32_t first = tiles.first_token(i) + warp_ * kWarpAtoms * kAtomRows + lane_layout_.row;
      bool nonfinite = false;
#pragma unroll
      for (int32_t c = 0; c < kLaneChunks; ++c) {
        const int32_t token = first + c / 2 * kAtomRows;
        if (token < tiles.visible.any_begin || token >= tiles.visible.any_end) fp8[c] = uint4{};
        nonfinite = nonfinite || has_nonfinite<kFp8>(fp8[c]);
      }
      nonfinite = __any_sync(kAllLanes, nonfinite);
      if (lane_ == 0) storage_.nonfinite[stage.index][warp_] = nonfinite ? 1 : 0;
    }
    store_chunks(stage, fp8);
  }

  /// Any other K and V: fp8 data comes through registers, and is loaded while the pipeline has no free stage.
  __device__ __forceinline__ void load_by_threads(const KvTiles& tiles, const SegmentParams& segment,
                                                  const SegmentLoad& load, const int32_t* pages,
                                                  const scheduler::WorkTile& work_tile) {
    const int32_t first_token = segment.paged ? 0 : segment.indptr[work_tile.kv_row];
    // K0, K1, V0, K2, V1, ..., and the last V tile: load n.
#pragma unroll 1
    for (int32_t n = 0; n < 2 * tiles.count; ++n) {
      const bool is_k = n == 0 || (n % 2 == 1 && n < 2 * tiles.count - 1);
      const int32_t i = is_k ? (n + 1) / 2 : n < 2 * tiles.count - 1 ? n / 2 - 1 : n / 2;
      const KvStrides& strides = is_k ? segment.k_strides : segment.v_strides;
      const auto* const data = static_cast<const uint8_t*>(is_k ? segment.k : segment.v);
      const int64_t begin = token_begin(tiles, i, strides, work_tile.kv_head, load, pages, first_token);
      uint4 fp8[kLaneChunks];
#pragma unroll
      for (int32_t c = 0; c < kLaneChunks; ++c) {
        const int64_t at = __shfl_sync(kAllLanes, begin, c / 2 * kAtomRows + lane_layout_.row);
        const uint8_t* const from = data + at + 64 * (c % 2) + 16 * lane_layout_.chunk;
        fp8[c] = uint4{};
        if (at < 0) continue;
        if (load.is_16B_aligned) {
          fp8[c] = *reinterpret_cast<const uint4*>(from);
        } else {
          fp8[c] = load_16B(from);
        }
      }
      const PipelineStage stage = is_k ? next_k_stage() : next_v_stage();
      producer_acquire(stage);
      if (!is_k) {
        store_v(tiles, i, stage, fp8);
      } else {
        store_chunks(stage, fp8);
        if (has_visible_bits(kVariant) && tiles.is_masked(i))
          this->template store_visible_bits<kWarpgroupWarps>(tiles.first_token(i), stage.index);
      }
      producer_commit(stage);
    }
  }

  /// Sixteen fp8 values, whatever their address.
  __device__ __forceinline__ static uint4 load_16B(const uint8_t* from) {
    uint32_t words[4] = {};
#pragma unroll
    for (int32_t i = 0; i < 16; ++i) words[i / 4] |= uint32_t{from[i]} << i % 4 * 8;
    return {words[0], words[1], words[2], words[3]};
  }

  const Fp8Lane lane_layout_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
