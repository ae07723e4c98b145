#pragma once

#include <cstddef>

#include "kernels/cuda/sm90/prefill/producer.cuh"

/// The producer warpgroup where all K and V are fp8 data of one dtype. It loads fp8 data and dequantizes it, exactly,
/// to tiles of float16: the consumers do not notice. A producer warp has 32 tokens of a KV tile.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

constexpr int32_t kFp8Dim = 128;    ///< components of a token: a row of 128 bytes
constexpr int32_t kWarpAtoms = 4;   ///< atoms of tokens of a KV tile that a producer warp has
constexpr int32_t kLaneChunks = 8;  ///< 16-byte chunks of fp8 data of a KV tile that a lane has
static_assert(kMaxFp8TmaTokens == kAtomRows * kWarpAtoms && kFp8RowBytes == kFp8Dim);

/// A TMA tile of fp8 data lands in the second half of the memory that its float16 takes, and the warp that has issued
/// it dequantizes it in place. So a KV tile needs no other memory, and producer warps do not wait for each other.
template <Fp8 kFp8, Variant kVariant>
class Fp8Producer : public Producer<__half, kFp8Dim, kFp8Dim, kVariant, kWarpgroupWarps> {
  using Base = Producer<__half, kFp8Dim, kFp8Dim, kVariant, kWarpgroupWarps>;
  friend Base;
  friend typename Base::Fetcher;
  using Base::commit_work_tile;
  using Base::copy_q;
  using Base::kBlockN;
  using Base::kDims;
  using Base::kLayout;
  using Base::lane_;
  using Base::memory_;
  using Base::params_;
  using Base::storage_;
  using Base::tile_number_;
  using Base::token_begin;
  using Base::warp_;
  using typename Base::KvTiles;
  using typename Base::TmaTile;

 public:
  __device__ __forceinline__ Fp8Producer(const PrefillParams& params, unsigned char* memory, SharedStorage& storage)
      : Base(params, memory, storage), lane_layout_(lane_) {}

  __device__ __forceinline__ void run() { this->run_as(*this); }

 private:
  static constexpr bool kLateQ = true;  ///< behind the first K tiles, whose TMA is in flight meanwhile

  /// Loads Q and commits the work tile.
  __device__ __forceinline__ void load_q(int32_t tile_buffer) const {
    copy_q(tile_buffer);
    if (params_.attention.q_dtype == DType::kBFloat16) convert_q(tile_buffer);
    commit_work_tile(tile_buffer);
  }

