#pragma once

#include "kernels/cuda/sm90/prefill/codes.cuh"
#include "kernels/cuda/sm90/prefill/loader.cuh"

/// The loading warpgroup where keys and values are fp8 codes of one type: it brings codes and widens them to tiles of
/// float16, so that math warpgroups see nothing of it.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// A box of codes comes to the second half of the place that its float16 take, and the warp that has issued it widens
/// it there: so a tile needs no other place, and loading warps do not wait for each other.
template <Codes kCodes>
class CodeLoader : public Loader<__half, kCodeDim, kCodeDim> {
  using Base = Loader<__half, kCodeDim, kCodeDim>;
  friend Base;

 public:
  __device__ __forceinline__ CodeLoader(const PrefillParams& params, unsigned char* memory, SharedState& state)
      : Base(params, memory, state), landed_(ptx::shared_address(state.codes_landed[0]) + 8 * warp_), place_(lane_) {}

  __device__ __forceinline__ void run() { run_as(*this); }

 private:
  /// Queries become float16 where they are.
  __device__ __forceinline__ void end_queries(int32_t slot) const {
    if (params_.attention.q_dtype != DType::kBFloat16) return;
    constexpr int32_t kPieces = kCodeDim / kPiece;
    ptx::wait_all_copies();
    __syncwarp();
    const uint32_t queries =
        memory_ + static_cast<uint32_t>(kLayout.queries + slot * kMathGroups * query_bytes(kCodeDim));
#pragma unroll 4
    for (int32_t i = lane_; i < 32 * kPieces; i += 32) {
      const int32_t row = 32 * warp_ + i / kPieces;
      const uint32_t at = queries + static_cast<uint32_t>(query_offset(kCodeDim, row, i % kPieces));
      uint4 piece = ptx::load_16(at);
      const float scale = to_float16(piece);
      ptx::store_16(at, piece);
      if (i % kPieces == 0) state_.rows[slot].scale[row] *= scale;
    }
    ptx::order_before_products();
  }

