#pragma once

#include "kernels/cuda/sm90/prefill/loader.cuh"
#include "kernels/cuda/sm90/prefill/native_values.cuh"

/// The loading warpgroup where products take codes as they are: keys come to where products read them, values beside,
/// and are transposed by the warp that has asked for them.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

class NativeLoader : public Loader<__half, kNativeDims.qk, kNativeDims.v, Variant::kPlain> {
  using Base = Loader<__half, kNativeDims.qk, kNativeDims.v, Variant::kPlain>;
  friend Base;
  friend typename Base::Items;
  static constexpr int32_t kMine = kNativeTokens / kGroupWarps;  ///< tokens of a tile, one after the other
  static constexpr uint32_t kMineBytes = kMine * kNativeRow;
  static_assert(kMine == 32 && kMine == kLargestCodeBox);

 public:
  __device__ __forceinline__ NativeLoader(const PrefillParams& params, unsigned char* memory, SharedState& state)
      : Base(params, memory, state), transposer_(lane_) {}

  __device__ __forceinline__ void run() { this->run_as(*this); }

 private:
  static constexpr bool kQueriesLate = false;

  /// The item's queries, and with them all that was written of it.
  __device__ __forceinline__ void deliver(int32_t slot) const {
    constexpr int32_t kPieces = kNativeRow / 16;
    const AttentionParams& params = params_.attention;
    const auto* const data = static_cast<const uint8_t*>(params.q);
    const bool direct = (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(params.q_token_stride) |
                         static_cast<uintptr_t>(params.q_head_stride)) %
                            16 ==
                        0;
    const uint32_t to = queries_address(slot) + static_cast<uint32_t>(warp_ / 2 * query_bytes(kNativeDims.qk));
#pragma unroll 2
    for (int32_t i = lane_; i < 32 * kPieces; i += 32) {
      const int64_t at = __shfl_sync(kAllLanes, query_, i / kPieces);
      const int32_t row = 32 * (warp_ % 2) + i / kPieces;  // of the math warpgroup's
      const uint32_t target = to + static_cast<uint32_t>(native_offset(row, i % kPieces));
      const uint8_t* const from = data + (at < 0 ? 0 : at + i % kPieces * 16);
      if (direct) {
        ptx::cp_async_16(target, from, at >= 0);
      } else {
        copy_fp8_16B(target, from, at >= 0);
      }
    }
    hand_over(slot);
  }

  __device__ __forceinline__ void load_tiles(const Tiles& tiles, const SegmentParams& segment, const SegmentCopy& copy,
                                             const int32_t* pages, const scheduler::WorkTile& item) {
    if (copy.box == 0) {
      load_native_by_threads(tiles, segment, copy, pages, item);
    } else if (copy.box == 8) {
      load_native_boxes<4>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    } else if (copy.box == 16) {
      load_native_boxes<2>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    } else {
      load_native_boxes<1>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    }
  }

  /// A ring's next stage.
  __device__ __forceinline__ Stage next_native_keys() {
    return next_native(state_.keys, key_place_, 0);
  }
  __device__ __forceinline__ Stage next_native_values() {
    return next_native(state_.values, value_place_, kNativeValues);
  }
  template <typename Place>
  __device__ __forceinline__ Stage next_native(const Ring& ring, Place& place, uint32_t begin) const {
    const Stage stage{place.stage, memory_ + begin + place.stage * kNativeTile,
                      ptx::shared_address(ring.full) + 8 * place.stage, place.parity ^ 1};
    place.step();
    return stage;
  }
  /// This warp's part of where values come to, and the barrier at which its boxes count.
  __device__ __forceinline__ uint32_t raw_values(uint32_t stage) const {
    return memory_ + kNativeRaw + stage * kNativeTile + static_cast<uint32_t>(warp_) * kMineBytes;
  }
  __device__ __forceinline__ uint32_t raw_landed(uint32_t stage) const {
    return ptx::shared_address(state_.codes_landed) +
           8 * ((kMaxStages + stage) * kGroupWarps + static_cast<uint32_t>(warp_));
  }