  /// Converts bfloat16 Q to float16 in place.
  __device__ __forceinline__ void convert_q(int32_t tile_buffer) const {
    constexpr int32_t kChunks = kFp8Dim / kElementsPer16B;
    ptx::cp_async_wait_all();
    __syncwarp();
    const uint32_t q =
        memory_ + static_cast<uint32_t>(kLayout.q + tile_buffer * kConsumerWarpgroups * q_bytes(kFp8Dim));
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

  /// A load: K0, K1, V0, K2, V1, ..., and the last V tile.
  struct LoadStep {
    bool is_k;
    int32_t tile;  ///< numbered from the last KV tile
  };
  __device__ __forceinline__ static LoadStep load_step(int32_t n, int32_t num_steps) {
    if (n == num_steps - 1) return {false, n / 2};
    return {n == 0 || n % 2 == 1, n % 2 == 1 ? (n + 1) / 2 : (n == 0 ? 0 : n / 2 - 1)};
  }

  /// The stage of a load step.
  struct Fp8Stage {
    uint32_t index;
    uint32_t tile;
    uint32_t full;
    uint32_t empty;
    uint32_t landed;  ///< barrier of this warp's TMA
    uint32_t parity;  ///< of the phase that fills the stage
  };
  __device__ __forceinline__ Fp8Stage stage_of(const LoadStep& step) const {
    constexpr auto kStages = static_cast<uint32_t>(stages(kDims));
    const uint32_t use = kv_tiles_done_ + static_cast<uint32_t>(step.tile);
    const uint32_t index = use % kStages;
    const uint32_t pipeline =
        ptx::shared_address(&storage_.k_pipeline) +
        (step.is_k ? 0 : ptx::shared_address(&storage_.v_pipeline) - ptx::shared_address(&storage_.k_pipeline));
    return {index,
            memory_ + static_cast<uint32_t>(step.is_k ? kLayout.k : kLayout.v) +
                index * static_cast<uint32_t>(tile_bytes(kDims, kFp8Dim)),
            pipeline + static_cast<uint32_t>(offsetof(KvPipeline, full)) + 8 * index,
            pipeline + static_cast<uint32_t>(offsetof(KvPipeline, empty)) + 8 * index,
            ptx::shared_address(storage_.fp8_landed) +
                8 * (((step.is_k ? 0 : kMaxStages) + index) * kWarpgroupWarps + static_cast<uint32_t>(warp_)),
            use / kStages & 1};
  }

  /// TMA tiles are issued as soon as a stage is free, and dequantized in the order of the loads.
  template <int32_t TmaTiles>
  __device__ __forceinline__ void load_by_tma(const KvTiles& tiles, const PrefillParams::Maps& maps,
                                              const SegmentLoad& load, const int32_t* pages, int32_t head) {
    constexpr int32_t kAtOnce = 32 / TmaTiles;
    const uint64_t policy = ptx::evict_last_policy();
    const int32_t num_steps = 2 * tiles.count;
    TmaTile next = this->first_tma_tiles_;
    int32_t here = -1;
    int32_t k_at[TmaTiles];
    int32_t v_at[TmaTiles];
#pragma unroll
    for (int32_t b = 0; b < TmaTiles; ++b) k_at[b] = v_at[b] = -1;
    int32_t issued = 0;
    bool has_q = false;
#pragma unroll 1
    for (int32_t n = 0; n < num_steps; ++n) {
      const LoadStep due = load_step(n, num_steps);
      const Fp8Stage due_stage = stage_of(due);
      // Stages become free while this waits for fp8 data. A wait for that alone would issue one tile at a time.
#pragma unroll 1
      do {
#pragma unroll 1
        for (; issued < num_steps; ++issued) {
          const LoadStep step = load_step(issued, num_steps);
          const Fp8Stage stage = stage_of(step);
          if (!__all_sync(kAllLanes, ptx::mbarrier_test_wait(stage.empty, stage.parity ^ 1))) break;  // see next_stage
          if (step.is_k || issued == num_steps - 1) {
#pragma unroll
            for (int32_t b = 0; b < TmaTiles; ++b) v_at[b] = k_at[b];
          }
          if (step.is_k) {
            if (step.tile % kAtOnce == 0) {
              here = next.atom < 0 ? -1 : next.page * load.atoms_per_page + next.atom;
              next = this->template find_tma_tile<TmaTiles>(tiles, step.tile + kAtOnce, load,
                                                            pages);  // completes before it is used
            }
#pragma unroll
            for (int32_t b = 0; b < TmaTiles; ++b) {
              k_at[b] = __shfl_sync(kAllLanes, here, step.tile % kAtOnce * TmaTiles + b);
            }
            issue_tma<TmaTiles>(stage, maps.k, k_at, head, policy);
          } else {
            issue_tma<TmaTiles>(stage, maps.v, v_at, head, policy);
          }
        }
        if (!has_q) {
          load_q(tile_number_ % kTileBuffers);
          has_q = true;
        }
      } while (!__all_sync(kAllLanes, ptx::mbarrier_test_wait(due_stage.landed, due_stage.parity)));
      constexpr int32_t kTmaAtoms = kWarpAtoms / TmaTiles;  // of a TMA tile
      constexpr int32_t kChunksAtOnce = 4;                  // no atom is written over fp8 data that is read later
      const uint32_t mine = due_stage.tile + static_cast<uint32_t>(warp_ * kTmaAtoms * atom_row_bytes(kFp8Dim));
      bool nonfinite = false;
#pragma unroll
      for (int32_t first = 0; first < kLaneChunks; first += kChunksAtOnce) {
        uint4 fp8[kChunksAtOnce];
#pragma unroll
        for (int32_t i = 0; i < kChunksAtOnce; ++i) {
          const int32_t atom = (first + i) / 2;
          fp8[i] = ptx::ld_shared_16(mine + tma_tile_offset<TmaTiles>(atom / kTmaAtoms) + kFp8Offset<TmaTiles> +
                                     static_cast<uint32_t>(atom % kTmaAtoms * kFp8AtomBytes) +
                                     fp8_offset(lane_layout_, i % 2));
        }
        __syncwarp();  // all lanes have read what is overwritten now
        nonfinite = dequantize<TmaTiles>(tiles, due, due_stage, first, fp8) || nonfinite;
      }
      commit_tile(tiles, due, due_stage, nonfinite);
    }
    kv_tiles_done_ += static_cast<uint32_t>(tiles.count);
  }

  /// From the warp's first TMA tile of a KV tile to its number `number`; from a TMA tile's memory to its fp8 data.
  template <int32_t TmaTiles>
  __device__ __forceinline__ static constexpr uint32_t tma_tile_offset(int32_t number) {
    return static_cast<uint32_t>(kWarpgroupWarps * number * (kWarpAtoms / TmaTiles) * atom_row_bytes(kFp8Dim));
  }
  template <int32_t TmaTiles>
  static constexpr uint32_t kFp8Offset = kWarpAtoms / TmaTiles* kFp8AtomBytes;

  /// Issues the warp's TMA tiles of a KV tile.
  template <int32_t TmaTiles>
  __device__ __forceinline__ void issue_tma(const Fp8Stage& stage, const CUtensorMap& map,
                                            const int32_t (&at)[TmaTiles], int32_t head, uint64_t policy) const {
    if (!ptx::elect_one()) return;
    constexpr int32_t kTmaAtoms = kWarpAtoms / TmaTiles;
    int32_t count = 0;
#pragma unroll
    for (int32_t b = 0; b < TmaTiles; ++b) count += at[b] >= 0 ? 1 : 0;
    ptx::mbarrier_arrive_expect_tx(stage.landed, static_cast<uint32_t>(count * kTmaAtoms * kFp8AtomBytes));
    const uint32_t to =
        stage.tile + static_cast<uint32_t>(warp_ * kTmaAtoms * atom_row_bytes(kFp8Dim)) + kFp8Offset<TmaTiles>;
#pragma unroll
    for (int32_t b = 0; b < TmaTiles; ++b) {
      if (at[b] >= 0)
        ptx::tma_load_5d(to + tma_tile_offset<TmaTiles>(b), &map, stage.landed, 0, 0, 0, head, at[b], policy);
    }
  }

  /// Writes the lane's chunks from number `begin` on, dequantized. In a V tile that some rows see in part, tokens that
  /// no row sees become zeros; returns whether the others hold NaN or Inf.
  template <int32_t TmaTiles, int32_t Count>
  __device__ __forceinline__ bool dequantize(const KvTiles& tiles, const LoadStep& step, const Fp8Stage& stage,
                                             int32_t begin, uint4 (&fp8)[Count]) const {
    constexpr int32_t kTmaAtoms = kWarpAtoms / TmaTiles;
    bool nonfinite = false;
    if (!step.is_k && tiles.is_edge(step.tile)) {
      const int32_t first = tiles.first_token(step.tile) + warp_ * kTmaAtoms * kAtomRows + lane_layout_.row;
#pragma unroll
      for (int32_t i = 0; i < Count; ++i) {
        const int32_t atom = (begin + i) / 2;
        const int32_t token = first + (kWarpgroupWarps * (atom / kTmaAtoms) * kTmaAtoms + atom % kTmaAtoms) * kAtomRows;
        if (token < tiles.visible.any_begin || token >= tiles.visible.any_end) fp8[i] = uint4{};
        nonfinite = nonfinite || has_nonfinite<kFp8>(fp8[i]);
      }
    }
    const uint32_t mine = stage.tile + static_cast<uint32_t>(warp_ * kTmaAtoms * atom_row_bytes(kFp8Dim));
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) {
      const int32_t atom = (begin + i) / 2;
      store_dequantized(
          mine + tma_tile_offset<TmaTiles>(atom / kTmaAtoms) +
              static_cast<uint32_t>(atom % kTmaAtoms * atom_row_bytes(kFp8Dim) + i % 2 * atom_bytes(kFp8Dim)),
          lane_layout_, dequantized<__half, kFp8>(fp8[i]));
    }
    return nonfinite;
  }