  __device__ __forceinline__ void load_tiles(const Tiles& tiles, const SegmentParams& segment, const SegmentCopy& copy,
                                             const int32_t* pages, const planner::WorkItem& item) {
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

  /// Boxes of a tile are asked for as soon as the ring has room for them, and widened in the ring's order.
  template <int32_t Mine>
  __device__ __forceinline__ void load_code_boxes(const Tiles& tiles, const PrefillParams::Maps& maps,
                                                  const SegmentCopy& copy, const int32_t* pages, int32_t head) {
    constexpr int32_t kAtOnce = 32 / Mine;
    const uint64_t policy = ptx::evict_last_policy();
    const int32_t num_turns = 2 * tiles.count;
    BoxPlace next = find_box<Mine>(tiles, 0, copy, pages);
    int32_t here = -1;
    int32_t keys[Mine];
    int32_t values[Mine];
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) keys[b] = values[b] = -1;
    int32_t asked = 0;
#pragma unroll 1
    for (int32_t n = 0; n < num_turns; ++n) {
#pragma unroll 1
      for (; asked < num_turns && asked - n < kStages; ++asked) {
        if (asked == n) {
          ptx::wait(empty_ + 8 * stage_, parity_ ^ 1);
        } else if (!__all_sync(kAllLanes, ptx::has_ended(empty_ + 8 * stage_, parity_ ^ 1))) {
          break;
        }
        const Turn turn = turn_of(asked, num_turns);
        if (turn.keys || asked == num_turns - 1) {
#pragma unroll
          for (int32_t b = 0; b < Mine; ++b) values[b] = keys[b];
        }
        if (turn.keys) {
          if (turn.tile % kAtOnce == 0) {
            here = next.eight < 0 ? -1 : next.page * copy.eights + next.eight;
            next = find_box<Mine>(tiles, turn.tile + kAtOnce, copy, pages);  // on its way until it is needed
          }
#pragma unroll
          for (int32_t b = 0; b < Mine; ++b) {
            keys[b] = __shfl_sync(kAllLanes, here, turn.tile % kAtOnce * Mine + b);
          }
        }
        const uint32_t tile = memory_ + stage_ * stage_bytes(kDims);
        const uint32_t barrier = landed_ + 8 * kGroupWarps * stage_;
        if (turn.keys) {
          ask_for_boxes<Mine>(tile, barrier, maps.k, keys, head, policy);
        } else {
          ask_for_boxes<Mine>(tile, barrier, maps.v, values, head, policy);
        }
        advance(stage_, parity_);
      }
      ptx::wait(landed_ + 8 * kGroupWarps * wide_stage_, wide_parity_);
      uint4 codes[kCodePieces];
      constexpr int32_t kEights = kWarpEights / Mine;  // of a box
      const uint32_t mine =
          memory_ + wide_stage_ * stage_bytes(kDims) + static_cast<uint32_t>(warp_ * kEights * eight_bytes(kCodeDim));
#pragma unroll
      for (int32_t i = 0; i < kCodePieces; ++i) {
        const int32_t box = i / 2 / kEights;
        codes[i] = ptx::load_16(mine + box_offset<Mine>(box) + kCodePlace<Mine> + i / 2 % kEights * kCodeEight +
                                code_offset(place_, i % 2));
      }
      __syncwarp();  // all have read what is written over now
      widen<Mine>(tiles, turn_of(n, num_turns), codes);
    }
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
  __device__ __forceinline__ void ask_for_boxes(uint32_t tile, uint32_t barrier, const CUtensorMap& map,
                                                const int32_t (&at)[Mine], int32_t head, uint64_t policy) const {
    if (!ptx::elect()) return;
    constexpr int32_t kEights = kWarpEights / Mine;
    int32_t count = 0;
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) count += at[b] >= 0 ? 1 : 0;
    ptx::arrive_expecting(barrier, static_cast<uint32_t>(count * kEights * kCodeEight));
    const uint32_t to = tile + static_cast<uint32_t>(warp_ * kEights * eight_bytes(kCodeDim)) + kCodePlace<Mine>;
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) {
      if (at[b] >= 0) ptx::copy_box_5d(to + box_offset<Mine>(b), &map, barrier, 0, 0, 0, head, at[b], policy);
    }
  }

  /// Writes a tile's next 32 tokens of this warp and hands them over. Of values at which rows look differently, tokens
  /// that no row sees become zeros.
  template <int32_t Mine>
  __device__ __forceinline__ void widen(const Tiles& tiles, const Turn& turn, uint4 (&codes)[kCodePieces]) {
    constexpr int32_t kEights = kWarpEights / Mine;
    if (!turn.keys && tiles.is_edge(turn.tile)) {
      const int32_t first = tiles.first_token(turn.tile) + warp_ * kEights * kEight + place_.token;
      bool special = false;
#pragma unroll
      for (int32_t i = 0; i < kCodePieces; ++i) {
        const int32_t token = first + (kGroupWarps * (i / 2 / kEights) * kEights + i / 2 % kEights) * kEight;
        if (token < tiles.sight.any_begin || token >= tiles.sight.any_end) codes[i] = uint4{};
        special = special || has_special<kCodes>(codes[i]);
      }
      special = __any_sync(kAllLanes, special);
      if (lane_ == 0) state_.special[wide_stage_][warp_] = special ? 1 : 0;
    }
    const uint32_t tile = memory_ + wide_stage_ * stage_bytes(kDims);
    const uint32_t mine = tile + static_cast<uint32_t>(warp_ * kEights * eight_bytes(kCodeDim));
#pragma unroll
    for (int32_t i = 0; i < kCodePieces; ++i) {
      store_widened<kCodes>(
          mine + box_offset<Mine>(i / 2 / kEights) + static_cast<uint32_t>(i / 2 % kEights * eight_bytes(kCodeDim)),
          place_, i % 2, codes[i]);
    }
    hand_over_tile({wide_stage_, tile, full_ + 8 * wide_stage_});
    advance(wide_stage_, wide_parity_);
  }

  /// Any other keys and values: codes come through registers, those of a tile on their way while the ring has no room.
  __device__ __forceinline__ void load_codes_by_threads(const Tiles& tiles, const SegmentParams& segment,
                                                        const SegmentCopy& copy, const int32_t* pages,
                                                        const planner::WorkItem& item) {
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
      ptx::wait(empty_ + 8 * stage_, parity_ ^ 1);
      if (lane_ == 0) ptx::arrive(landed_ + 8 * kGroupWarps * stage_);  // its phases are the stage's
      advance(stage_, parity_);
      widen<1>(tiles, turn, codes);
    }
  }

  /// Sixteen codes, whatever their address.
  __device__ __forceinline__ static uint4 gather(const uint8_t* from) {
    uint32_t words[4] = {};
#pragma unroll
    for (int32_t i = 0; i < 16; ++i) words[i / 4] |= uint32_t{from[i]} << i % 4 * 8;
    return {words[0], words[1], words[2], words[3]};
  }

  __device__ __forceinline__ static void advance(uint32_t& stage, uint32_t& parity) {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  const uint32_t landed_;  ///< this warp's, of the first stage
  const CodePlace place_;
  uint32_t wide_stage_ = 0;  ///< the next to be widened
  uint32_t wide_parity_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