  /// Pages of at least eight tokens, as boxes, of which the warp has `Mine` a tile. A tile of values is transposed when
  /// the next tile has been asked for. The next item is made ready as in load_boxes.
  template <int32_t Mine>
  __device__ __forceinline__ void load_native_boxes(const Tiles& tiles, const PrefillParams::Maps& maps,
                                                    const SegmentCopy& copy, const int32_t* pages, int32_t head) {
    constexpr int32_t kAtOnce = 32 / Mine;  // tiles whose boxes the lanes look up
    const uint64_t policy = ptx::evict_last_policy();
    int32_t here = -1;
    BoxPlace next = find_native_box<Mine>(tiles, 0, copy, pages);
#pragma unroll 1
    for (int32_t i = 0; i <= tiles.count; ++i) {
      if (i < tiles.count) {
        if (i % kAtOnce == 0) {
          here = next.eight < 0 ? -1 : next.page * copy.eights + next.eight;
          next = find_native_box<Mine>(tiles, i + kAtOnce, copy, pages);  // on its way until it is needed
        }
        int32_t at[Mine];
#pragma unroll
        for (int32_t b = 0; b < Mine; ++b) at[b] = __shfl_sync(kAllLanes, here, i % kAtOnce * Mine + b);
        const Stage keys = next_native_keys();
        await(keys);
        ask_for_native<Mine>(keys, maps, at, head, policy);
        __syncwarp();  // matrices are loaded by whole warps
        raw_.step();
      }
      if (i == 0) continue;
      transpose_values(tiles, i - 1);
      if (is_time(i, tiles.count)) make_next_ready(*this);
    }
  }