  __device__ __forceinline__ void commit_tile(const KvTiles& tiles, const LoadStep& step, const Fp8Stage& stage,
                                              bool nonfinite) const {
    if (!step.is_k && tiles.is_edge(step.tile)) {
      nonfinite = __any_sync(kAllLanes, nonfinite);
      if (lane_ == 0) storage_.nonfinite[stage.index][warp_] = nonfinite ? 1 : 0;
    }
    if constexpr (kVariant == Variant::kAny) {
      if (step.is_k) this->store_visible_bits(tiles.first_token(step.tile), stage.index);
    }
    producer_commit({stage.index, stage.tile, stage.full});
  }

  /// Any other K and V: fp8 data comes through registers, and is loaded while the pipeline has no free stage.
  __device__ __forceinline__ void load_by_threads(const KvTiles& tiles, const SegmentParams& segment,
                                                  const SegmentLoad& load, const int32_t* pages,
                                                  const scheduler::WorkTile& work_tile) {
    const int32_t num_steps = 2 * tiles.count;
    const int32_t first_token = segment.paged ? 0 : segment.indptr[work_tile.kv_row];
#pragma unroll 1
    for (int32_t n = 0; n < num_steps; ++n) {
      const LoadStep step = load_step(n, num_steps);
      const KvStrides& strides = step.is_k ? segment.k_strides : segment.v_strides;
      const auto* const data = static_cast<const uint8_t*>(step.is_k ? segment.k : segment.v);
      const int64_t begin = token_begin(tiles, step.tile, strides, work_tile.kv_head, load, pages, first_token);
      uint4 fp8[kLaneChunks];
#pragma unroll
      for (int32_t i = 0; i < kLaneChunks; ++i) {
        const int64_t at = __shfl_sync(kAllLanes, begin, i / 2 * kAtomRows + lane_layout_.row);
        const uint8_t* const from = data + at + 64 * (i % 2) + 16 * lane_layout_.chunk;
        fp8[i] = uint4{};
        if (at < 0) continue;
        if (load.is_16B_aligned) {
          fp8[i] = *reinterpret_cast<const uint4*>(from);
        } else {
          fp8[i] = load_16B(from);
        }
      }
      if (n == 0) load_q(tile_number_ % kTileBuffers);
      const Fp8Stage stage = stage_of(step);
      ptx::mbarrier_wait(stage.empty, stage.parity ^ 1);
      if (lane_ == 0) ptx::mbarrier_arrive(stage.landed);  // keeps its phases in step with the stage's
      ptx::mbarrier_wait_warp(stage.landed, stage.parity);
      commit_tile(tiles, step, stage, dequantize<1>(tiles, step, stage, 0, fp8));
    }
    kv_tiles_done_ += static_cast<uint32_t>(tiles.count);
  }

  /// Sixteen fp8 values, whatever their address.
  __device__ __forceinline__ static uint4 load_16B(const uint8_t* from) {
    uint32_t words[4] = {};
#pragma unroll
    for (int32_t i = 0; i < 16; ++i) words[i / 4] |= uint32_t{from[i]} << i % 4 * 8;
    return {words[0], words[1], words[2], words[3]};
  }

  const Fp8Lane lane_layout_;
  uint32_t kv_tiles_done_ = 0;  ///< of work tiles before the present one
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
