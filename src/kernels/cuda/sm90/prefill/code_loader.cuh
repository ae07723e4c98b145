#pragma once

#include <cstddef>

#include "kernels/cuda/sm90/prefill/codes.cuh"
#include "kernels/cuda/sm90/prefill/loader.cuh"

/// The loading warpgroup where keys and values are fp8 codes of one type: it brings codes and widens them to tiles of
/// float16, so that math warpgroups see nothing of it.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// A box of codes comes to the second half of the place that its float16 take, and the warp that has issued it widens
/// it there: so a tile needs no other place, and loading warps do not wait for each other.
template <Fp8 kFp8, Variant kVariant>
class CodeLoader : public Loader<__half, kCodeDim, kCodeDim, kVariant> {
  using Base = Loader<__half, kCodeDim, kCodeDim, kVariant>;
  friend Base;
  friend typename Base::Items;
  using Base::copy_queries;
  using Base::hand_over;
  using Base::hand_over_tile;
  using Base::kDims;
  using Base::kLayout;
  using Base::kTokens;
  using Base::lane_;
  using Base::memory_;
  using Base::num_items_;
  using Base::params_;
  using Base::query_;
  using Base::state_;
  using Base::token_begin;
  using Base::warp_;
  using typename Base::BoxPlace;
  using typename Base::Tiles;

 public:
  __device__ __forceinline__ CodeLoader(const PrefillParams& params, unsigned char* memory, SharedState& state)
      : Base(params, memory, state), place_(lane_) {}

  __device__ __forceinline__ void run() { this->run_as(*this); }

 private:
  static constexpr bool kQueriesLate = true;  ///< behind the first keys' codes, which are on their way meanwhile

  /// The item's queries, and with them all that was written of it.
  __device__ __forceinline__ void deliver(int32_t slot) const {
    copy_queries(query_, slot);
    if (params_.attention.q_dtype == DType::kBFloat16) to_float16_queries(slot);
    hand_over(slot);
  }

  /// bfloat16 queries become float16 where they are.
  __device__ __forceinline__ void to_float16_queries(int32_t slot) const {
    constexpr int32_t kPieces = kCodeDim / kPiece;
    ptx::cp_async_wait_all();
    __syncwarp();
    const uint32_t queries =
        memory_ + static_cast<uint32_t>(kLayout.queries + slot * kMathGroups * query_bytes(kCodeDim));
#pragma unroll 4
    for (int32_t i = lane_; i < 32 * kPieces; i += 32) {
      const int32_t row = 32 * warp_ + i / kPieces;
      const uint32_t at = queries + static_cast<uint32_t>(query_offset(kCodeDim, row, i % kPieces));
      uint4 piece = ptx::ld_shared_16(at);
      const float scale = to_float16(piece);
      ptx::st_shared_16(at, piece);
      if (i % kPieces == 0) state_.rows[slot].scale[row] *= scale;
    }
    ptx::fence_view_async_shared();
  }

  __device__ __forceinline__ void load_tiles(const Tiles& tiles, const SegmentParams& segment, const SegmentCopy& copy,
                                             const int32_t* pages, const scheduler::WorkTile& item) {
    if (copy.box == 0) {
      load_codes_by_threads(tiles, segment, copy, pages, item);
    } else if (copy.box == 8) {
      load_code_boxes<4>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    } else if (copy.box == 16) {
      load_code_boxes<2>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    } else {
      load_code_boxes<1>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    }
  }

  /// Tiles in the order of the ring: keys, the next keys, values, keys, values, ..., values.
  struct Turn {
    bool keys;
    int32_t tile;  ///< counted from the item's last
  };
  __device__ __forceinline__ static Turn turn_of(int32_t n, int32_t num_turns) {
    if (n == num_turns - 1) return {false, n / 2};
    return {n == 0 || n % 2 == 1, n % 2 == 1 ? (n + 1) / 2 : (n == 0 ? 0 : n / 2 - 1)};
  }

  /// A turn's stage in its ring, and the phase of what fills it.
  struct CodeStage {
    uint32_t number;
    uint32_t tile;
    uint32_t full;
    uint32_t empty;
    uint32_t landed;  ///< this warp's
    uint32_t parity;
  };
  __device__ __forceinline__ CodeStage stage_of(const Turn& turn) const {
    constexpr auto kStages = static_cast<uint32_t>(stages(kDims));
    const uint32_t use = num_tiles_ + static_cast<uint32_t>(turn.tile);
    const uint32_t number = use % kStages;
    const uint32_t ring = ptx::shared_address(&state_.keys) +
                          (turn.keys ? 0 : ptx::shared_address(&state_.values) - ptx::shared_address(&state_.keys));
    return {number,
            memory_ + static_cast<uint32_t>(turn.keys ? kLayout.keys : kLayout.values) +
                number * static_cast<uint32_t>(tile_bytes(kDims, kCodeDim)),
            ring + static_cast<uint32_t>(offsetof(Ring, full)) + 8 * number,
            ring + static_cast<uint32_t>(offsetof(Ring, empty)) + 8 * number,
            ptx::shared_address(state_.codes_landed) +
                8 * (((turn.keys ? 0 : kMaxStages) + number) * kGroupWarps + static_cast<uint32_t>(warp_)),
            use / kStages & 1};
  }