  /// Begins the copies of the warp's boxes of a tile of keys, and of its values.
  template <int32_t Mine>
  __device__ __forceinline__ void ask_for_native(const Stage& keys, const PrefillParams::Maps& maps,
                                                 const int32_t (&at)[Mine], int32_t head, uint64_t policy) const {
    constexpr uint32_t kBoxBytes = kMineBytes / Mine;
    const uint32_t landed = raw_landed(raw_.stage);
    const uint32_t k = keys.tile + static_cast<uint32_t>(warp_) * kMineBytes;
    const uint32_t v = raw_values(raw_.stage);
    if (!ptx::elect_one()) return;
    uint32_t bytes = 0;
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) bytes += at[b] >= 0 ? kBoxBytes : 0;
    ptx::mbarrier_arrive_expect_tx(keys.full, bytes);
    ptx::mbarrier_arrive_expect_tx(landed, bytes);
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) {
      if (at[b] < 0) continue;
      ptx::tma_load_5d(k + b * kBoxBytes, &maps.k, keys.full, 0, 0, 0, head, at[b], policy);
      ptx::tma_load_5d(v + b * kBoxBytes, &maps.v, landed, 0, 0, 0, head, at[b], policy);
    }
    ptx::mbarrier_arrive(keys.full, 32 * kLaneArrivals - 1);
  }

  /// The lane's, of the warp's boxes from tile `i` on; a warp's tokens follow each other.
  template <int32_t Mine>
  __device__ __forceinline__ BoxPlace find_native_box(const Tiles& tiles, int32_t i, const SegmentCopy& copy,
                                                      const int32_t* pages) const {
    constexpr int32_t kBox = kMine / Mine;
    const int32_t token = tiles.first_token(i + lane_ / Mine) + warp_ * kMine + lane_ % Mine * kBox;
    if (token + kBox <= tiles.sight.any_begin || token >= tiles.sight.any_end) return {0, -1};
    const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(token));
    const uint32_t in_page = static_cast<uint32_t>(token) - column * copy.page_size.divisor();
    return {pages[column], static_cast<int32_t>(in_page / kEight)};
  }

  /// Hands over tile `i` of values, which boxes bring.
  __device__ __forceinline__ void transpose_values(const Tiles& tiles, int32_t i) {
    const Stage stage = next_native_values();
    ptx::mbarrier_wait_warp(raw_landed(through_.stage), through_.parity);
    const uint32_t raw = raw_values(through_.stage);
    through_.step();
    await(stage);
    transpose(tiles, i, raw, stage);
  }

  /// This warp's tokens of tile `i`, which are there.
  __device__ __forceinline__ void transpose(const Tiles& tiles, int32_t i, uint32_t raw, const Stage& stage) const {
    if (!tiles.is_edge(i)) {
      transposer_.transpose(raw, stage.tile, warp_);
    } else {
      const int32_t first = tiles.first_token(i) + warp_ * kMine;
      const bool special = transposer_.transpose_edge(raw, stage.tile, warp_, tiles.sight.any_begin - first,
                                                      tiles.sight.any_end - first);
      const bool any = __any_sync(kAllLanes, special);
      if (lane_ == 0) state_.special[stage.number][warp_] = any ? 1 : 0;
    }
    hand_over_tile(stage);
    __syncwarp();  // all have read what is copied over next
  }

  /// Any other keys and values.
  __device__ __forceinline__ void load_native_by_threads(const Tiles& tiles, const SegmentParams& segment,
                                                         const SegmentCopy& copy, const int32_t* pages,
                                                         const scheduler::WorkTile& item) {
    const int32_t first_token = segment.paged ? 0 : segment.indptr[item.kv_row];
#pragma unroll 1
    for (int32_t i = 0; i < tiles.count; ++i) {
      const Stage keys = next_native_keys();
      await(keys);
      copy_native(tiles, i, keys.tile + static_cast<uint32_t>(warp_) * kMineBytes, segment.k, segment.k_strides,
                  item.kv_head, copy, pages, first_token);
      end_copies(keys, copy.direct);
      const uint32_t raw = raw_values(raw_.stage);
      copy_native(tiles, i, raw, segment.v, segment.v_strides, item.kv_head, copy, pages, first_token);
      if (lane_ == 0) ptx::mbarrier_arrive(raw_landed(raw_.stage));  // its phases are the tiles'
      ptx::mbarrier_wait_warp(raw_landed(through_.stage), through_.parity);
      raw_.step();
      through_.step();
      ptx::cp_async_wait_all();
      __syncwarp();
      const Stage values = next_native_values();
      await(values);
      transpose(tiles, i, raw, values);
    }
  }

  /// This warp's tokens of a tile; zeros for those that no row sees.
  __device__ __forceinline__ void copy_native(const Tiles& tiles, int32_t i, uint32_t to, const void* data,
                                              const KvStrides& strides, int32_t head, const SegmentCopy& copy,
                                              const int32_t* pages, int32_t first_token) const {
    constexpr int32_t kPieces = kNativeRow / 16;
    const int64_t begin = token_begin(tiles, i, strides, head, copy, pages, first_token);
#pragma unroll 1
    for (int32_t n = lane_; n < kMine * kPieces; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n / kPieces);
      const uint32_t target = to + static_cast<uint32_t>(native_offset(n / kPieces, n % kPieces));
      const uint8_t* const from = static_cast<const uint8_t*>(data) + (at < 0 ? 0 : at + n % kPieces * 16);
      if (copy.direct) {
        ptx::cp_async_16(target, from, at >= 0);
      } else {
        copy_fp8_16B(target, from, at >= 0);
      }
    }
  }

  const NativeTransposer transposer_;
  RingPlace<kKeyStages> key_place_;
  RingPlace<kValueStages> value_place_;
  RingPlace<kRawStages> raw_;      ///< the next that values are asked for to
  RingPlace<kRawStages> through_;  ///< the next that is transposed
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
