#pragma once

#include "kernels/cuda/sm90/common/copy.cuh"
#include "kernels/cuda/sm90/mla/mask.cuh"
#include "ptx/tma.cuh"

/// The producer's part for fp8 keys and values. The last warp loads fp8 data, the others dequantize it in place to the
/// MMA's type: the consumers do not notice. Scales of keys and values are the softmax's and the epilogue's.
namespace folio::inline v0::kernels::cuda::sm90::mla {

constexpr int32_t kFp8LoadWarp = 3;  ///< the others dequantize

/// A KV tile of keys, or of values in a tensor of their own.
struct Fp8Tile {
  uint32_t number;  ///< in the KV pipeline
  int32_t first;    ///< local token
  bool is_k;
};

template <typename Traits>
class Fp8Producer {
  using T = typename Traits::T;
  using L = RowsLayout;
  static constexpr bool kHasRope = Traits::kHasRope;
  static constexpr int32_t kAtoms = kBlockN / 8;  ///< of tokens, in a KV tile
  static constexpr int32_t kAtomBytes = 1024;
  /// Each half of V has a warp, which leaves its last atoms to the RoPE part's.
  static constexpr int32_t kOwnAtoms = 6;
  static constexpr int32_t kLaneChunks = 4;  ///< of fp8 data that a lane handles at once

 public:
  __device__ __forceinline__ Fp8Producer(unsigned char* smem, SharedStorage& storage)
      : storage_(storage),
        smem_(ptx::shared_address(smem)),
        kv_full_(ptx::shared_address(storage.kv_full)),
        kv_empty_(ptx::shared_address(storage.kv_empty)),
        landed_(ptx::shared_address(storage.fp8_landed)),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  /// By the last warp: loads a tile by TMA. The lane has the place of its TMA tile of a block, see
  /// Producer::find_tma_tile; `lane_of_place`: the lane that has that of the tile's first one.
  __device__ __forceinline__ void load_by_tma(const Fp8Tile& tile, const CUtensorMap& map, const KvTiles& tiles,
                                              const KvCopy& copy, const TokenPlace& place, int32_t lane_of_place,
                                              int32_t head) const {
    const PipelineState state = pipeline_state<L>(tile.number);
    const int32_t in_block = lane_ & ((1 << copy.log2_tma_tiles) - 1);
    const int32_t in_part = lane_ >> copy.log2_tma_tiles;
    const int32_t page = __shfl_sync(kAllLanes, place.page, lane_of_place + in_block);
    const int32_t in_page = __shfl_sync(kAllLanes, place.in_page, lane_of_place + in_block);
    const TmaTileRange range = loaded_tma_tiles(tiles.kv_begin, tiles.kv_end, tile.first, copy.tma_tokens);
    const int32_t bytes = 128 * copy.tma_tokens;
#pragma unroll
    for (int32_t part = 0; part < kKvParts; ++part) {
      if (is_empty(tile.is_k, part)) continue;
      const int32_t blocks = fp8_block_count(part);
      const uint32_t barrier = acquire(state, part);
      if (lane_ == 0) {
        ptx::mbarrier_arrive(barrier, kFp8LandedArrivals - 1);
        ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>((range.end - range.begin) * blocks * bytes));
      }
      __syncwarp();
      if (in_part < blocks && in_page >= 0) {
        const int32_t block = fp8_block_begin(part) + in_part;
        ptx::tma_load_5d(tile_address(state) + static_cast<uint32_t>(fp8_block_offset(block) + in_block * bytes), &map,
                         barrier, 128 * block, in_page, head, page, 0, ptx::evict_first_policy());
      }
    }
  }