  /// Boxes of a tile are asked for as soon as the ring has room for them, and widened in the ring's order.
  template <int32_t Mine>
  __device__ __forceinline__ void load_code_boxes(const Tiles& tiles, const PrefillParams::Maps& maps,
                                                  const SegmentCopy& copy, const int32_t* pages, int32_t head) {
    constexpr int32_t kAtOnce = 32 / Mine;
    const uint64_t policy = ptx::evict_last_policy();
    const int32_t num_turns = 2 * tiles.count;
    BoxPlace next = this->first_boxes_;
    int32_t here = -1;
    int32_t keys[Mine];
    int32_t values[Mine];
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) keys[b] = values[b] = -1;
    int32_t asked = 0;
    bool delivered = false;
#pragma unroll 1
    for (int32_t n = 0; n < num_turns; ++n) {
      const Turn due = turn_of(n, num_turns);
      const CodeStage due_stage = stage_of(due);
      // Stages become free while codes are awaited: whoever waited for these alone would ask for one tile at a time.
#pragma unroll 1
      do {
#pragma unroll 1
        for (; asked < num_turns; ++asked) {
          const Turn turn = turn_of(asked, num_turns);
          const CodeStage stage = stage_of(turn);
          if (!__all_sync(kAllLanes, ptx::mbarrier_test_wait(stage.empty, stage.parity ^ 1))) break;  // see next_stage
          if (turn.keys || asked == num_turns - 1) {
#pragma unroll
            for (int32_t b = 0; b < Mine; ++b) values[b] = keys[b];
          }
          if (turn.keys) {
            if (turn.tile % kAtOnce == 0) {
              here = next.eight < 0 ? -1 : next.page * copy.eights + next.eight;
              next = this->template find_box<Mine>(tiles, turn.tile + kAtOnce, copy,
                                                   pages);  // on its way until it is needed
            }
#pragma unroll
            for (int32_t b = 0; b < Mine; ++b) {
              keys[b] = __shfl_sync(kAllLanes, here, turn.tile % kAtOnce * Mine + b);
            }
            ask_for_boxes<Mine>(stage, maps.k, keys, head, policy);
          } else {
            ask_for_boxes<Mine>(stage, maps.v, values, head, policy);
          }
        }
        if (!delivered) {
          deliver(num_items_ % kItems);
          delivered = true;
        }
      } while (!__all_sync(kAllLanes, ptx::mbarrier_test_wait(due_stage.landed, due_stage.parity)));
      constexpr int32_t kEights = kWarpEights / Mine;  // of a box
      constexpr int32_t kAtOncePieces = 4;             // eights follow each other to where no later one's codes are
      const uint32_t mine = due_stage.tile + static_cast<uint32_t>(warp_ * kEights * eight_bytes(kCodeDim));
      bool special = false;
#pragma unroll
      for (int32_t first = 0; first < kCodePieces; first += kAtOncePieces) {
        uint4 codes[kAtOncePieces];
#pragma unroll
        for (int32_t i = 0; i < kAtOncePieces; ++i) {
          const int32_t eight = (first + i) / 2;
          codes[i] =
              ptx::ld_shared_16(mine + box_offset<Mine>(eight / kEights) + kCodePlace<Mine> +
                                static_cast<uint32_t>(eight % kEights * kCodeEight) + code_offset(place_, i % 2));
        }
        __syncwarp();  // all have read what is written over now
        special = widen<Mine>(tiles, due, due_stage, first, codes) || special;
      }
      hand_over_codes(tiles, due, due_stage, special);
    }
    num_tiles_ += static_cast<uint32_t>(tiles.count);
  }

  /// From the warp's first box of a tile to its box number `box`; from a box's place to that of its codes.
  template <int32_t Mine>
  __device__ __forceinline__ static constexpr uint32_t box_offset(int32_t box) {
    return static_cast<uint32_t>(kGroupWarps * box * (kWarpEights / Mine) * eight_bytes(kCodeDim));
  }
  template <int32_t Mine>
  static constexpr uint32_t kCodePlace = kWarpEights / Mine* kCodeEight;

  /// Begins the copies of the warp's boxes of a tile.
  template <int32_t Mine>
  __device__ __forceinline__ void ask_for_boxes(const CodeStage& stage, const CUtensorMap& map,
                                                const int32_t (&at)[Mine], int32_t head, uint64_t policy) const {
    if (!ptx::elect_one()) return;
    constexpr int32_t kEights = kWarpEights / Mine;
    int32_t count = 0;
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) count += at[b] >= 0 ? 1 : 0;
    ptx::mbarrier_arrive_expect_tx(stage.landed, static_cast<uint32_t>(count * kEights * kCodeEight));
    const uint32_t to = stage.tile + static_cast<uint32_t>(warp_ * kEights * eight_bytes(kCodeDim)) + kCodePlace<Mine>;
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) {
      if (at[b] >= 0) ptx::tma_load_5d(to + box_offset<Mine>(b), &map, stage.landed, 0, 0, 0, head, at[b], policy);
    }
  }

  /// Writes pieces of this warp's tokens of a tile, from the lane's piece number `begin` on. Of values at which rows
  /// look differently, tokens that no row sees become zeros; returns whether others hold infinities or NaN.
  template <int32_t Mine, int32_t Count>
  __device__ __forceinline__ bool widen(const Tiles& tiles, const Turn& turn, const CodeStage& stage, int32_t begin,
                                        uint4 (&codes)[Count]) const {
    constexpr int32_t kEights = kWarpEights / Mine;
    bool special = false;
    if (!turn.keys && tiles.is_edge(turn.tile)) {
      const int32_t first = tiles.first_token(turn.tile) + warp_ * kEights * kEight + place_.token;
#pragma unroll
      for (int32_t i = 0; i < Count; ++i) {
        const int32_t eight = (begin + i) / 2;
        const int32_t token = first + (kGroupWarps * (eight / kEights) * kEights + eight % kEights) * kEight;
        if (token < tiles.sight.any_begin || token >= tiles.sight.any_end) codes[i] = uint4{};
        special = special || has_special<kFp8>(codes[i]);
      }
    }
    const uint32_t mine = stage.tile + static_cast<uint32_t>(warp_ * kEights * eight_bytes(kCodeDim));
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) {
      const int32_t eight = (begin + i) / 2;
      store_widened<kFp8>(
          mine + box_offset<Mine>(eight / kEights) + static_cast<uint32_t>(eight % kEights * eight_bytes(kCodeDim)),
          place_, i % 2, codes[i]);
    }
    return special;
  }

  __device__ __forceinline__ void hand_over_codes(const Tiles& tiles, const Turn& turn, const CodeStage& stage,
                                                  bool special) const {
    if (!turn.keys && tiles.is_edge(turn.tile)) {
      special = __any_sync(kAllLanes, special);
      if (lane_ == 0) state_.special[stage.number][warp_] = special ? 1 : 0;
    }
    if constexpr (kVariant == Variant::kAny) {
      if (turn.keys) this->describe_sight(tiles.first_token(turn.tile), stage.number);
    }
    hand_over_tile({stage.number, stage.tile, stage.full});
  }

  /// Any other keys and values: codes come through registers, those of a tile on their way while the ring has no room.
  __device__ __forceinline__ void load_codes_by_threads(const Tiles& tiles, const SegmentParams& segment,
                                                        const SegmentCopy& copy, const int32_t* pages,
                                                        const scheduler::WorkTile& item) {
    const int32_t num_turns = 2 * tiles.count;
    const int32_t first_token = segment.paged ? 0 : segment.indptr[item.kv_row];
#pragma unroll 1
    for (int32_t n = 0; n < num_turns; ++n) {
      const Turn turn = turn_of(n, num_turns);
      const KvStrides& strides = turn.keys ? segment.k_strides : segment.v_strides;
      const auto* const data = static_cast<const uint8_t*>(turn.keys ? segment.k : segment.v);
      const int64_t begin = token_begin(tiles, turn.tile, strides, item.kv_head, copy, pages, first_token);
      uint4 codes[kCodePieces];
#pragma unroll
      for (int32_t i = 0; i < kCodePieces; ++i) {
        const int64_t at = __shfl_sync(kAllLanes, begin, i / 2 * kEight + place_.token);
        const uint8_t* const from = data + at + 64 * (i % 2) + 16 * place_.piece;
        codes[i] = uint4{};
        if (at < 0) continue;
        if (copy.direct) {
          codes[i] = *reinterpret_cast<const uint4*>(from);
        } else {
          codes[i] = gather(from);
        }
      }
      if (n == 0) deliver(num_items_ % kItems);
      const CodeStage stage = stage_of(turn);
      ptx::mbarrier_wait(stage.empty, stage.parity ^ 1);
      if (lane_ == 0) ptx::mbarrier_arrive(stage.landed);  // its phases are the stage's
      ptx::mbarrier_wait_warp(stage.landed, stage.parity);
      hand_over_codes(tiles, turn, stage, widen<1>(tiles, turn, stage, 0, codes));
    }
    num_tiles_ += static_cast<uint32_t>(tiles.count);
  }

  /// Sixteen codes, whatever their address.
  __device__ __forceinline__ static uint4 gather(const uint8_t* from) {
    uint32_t words[4] = {};
#pragma unroll
    for (int32_t i = 0; i < 16; ++i) words[i / 4] |= uint32_t{from[i]} << i % 4 * 8;
    return {words[0], words[1], words[2], words[3]};
  }

  const CodePlace place_;
  uint32_t num_tiles_ = 0;  ///< of items before the present one
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
