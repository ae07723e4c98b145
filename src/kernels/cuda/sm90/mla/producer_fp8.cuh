#pragma once

#include "kernels/cuda/sm90/common/copy.cuh"
#include "kernels/cuda/sm90/mla/mask.cuh"
#include "ptx/tma.cuh"

/// The producer's part for fp8 keys and values. The last warp loads fp8 data, the others dequantize it in place to the
/// MMA's type: the consumers do not notice. Scales of keys and values are the softmax's and the epilogue's. Those of
/// rows of fp8_ds_mla are multiplied here; the RoPE part of these stays bfloat16.
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
  static constexpr bool kHasUnits = Traits::kDsMla && Traits::kDequantizes;  ///< RowsStorage::units
  static constexpr int32_t kAtoms = kBlockN / 8;                             ///< of tokens, in a KV tile
  static constexpr int32_t kAtomBytes = 1024;
  /// Each half of V has a warp, which leaves its last atoms to the RoPE part's.
  static constexpr int32_t kOwnAtoms = 6;
  static constexpr int32_t kLaneChunks = 4;  ///< of fp8 data that a lane handles at once

 public:
  __device__ __forceinline__ Fp8Producer(unsigned char* smem, typename Traits::Storage& storage)
      : storage_(storage),
        smem_(ptx::shared_address(smem)),
        kv_full_(ptx::shared_address(storage.kv_full)),
        kv_empty_(ptx::shared_address(storage.kv_empty)),
        landed_(ptx::shared_address(storage.fp8_landed)),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  /// By the last warp: loads a tile by TMA. The lane has the place of its TMA tile of a block, see
  /// Producer::find_tma_tile; `lane_of_place`: the lane that has that of the tile's first one.
  __device__ __forceinline__ void load_by_tma(const Fp8Tile& tile, const MlaParams::TensorMaps& maps,
                                              const KvTiles& tiles, const KvCopy& copy, const TokenPlace& place,
                                              int32_t lane_of_place, int32_t head) const {
    const CUtensorMap& map = tile.is_k ? maps.k : maps.v;
    const bool ds_mla = takes_ds_mla(copy);
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
      const bool scales = ds_mla && part == kVLeft;
      const int32_t scale_bytes = scales ? kTokenScaleBytes * copy.tma_tokens : 0;
      const uint32_t barrier = acquire(state, part);
      if (lane_ == 0) {
        ptx::mbarrier_arrive(barrier, kFp8LandedArrivals - 1);
        ptx::mbarrier_arrive_expect_tx(
            barrier, static_cast<uint32_t>((range.end - range.begin) * (blocks * bytes + scale_bytes)));
      }
      __syncwarp();
      if (in_part < blocks && in_page >= 0) {
        const int32_t block = fp8_block_begin(part) + in_part;
        const uint32_t to = tile_address(state) + static_cast<uint32_t>(fp8_block_offset(block) + in_block * bytes);
        if (ds_mla) {
          const CUtensorMap& of_part = part == kRope ? maps.v : map;
          ptx::tma_load_5d(to, &of_part, barrier, part == kRope ? 0 : 128 * block, in_page, 0, page, 0,
                           ptx::evict_first_policy());
          if (scales && in_part == 0) {
            ptx::tma_load_5d(scales_of(state, in_block * copy.tma_tokens), &maps.scales, barrier, 0, in_page, 0, page,
                             0, ptx::evict_first_policy());
          }
        } else {
          ptx::tma_load_5d(to, &map, barrier, 128 * block, in_page, head, page, 0, ptx::evict_first_policy());
        }
      }
    }
  }

  /// By the last warp: copies a tile whose pages, strides or alignment are not TMA's. The lane has the places of token
  /// `lane` and of the one 32 further on.
  __device__ __forceinline__ void load_by_threads(const Fp8Tile& tile, const void* data, const KvStrides& strides,
                                                  const KvCopy& copy, const TokenPlace (&places)[2],
                                                  int32_t head) const {
    const bool aligned = copy.aligned;
    const bool ds_mla = takes_ds_mla(copy);
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
      const int32_t log2_chunks = part == kRope ? (ds_mla ? 3 : 2) : 4;  // of a token
      // Between a row's latent and its RoPE part are the scales.
      const int32_t skipped = ds_mla && part == kRope ? kTokenScaleBytes : 0;
      const int32_t half_chunks = 32 << log2_chunks;  // of 32 tokens
#pragma unroll 1
      for (int32_t half = 0; half < 2; ++half) {
#pragma unroll 4
        for (int32_t i = lane_; i < half_chunks; i += 32) {
          const int32_t row = i >> log2_chunks;
          const int32_t chunk = 8 * fp8_block_begin(part) + (i & ((1 << log2_chunks) - 1));
          const int64_t at = __shfl_sync(kAllLanes, half == 0 ? begin[0] : begin[1], row);
          const uint8_t* const from = static_cast<const uint8_t*>(data) + (at < 0 ? 0 : at + 16 * chunk + skipped);
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
      if (ds_mla && part == kVLeft) copy_scales(state, static_cast<const uint8_t*>(data), begin);
      if (aligned) {
        ptx::cp_async_mbarrier_arrive(barrier);
      } else {
        ptx::mbarrier_arrive(barrier);
      }
    }
  }

  /// Before the KV tiles of a work tile.
  __device__ __forceinline__ void begin_work_tile() {
    unit_ = 0.0f;
  }

  /// By the other warps: dequantizes their share of a tile and commits it. `DsMla`: of rows of fp8_ds_mla.
  template <Fp8 kFp8, bool DsMla>
  __device__ __forceinline__ void dequantize(const Fp8Tile& tile, bool has_v, const Boundary& boundary) {
    const PipelineState state = pipeline_state<L>(tile.number);
    const bool at_boundary = has_v && boundary.has(tile.first);
    // The scales of fp8_ds_mla land with the left half of V. Who waits for them waits always, so that no phase is
    // missed.
    const bool left_landed = Traits::kTakesDsMla && (kHasUnits || warp_ == kVRight);
    if (left_landed) wait_landed(state, kVLeft);
    if constexpr (kHasUnits) choose_unit(state, tile.first, boundary.visible);
    if (warp_ != kRope) {
      if (!(left_landed && warp_ == kVLeft)) wait_landed(state, warp_);
      dequantize_part<kFp8, DsMla, kBlocksOfHalf, 0, kOwnAtoms>(state, warp_, tile.first, boundary.visible,
                                                                at_boundary);
      return;
    }
    if (!left_landed) wait_landed(state, kVLeft);
    dequantize_part<kFp8, DsMla, kBlocksOfHalf, kOwnAtoms, kAtoms>(state, kVLeft, tile.first, boundary.visible,
                                                                   at_boundary);
    wait_landed(state, kVRight);
    dequantize_part<kFp8, DsMla, kBlocksOfHalf, kOwnAtoms, kAtoms>(state, kVRight, tile.first, boundary.visible,
                                                                   at_boundary);
    if (is_empty(tile.is_k, kRope)) {
      ptx::mbarrier_wait(kv_empty_ + kv_barrier_offset(state, kRope), state.parity ^ 1);
      commit(state, kRope);
    } else if constexpr (DsMla) {
      wait_landed(state, kRope);
      if constexpr (kHasUnits) apply_unit_to_rope(state);
      ptx::fence_view_async_shared();
      commit(state, kRope);
    } else {
      wait_landed(state, kRope);
      dequantize_part<kFp8, false, 1, 0, kAtoms>(state, kRope, tile.first, boundary.visible, false);
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
  static __device__ __forceinline__ bool takes_ds_mla(const KvCopy& copy) {
    return Traits::kTakesDsMla && copy.ds_mla;
  }
  __device__ __forceinline__ uint32_t scales_of(const PipelineState& at, int32_t token) const {
    return block_scales_of<Traits>(storage_, at.stage, token);
  }
  /// By one warp: of the lane's two tokens, which begin at `begin`.
  __device__ __forceinline__ void copy_scales(const PipelineState& at, const uint8_t* data,
                                              const int64_t (&begin)[2]) const {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const bool valid = begin[i] >= 0;
      ptx::cp_async_16(scales_of(at, 32 * i + lane_), data + (valid ? begin[i] + kDsMlaScalesOffset : 0), valid);
    }
  }
  /// The unit of the KV tile that begins at local token `first`, and of those behind it in the work tile. 1, unless the
  /// largest block scale is too large for it, or that of the work tile's first KV tile too small.
  __device__ __forceinline__ void choose_unit(const PipelineState& at, int32_t first, const VisibleRange& visible) {
    constexpr float kMostPerUnit = 0x1p+7f;    // 448 of them are finite in float16
    constexpr float kLeastPerUnit = 0x1p-13f;  // a normal number in float16
    float most = 0.0f;                         // of finite block scales of tokens that some row sees
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t token = 32 * i + lane_;
      const uint4 words = ptx::ld_shared_16(scales_of(at, token));
      const float scale = fmaxf(fmaxf(fabsf(__uint_as_float(words.x)), fabsf(__uint_as_float(words.y))),
                                fmaxf(fabsf(__uint_as_float(words.z)), fabsf(__uint_as_float(words.w))));
      const bool counts = first + token >= visible.any_begin && first + token < visible.any_end && scale < INFINITY;
      most = counts ? fmaxf(most, scale) : most;
    }
    const bool first_of_work_tile = unit_ == 0.0f;
    if (first_of_work_tile || __any_sync(kAllLanes, most > kMostPerUnit * unit_)) [[unlikely]] {
      most = __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(most)));
      if (first_of_work_tile) unit_ = 1.0f;
      if (most > kMostPerUnit * unit_ || (first_of_work_tile && most > 0.0f && most < kLeastPerUnit)) {
        unit_ = power_of_two(min(max(static_cast<int32_t>(__float_as_uint(most) >> 23) - 127, -126), 126));
      }
    }
  }
  /// Tells the consumers the KV tile's unit and divides its RoPE part by it. The consumers' threads release that part
  /// one by one, so all have read the unit before.
  __device__ __forceinline__ void apply_unit_to_rope(const PipelineState& at) const {
    if (lane_ == 0) storage_.units[at.stage] = unit_;
    if (unit_ == 1.0f) return;
    const int32_t exponent = static_cast<int32_t>(__float_as_uint(unit_) >> 23) - 127;
    const uint32_t begin = tile_address(at) + static_cast<uint32_t>(L::kPOffset);
#pragma unroll 1
    for (int32_t at_byte = 16 * lane_; at_byte < kColumnBlockBytes; at_byte += 16 * 32) {
      uint4 chunk = ptx::ld_shared_16(begin + static_cast<uint32_t>(at_byte));
      divide_bfloat16(chunk, exponent);
      ptx::st_shared_16(begin + static_cast<uint32_t>(at_byte), chunk);
    }
  }
  __device__ __forceinline__ void wait_landed(const PipelineState& at, int32_t part) {
    const uint32_t bit = 1u << (at.stage * kKvParts + static_cast<uint32_t>(part));
    ptx::mbarrier_wait_warp(landed_barrier(at, part), (phases_ & bit) != 0 ? 1 : 0);
    phases_ ^= bit;
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
  template <Fp8 kFp8, bool DsMla, int32_t Blocks, int32_t Begin, int32_t End>
  __device__ __forceinline__ void dequantize_part(const PipelineState& state, int32_t part, int32_t first,
                                                  const VisibleRange& visible, bool at_boundary) const {
    const uint32_t address = tile_address(state) + static_cast<uint32_t>(2 * fp8_block_begin(part) * kColumnBlockBytes);
    const uint32_t scales = scales_of(state, 0) + static_cast<uint32_t>(4 * fp8_block_begin(part));
    if (at_boundary) {
      bool nonfinite = dequantize_atoms<kFp8, DsMla, Blocks, Begin, End, true>(address, scales, first, visible);
      nonfinite = __any_sync(kAllLanes, nonfinite);
      uint8_t(&flags)[kWarpgroupWarps] = storage_.nonfinite[state.stage][part];
      if (lane_ == 0) flags[warp_] = nonfinite ? 1 : 0;
      if (lane_ == 0 && warp_ == kRope) flags[1 - part] = flags[kFp8LoadWarp] = 0;  // of warps without a share
    } else {
      dequantize_atoms<kFp8, DsMla, Blocks, Begin, End, false>(address, scales, first, visible);
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
  /// `scales`: of rows of fp8_ds_mla, that of the KV tile's first token and the part's first block.
  template <Fp8 kFp8, bool DsMla, int32_t Blocks, int32_t Begin, int32_t End, bool AtBoundary>
  __device__ __forceinline__ bool dequantize_atoms(uint32_t address, uint32_t scales, int32_t first,
                                                   const VisibleRange& visible) const {
    using G = Group<Blocks, Begin>;
    constexpr int32_t kGroups = (End - Begin) / G::kGroupAtoms * Blocks;
    static_assert((End - Begin) % G::kGroupAtoms == 0);
    const Fp8Lane lane(lane_);
    const float per_unit = kHasUnits ? 1.0f / unit_ : 1.0f;
    bool nonfinite = false;
    Chunks fp8;
#pragma unroll
    for (int32_t c = 0; c < kLaneChunks; ++c) fp8[c] = ptx::ld_shared_16(address + G(0).fp8_data(c, lane));
#pragma unroll
    for (int32_t g = 0; g < kGroups; ++g) {
      Chunks next;
      if (g + 1 < kGroups) {
#pragma unroll
        for (int32_t c = 0; c < kLaneChunks; ++c) next[c] = ptx::ld_shared_16(address + G(g + 1).fp8_data(c, lane));
      }
      __syncwarp();  // all lanes have read what is overwritten now
#pragma unroll
      for (int32_t c = 0; c < kLaneChunks; ++c) {
        const int32_t token = 8 * (G(g).atom + c / G::kHalves) + lane.row;
        const bool unseen = AtBoundary && (first + token < visible.any_begin || first + token >= visible.any_end);
        if (unseen) fp8[c] = uint4{};
        Dequantized chunk;
        if constexpr (DsMla) {
          const float scale = __uint_as_float(
              ptx::ld_shared_4(scales + static_cast<uint32_t>(token * kTokenScaleBytes + 4 * G(g).block)));
          chunk = dequantized<T>(fp8[c], unseen ? 0.0f : (kHasUnits ? scale * per_unit : scale));
          if (AtBoundary) nonfinite = nonfinite || has_nonfinite<T>(chunk);
        } else {
          chunk = dequantized<T, kFp8>(fp8[c]);
          if (AtBoundary) nonfinite = nonfinite || has_nonfinite<kFp8>(fp8[c]);
        }
        store_dequantized(address + G(g).offset(c), lane, chunk);
      }
#pragma unroll
      for (int32_t c = 0; c < kLaneChunks; ++c) fp8[c] = next[c];
    }
    return nonfinite;
  }

  typename Traits::Storage& storage_;
  const uint32_t smem_;
  const uint32_t kv_full_;
  const uint32_t kv_empty_;
  const uint32_t landed_;
  const int32_t warp_;
  const int32_t lane_;
  uint32_t phases_ = 0;  ///< parity of fp8_landed, a bit each
  float unit_ = 0.0f;    ///< of the work tile's last KV tile; 0: there was none
};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