  /// By the last warp: copies a tile whose pages, strides or alignment are not TMA's. The lane has the places of token
  /// `lane` and of the one 32 further on.
  __device__ __forceinline__ void load_by_threads(const Fp8Tile& tile, const void* data, const KvStrides& strides,
                                                  bool aligned, const TokenPlace (&places)[2], int32_t head) const {
    const PipelineState state = pipeline_state<L>(tile.number);
    int64_t begin[2];  // of a token in `data`
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      begin[i] = places[i].in_page < 0
                     ? -1
                     : places[i].page * strides.page + places[i].in_page * strides.token + head * strides.head;
    }
#pragma unroll 1
    for (int32_t part = 0; part < kKvParts; ++part) {
      if (is_empty(tile.is_k, part)) continue;
      const uint32_t barrier = acquire(state, part);
      const int32_t log2_chunks = part == kRope ? 2 : 4;  // of a token
      const int32_t half_chunks = 32 << log2_chunks;      // of 32 tokens
#pragma unroll 1
      for (int32_t half = 0; half < 2; ++half) {
#pragma unroll 4
        for (int32_t i = lane_; i < half_chunks; i += 32) {
          const int32_t row = i >> log2_chunks;
          const int32_t chunk = 8 * fp8_block_begin(part) + (i & ((1 << log2_chunks) - 1));
          const int64_t at = __shfl_sync(kAllLanes, half == 0 ? begin[0] : begin[1], row);
          const uint8_t* const from = static_cast<const uint8_t*>(data) + (at < 0 ? 0 : at + 16 * chunk);
          const uint32_t to =
              tile_address(state) +
              static_cast<uint32_t>(fp8_block_offset(chunk / 8) + (32 * half + row) * 128 + ((chunk ^ row) & 7) * 16);
          if (aligned) {
            ptx::cp_async_16(to, from, at >= 0);
          } else {
            copy_fp8_16B(to, from, at >= 0);
          }
        }
      }
      if (aligned) {
        ptx::cp_async_mbarrier_arrive(barrier);
      } else {
        ptx::mbarrier_arrive(barrier);
      }
    }
  }

  /// By the other warps: dequantizes their share of a tile and commits it.
  template <Fp8 kFp8>
  __device__ __forceinline__ void dequantize(const Fp8Tile& tile, bool has_v, const Boundary& boundary) {
    const PipelineState state = pipeline_state<L>(tile.number);
    const bool at_boundary = has_v && boundary.has(tile.first);
    if (warp_ != kRope) {
      dequantize_part<kFp8, kBlocksOfHalf, 0, kOwnAtoms>(state, warp_, tile.first, boundary.visible, at_boundary);
      return;
    }
    dequantize_part<kFp8, kBlocksOfHalf, kOwnAtoms, kAtoms>(state, kVLeft, tile.first, boundary.visible, at_boundary);
    dequantize_part<kFp8, kBlocksOfHalf, kOwnAtoms, kAtoms>(state, kVRight, tile.first, boundary.visible, at_boundary);
    if (is_empty(tile.is_k, kRope)) {
      ptx::mbarrier_wait(kv_empty_ + kv_barrier_offset(state, kRope), state.parity ^ 1);
      commit(state, kRope);
    } else {
      dequantize_part<kFp8, 1, 0, kAtoms>(state, kRope, tile.first, boundary.visible, false);
    }
  }

 private:
  static __device__ __forceinline__ bool is_empty(bool is_k, int32_t part) {
    return part == kRope && (!is_k || !kHasRope);
  }
  __device__ __forceinline__ uint32_t tile_address(const PipelineState& at) const {
    return smem_ + at.stage * static_cast<uint32_t>(L::kTileBytes);
  }
  __device__ __forceinline__ uint32_t landed_barrier(const PipelineState& at, int32_t part) const {
    return landed_ + kv_barrier_offset(at, part);
  }
  /// Waits until the consumers have released the part. Returns the barrier of its fp8 data.
  __device__ __forceinline__ uint32_t acquire(const PipelineState& at, int32_t part) const {
    ptx::mbarrier_wait(kv_empty_ + kv_barrier_offset(at, part), at.parity ^ 1);
    return landed_barrier(at, part);
  }

  static constexpr int32_t kBlocksOfHalf = L::kHalfColumnBlocks / 2;  ///< fp8 blocks of a half of V

  /// Two warps share a half of V, one has the RoPE part.
  __device__ __forceinline__ void commit(const PipelineState& at, int32_t part) const {
    ptx::mbarrier_arrive(kv_full_ + kv_barrier_offset(at, part), kFullArrivals / (part == kRope ? 32 : 64));
  }

  /// The atoms [Begin, End) of a part of `Blocks` fp8 blocks. The RoPE part's fp8 block becomes one column block,
  /// others become two.
  template <Fp8 kFp8, int32_t Blocks, int32_t Begin, int32_t End>
  __device__ __forceinline__ void dequantize_part(const PipelineState& state, int32_t part, int32_t first,
                                                  const VisibleRange& visible, bool at_boundary) {
    const uint32_t bit = 1u << (state.stage * kKvParts + static_cast<uint32_t>(part));
    ptx::mbarrier_wait_warp(landed_barrier(state, part), (phases_ & bit) != 0 ? 1 : 0);
    phases_ ^= bit;
    const uint32_t address = tile_address(state) + static_cast<uint32_t>(2 * fp8_block_begin(part) * kColumnBlockBytes);
    if (at_boundary) {
      bool nonfinite = dequantize_atoms<kFp8, Blocks, Begin, End, true>(address, first, visible);
      nonfinite = __any_sync(kAllLanes, nonfinite);
      uint8_t(&flags)[kWarpgroupWarps] = storage_.nonfinite[state.stage][part];
      if (lane_ == 0) flags[warp_] = nonfinite ? 1 : 0;
      if (lane_ == 0 && warp_ == kRope) flags[1 - part] = flags[kFp8LoadWarp] = 0;  // of warps without a share
    } else {
      dequantize_atoms<kFp8, Blocks, Begin, End, false>(address, first, visible);
    }
    ptx::fence_view_async_shared();
    commit(state, part);
  }

  using Chunks = uint4[kLaneChunks];
  /// What a warp handles at once: two atoms of an fp8 block that becomes two column blocks, four atoms of one that
  /// becomes one.
  template <int32_t Blocks, int32_t Begin>
  struct Group {
    static constexpr int32_t kHalves = Blocks == 1 ? 1 : 2;
    static constexpr int32_t kGroupAtoms = kLaneChunks / kHalves;
    int32_t atom;
    int32_t block;
    __device__ __forceinline__ explicit Group(int32_t group)
        : atom(Begin + group / Blocks * kGroupAtoms), block(group % Blocks) {}
    /// Bytes from the part's first column block to 16-bit elements of a chunk's atom.
    __device__ __forceinline__ uint32_t offset(int32_t chunk) const {
      return static_cast<uint32_t>((2 * block + chunk % kHalves) * kColumnBlockBytes +
                                   (atom + chunk / kHalves) * kAtomBytes);
    }
    /// To its fp8 data: see fp8_block_offset.
    __device__ __forceinline__ uint32_t fp8_data(int32_t chunk, const Fp8Lane& lane) const {
      return static_cast<uint32_t>((2 * block + kHalves - 1) * kColumnBlockBytes +
                                   (atom + chunk / kHalves) * kAtomBytes) +
             fp8_offset(lane, chunk % kHalves);
    }
  };

  /// A group's fp8 data is read before the group in front of it is written: their memory does not overlap.
  /// `AtBoundary`: tokens that no row sees become zeros; returns whether this lane has seen NaN or Inf in others.
  template <Fp8 kFp8, int32_t Blocks, int32_t Begin, int32_t End, bool AtBoundary>
  __device__ __forceinline__ bool dequantize_atoms(uint32_t address, int32_t first, const VisibleRange& visible) const {
    using G = Group<Blocks, Begin>;
    constexpr int32_t kGroups = (End - Begin) / G::kGroupAtoms * Blocks;
    static_assert((End - Begin) % G::kGroupAtoms == 0);
    const Fp8Lane lane(lane_);
    bool nonfinite = false;
    Chunks fp8;
#pragma unroll
    for (int32_t c = 0; c < kLaneChunks; ++c) fp8[c] = ptx::ld_shared_16(address + G(0).fp8_data(c, lane));
#pragma unroll
    for (int32_t g = 0; g < kGroups; ++g) {
      Chunks next;
#pragma unroll
      for (int32_t c = 0; c < kLaneChunks && g + 1 < kGroups; ++c) {
        next[c] = ptx::ld_shared_16(address + G(g + 1).fp8_data(c, lane));
      }
      __syncwarp();  // all lanes have read what is overwritten now
#pragma unroll
      for (int32_t c = 0; c < kLaneChunks; ++c) {
        if constexpr (AtBoundary) {
          const int32_t token = first + 8 * (G(g).atom + c / G::kHalves) + lane.row;
          if (token < visible.any_begin || token >= visible.any_end) fp8[c] = uint4{};
          nonfinite = nonfinite || has_nonfinite<kFp8>(fp8[c]);
        }
        store_dequantized<T, kFp8>(address + G(g).offset(c), lane, fp8[c]);
        if (g + 1 < kGroups) fp8[c] = next[c];
      }
    }
    return nonfinite;
  }

  SharedStorage& storage_;
  const uint32_t smem_;
  const uint32_t kv_full_;
  const uint32_t kv_empty_;
  const uint32_t landed_;
  const int32_t warp_;
  const int32_t lane_;
  uint32_t phases_ = 0;  ///< parity of fp8_landed, a bit each
};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
