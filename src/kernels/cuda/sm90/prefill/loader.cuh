#pragma once

#include "kernels/cuda/sm90/prefill/item_maker.cuh"
#include "ptx/control.cuh"

/// The loading warpgroup: takes items, finds out what their rows see, and brings queries, keys and values to shared
/// memory, as far ahead of the math warpgroups as the ring has room. Keys and values of the type that products take;
/// see CodeLoader for fp8.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// kAny: math warpgroups are told of every row which of a tile's tokens it sees.
template <typename T, int32_t DimQk, int32_t DimV, Variant kVariant>
class Loader : protected ItemMaker<T, DimQk, DimV, kVariant> {
 protected:
  using Items = ItemMaker<T, DimQk, DimV, kVariant>;
  friend Items;
  using Items::copy_queries;
  using Items::hand_over;
  using Items::index_;
  using Items::kDims;
  using Items::kLayout;
  using Items::kTokens;
  using Items::lane_;
  using Items::memory_;
  using Items::params_;
  using Items::queries_address;
  using Items::query_;
  using Items::state_;
  using Items::warp_;
  using Place = RingPlace<stages(kDims)>;

 public:
  __device__ __forceinline__ Loader(const PrefillParams& params, unsigned char* memory, SharedState& state)
      : Items(params, memory, state) {}

  __device__ __forceinline__ void run() { run_as(*this); }

 protected:
  /// `self`: this, as the class whose deliver and load_tiles are to be called.
  template <typename Self>
  __device__ __forceinline__ void run_as(Self& self) {
    do {
      parts_ = 0;
      if (num_items_ >= 0) load_item(self);
      while (parts_ < kParts) make_next_ready(self);
      ++num_items_;
    } while (index_ >= 0);
    if (num_items_ > 0) this->store_results(num_items_ - 1);
    ptx::tma_store_wait();
    if (warp_ == 0) DynamicTileScheduler(params_.attention.plan->view, params_.attention.tile_counters).finish();
  }

  /// The next part of what makes the next item ready.
  static constexpr int32_t kParts = 6;
  template <typename Self>
  __device__ __forceinline__ void make_next_ready(Self& self) {
    const int32_t number = num_items_ + 1;
    if (parts_ == 0) {
      this->begin_item(number);
    } else if (parts_ == 1) {
      this->take_item(number);
    } else if (parts_ == 2) {
      this->bind_item(number);
    } else if (parts_ == 3) {
      this->end_item(number);
    } else if (index_ >= 0 && parts_ == 4) {
      if constexpr (!Self::kQueriesLate) self.deliver(number % kItems);
    } else if (index_ >= 0) {
      find_first_boxes(state_.contexts[number % kItems]);
    }
    ++parts_;
  }

  /// Whether a part is due behind keys number `i` of `count`: from the third on, when the math warpgroups have begun
  /// with the present item, and so the next has a place; behind every second, so that the ring fills up between parts,
  /// as long as there are enough for all to be done before the last values are asked for.
  __device__ __forceinline__ bool is_time(int32_t i, int32_t count) const {
    const int32_t left = kParts - parts_;
    return i >= 2 && left > 0 && (i % 2 == 0 || count - i <= 2 * left);
  }

  /// An item's tiles, which are loaded from the last to the first. Keys are a tile ahead of values: they are multiplied
  /// while weights of the tile before are made.
  struct Tiles {
    int32_t last;
    int32_t count;
    Sight sight;
    int32_t inner_begin;  ///< values of tiles [inner_begin, inner_end), counted from the last, need no looking through
    int32_t inner_end;

    __device__ __forceinline__ Tiles(int32_t last_tile, int32_t num_tiles, const Sight& seen, bool custom)
        : last(last_tile), count(num_tiles), sight(seen) {
      if (custom) sight.all_end = 0;  // a mask's bits say of any token that some rows do not see it
      inner_begin = max(last + 1 - sight.all_end / kTokens, 0);
      inner_end = last + 1 - (sight.all_begin + kTokens - 1) / kTokens;
    }
    __device__ __forceinline__ int32_t first_token(int32_t i) const { return (last - i) * kTokens; }
    __device__ __forceinline__ bool is_edge(int32_t i) const { return i < inner_begin || i >= inner_end; }
  };

  /// The item's tiles. The next item may be made ready between them.
  template <typename Self>
  __device__ __forceinline__ void load_item(Self& self) {
    const ItemContext& context = state_.contexts[num_items_ % kItems];
    if (context.num_tiles > 0) {
      const scheduler::WorkTile& item = context.item;
      self.load_tiles(tiles_of(context), params_.attention.segments[item.segment], params_.copies[item.segment],
                      context.pages, item);
    } else if constexpr (Self::kQueriesLate) {
      self.deliver(num_items_ % kItems);
    }
  }

  __device__ __forceinline__ static Tiles tiles_of(const ItemContext& context) {
    return Tiles(context.first_tile + context.num_tiles - 1, context.num_tiles, context.sight, context.custom);
  }

  /// The last part of what makes an item ready: where the first of its boxes are, which is on its way until they are
  /// issued.
  __device__ __forceinline__ void find_first_boxes(const ItemContext& context) {
    ptx::named_barrier_sync(kLoadMeeting, kGroupThreads);  // the first thread has described it
    if (context.num_tiles == 0) return;
    const scheduler::WorkTile& item = context.item;
    const SegmentCopy& copy = params_.copies[item.segment];
    if (copy.box > 0)
      first_boxes_ = find_box(tiles_of(context), 0, copy, context.pages, boxes_shift(copy.box, kTokens));
  }

  /// Where shared memory has one place for queries, they come behind the item's first keys: the place is another
  /// item's until that is through.
  static constexpr bool kQueriesLate = query_places(kDims) < kItems;

  /// The item's queries, and with them all that was written of it.
  __device__ __forceinline__ void deliver(int32_t slot) const {
    if (kQueriesLate && num_items_ > 0) {
      const int32_t before = num_items_ - 1;
      ptx::mbarrier_wait_warp(ptx::shared_address(state_.item_empty) + 8 * static_cast<uint32_t>(before % kItems),
                              static_cast<uint32_t>(before / kItems) & 1);
    }
    const int32_t place = slot % query_places(kDims);
    const scheduler::WorkTile& item = state_.contexts[slot].item;
    const auto group_size = static_cast<int32_t>(params_.group.divisor());
    const bool boxes = params_.queries_by_boxes && this->has_whole_rows(item);
    if (!boxes) copy_queries(query_, place);
    const uint32_t barrier = ptx::shared_address(state_.item_full) + 8 * static_cast<uint32_t>(slot);
    if (boxes && threadIdx.x == 0) {
      ptx::mbarrier_arrive(barrier, kLaneArrivals - 1);
      ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(kMathGroups * query_bytes(DimQk)));
      const uint64_t policy = ptx::evict_first_policy();
#pragma unroll
      for (int32_t group = 0; group < kMathGroups; ++group) {
        const uint32_t token = params_.group.quotient(static_cast<uint32_t>(item.row_begin + group * kGroupRows));
        ptx::tma_load_5d(queries_address(place) + static_cast<uint32_t>(group * query_bytes(DimQk)), &params_.queries,
                         barrier, 0, item.kv_head * group_size, static_cast<int32_t>(token), 0, 0, policy);
      }
    } else {
      hand_over(slot);
    }
    __syncwarp();
  }

  /// A stage of a ring, and which phase of its being emptied has to end before it is filled.
  struct Stage {
    uint32_t number = 0;
    uint32_t tile = 0;
    uint32_t full = 0;
    uint32_t parity = 0;
  };
  __device__ __forceinline__ Stage next_keys() {
    return next_stage<kLayout.keys, tile_bytes(kDims, DimQk)>(state_.keys, keys_);
  }
  __device__ __forceinline__ Stage next_values() {
    return next_stage<kLayout.values, tile_bytes(kDims, DimV)>(state_.values, values_);
  }
  template <int32_t Begin, int32_t Bytes>
  __device__ __forceinline__ Stage next_stage(const Ring& ring, Place& place) const {
    // Of a stage never used, the phase before the first counts as ended.
    const Stage stage{place.stage, memory_ + Begin + place.stage * Bytes,
                      ptx::shared_address(ring.full) + 8 * place.stage, place.parity ^ 1};
    place.step();
    return stage;
  }
  __device__ __forceinline__ static void await(const Stage& stage) {
    ptx::mbarrier_wait_warp(stage.full + kToEmpty, stage.parity);
  }

  __device__ __forceinline__ void load_tiles(const Tiles& tiles, const SegmentParams& segment, const SegmentCopy& copy,
                                             const int32_t* pages, const scheduler::WorkTile& item) {
    if (copy.box == 0) {
      load_by_threads(tiles, segment, copy, pages, item);
    } else {
      load_boxes(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    }
  }

  /// Pages of at least eight tokens, as boxes: keys, the next keys, values, keys, values, ... The next item is made
  /// ready between them.
  __device__ __forceinline__ void load_boxes(const Tiles& tiles, const PrefillParams::Maps& maps,
                                             const SegmentCopy& copy, const int32_t* pages, int32_t head) {
    const uint64_t policy = ptx::evict_last_policy();
    BoxQueue boxes{boxes_shift(copy.box, kTokens), -1, -1, first_boxes_};
#pragma unroll 1
    for (int32_t i = 0; i <= tiles.count; ++i) {
      if (i < tiles.count) {
        advance(boxes, tiles, i, copy, pages);
        const Stage stage = next_keys();
        if constexpr (kVariant == Variant::kAny) {
          await(stage);
          describe_sight(tiles.first_token(i), stage.number);
        }
        issue_boxes<DimQk, kVariant == Variant::kAny>(stage, stage.full, maps.k, copy.box, boxes, i, boxes.here, head,
                                                      policy);
      }
      if (i == 0) {
        if constexpr (kQueriesLate) deliver(num_items_ % kItems);
        continue;
      }
      const Stage stage = next_values();
      const bool edge = tiles.is_edge(i - 1);
      const bool looked_up_before = i < tiles.count && (i << boxes.shift) % 32 == 0;
      issue_boxes<DimV, false>(stage, edge ? ptx::shared_address(&state_.landed) : stage.full, maps.v, copy.box, boxes,
                               i - 1, looked_up_before ? boxes.before : boxes.here, head, policy);
      if (edge) {
        ptx::mbarrier_wait_warp(ptx::shared_address(&state_.landed), static_cast<uint32_t>(num_edges_) & 1);
        ++num_edges_;
        look_through_values(tiles, i - 1, stage);
      }
      if (is_time(i, tiles.count)) make_next_ready(*this);
    }
  }

  /// A box's page and which of its eights of tokens it begins with; -1: no row sees any of its tokens.
  struct BoxPlace {
    int32_t page;
    int32_t eight;
  };
  /// The boxes of a tile after the other. Each lane looks up one of the next 32, as many boxes ahead.
  struct BoxQueue {
    int32_t shift;   ///< the warp issues 1 << shift boxes of a tile
    int32_t here;    ///< the lane's, in eights of tokens, of those that the last tile's are among; -1: none
    int32_t before;  ///< of those before
    BoxPlace next;
  };
  /// To tile `i`, from the one before.
  __device__ __forceinline__ void advance(BoxQueue& queue, const Tiles& tiles, int32_t i, const SegmentCopy& copy,
                                          const int32_t* pages) const {
    if ((i << queue.shift) % 32 != 0) return;
    queue.before = queue.here;
    queue.here = queue.next.eight < 0 ? -1 : queue.next.page * copy.eights + queue.next.eight;
    // On its way until it is needed.
    queue.next = find_box(tiles, i + (32 >> queue.shift), copy, pages, queue.shift);
  }
  /// The lane's, of the warp's boxes from tile `i` on.
  __device__ __forceinline__ BoxPlace find_box(const Tiles& tiles, int32_t i, const SegmentCopy& copy,
                                               const int32_t* pages, int32_t shift) const {
    const int32_t in_tile = (warp_ + kGroupWarps * (lane_ & ((1 << shift) - 1))) * copy.box;
    const int32_t token = tiles.first_token(i + (lane_ >> shift)) + in_tile;
    if (in_tile >= kTokens || token + copy.box <= tiles.sight.any_begin || token >= tiles.sight.any_end) return {0, -1};
    const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(token));
    const uint32_t in_page = static_cast<uint32_t>(token) - column * copy.page_size.divisor();
    return {pages[column], static_cast<int32_t>(in_page / kEight)};
  }
  template <int32_t Mine>
  __device__ __forceinline__ BoxPlace find_box(const Tiles& tiles, int32_t i, const SegmentCopy& copy,
                                               const int32_t* pages) const {
    return find_box(tiles, i, copy, pages, Mine == 4 ? 2 : Mine - 1);
  }

  /// Begins the copies of the warp's boxes of tile `i`, by the lanes that have looked them up: `at`. They alone wait
  /// for the stage. One arrives for the warp at `barrier`, with their bytes. `Lanes`: all lanes have written for it,
  /// and arrive.
  template <int32_t Dim, bool Lanes>
  __device__ __forceinline__ void issue_boxes(const Stage& stage, uint32_t barrier, const CUtensorMap& map, int32_t box,
                                              const BoxQueue& boxes, int32_t i, int32_t at, int32_t head,
                                              uint64_t policy) const {
    const int32_t mine = lane_ & ((1 << boxes.shift) - 1);  // of the tile's
    const bool is_due = lane_ >> boxes.shift == (i & ((32 >> boxes.shift) - 1));
    const int32_t bytes = box * 2 * Dim;
    if (is_due) {
      if constexpr (!Lanes) await(stage);
      ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(at >= 0 ? bytes : 0));
      if (at >= 0) {
        ptx::tma_load_5d(stage.tile + static_cast<uint32_t>((warp_ + kGroupWarps * mine) * bytes), &map, barrier, 0, 0,
                         0, head, at, policy);
      }
      if constexpr (Lanes) {
        ptx::mbarrier_arrive(barrier, kLaneArrivals - 1);
      } else if (mine == 0) {
        ptx::mbarrier_arrive(barrier, 32 * kLaneArrivals - (1u << boxes.shift));
      }
    } else if constexpr (Lanes) {
      ptx::mbarrier_arrive(barrier, kLaneArrivals);
    }
    __syncwarp();
  }

  /// Which tokens of the tile of keys that begins at `first` this thread's row sees.
  __device__ __forceinline__ void describe_sight(int32_t first, uint32_t stage) const {
    constexpr int32_t kWords = kTokens / 32;
    const auto row = static_cast<int32_t>(threadIdx.x);
    const RowInfo& rows = state_.rows[num_items_ % kItems];
    const uint32_t to =
        memory_ + static_cast<uint32_t>(kLayout.sights) + 4 * kWords * (stage * kRows + static_cast<uint32_t>(row));
#pragma unroll
    for (int32_t w = 0; w < kWords; ++w)
      ptx::st_shared_4(to + 4 * w, sight_of(params_.attention, rows, row, first + 32 * w));
  }

  /// Values of tile `i`, which are there, before they are handed over.
  __device__ __forceinline__ void look_through_values(const Tiles& tiles, int32_t i, const Stage& stage) const {
    const bool special = look_through<T, DimV, kTokens, kVariant != Variant::kAny>(
        stage.tile, tiles.sight, tiles.first_token(i), static_cast<int32_t>(threadIdx.x));
    const bool any = __any_sync(kAllLanes, special);
    if (lane_ == 0) state_.special[stage.number][warp_] = any ? 1 : 0;
    hand_over_tile(stage);
  }

  /// A tile that this thread has written to.
  __device__ __forceinline__ void hand_over_tile(const Stage& stage) const {
    ptx::fence_view_async_shared();
    ptx::mbarrier_arrive(stage.full, kLaneArrivals);
  }

  /// Any other keys and values.
  __device__ __forceinline__ void load_by_threads(const Tiles& tiles, const SegmentParams& segment,
                                                  const SegmentCopy& copy, const int32_t* pages,
                                                  const scheduler::WorkTile& item) {
    const int32_t first_token = segment.paged ? 0 : segment.indptr[item.kv_row];
    const int32_t head = item.kv_head;
#pragma unroll 1
    for (int32_t i = 0; i <= tiles.count; ++i) {
      if (i < tiles.count) {
        const Stage stage = next_keys();
        await(stage);
        if constexpr (kVariant == Variant::kAny) describe_sight(tiles.first_token(i), stage.number);
        copy_tokens<DimQk>(tiles, i, stage.tile, segment.k, segment.dtype, segment.k_strides, head, copy, pages,
                           first_token);
        end_copies(stage, copy.direct);
      }
      if (i == 0) {
        if constexpr (kQueriesLate) deliver(num_items_ % kItems);
        continue;
      }
      const Stage stage = next_values();
      await(stage);
      copy_tokens<DimV>(tiles, i - 1, stage.tile, segment.v, segment.dtype, segment.v_strides, head, copy, pages,
                        first_token);
      if (!tiles.is_edge(i - 1)) {
        end_copies(stage, copy.direct);
        continue;
      }
      ptx::cp_async_wait_all();
      ptx::named_barrier_sync(kLoadMeeting, kGroupThreads);  // pieces are looked through by other threads
      look_through_values(tiles, i - 1, stage);
    }
  }

  /// The tile is there when this thread's copies are through.
  __device__ __forceinline__ void end_copies(const Stage& stage, bool direct) const {
    if (!direct) {
      hand_over_tile(stage);
      return;
    }
    ptx::cp_async_mbarrier_arrive(stage.full);
    ptx::mbarrier_arrive(stage.full);
  }

  /// Where this lane's token of its warp's tokens of a tile begins; -1: no row sees it.
  __device__ __forceinline__ int64_t token_begin(const Tiles& tiles, int32_t i, const KvStrides& strides, int32_t head,
                                                 const SegmentCopy& copy, const int32_t* pages,
                                                 int32_t first_token) const {
    constexpr int32_t kMine = kTokens / kGroupWarps;
    const int32_t mine = tiles.first_token(i) + warp_ * kMine + lane_;
    if (lane_ >= kMine || mine < tiles.sight.any_begin || mine >= tiles.sight.any_end) return -1;
    const int64_t begin = head * strides.head;
    if (pages == nullptr) return begin + (int64_t{first_token} + mine) * strides.token;
    const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(mine));
    const uint32_t in_page = static_cast<uint32_t>(mine) - column * copy.page_size.divisor();
    return begin + pages[column] * strides.page + in_page * strides.token;
  }

  /// Begins the copies of a tile by threads. Zeros for tokens that no row sees.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_tokens(const Tiles& tiles, int32_t i, uint32_t tile, const void* data,
                                              DType dtype, const KvStrides& strides, int32_t head,
                                              const SegmentCopy& copy, const int32_t* pages,
                                              int32_t first_token) const {
    constexpr int32_t kPieces = Dim / kPiece;
    constexpr int32_t kMine = kTokens / kGroupWarps;
    const int64_t begin = token_begin(tiles, i, strides, head, copy, pages, first_token);
#pragma unroll 2
    for (int32_t n = lane_; n < kMine * kPieces; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n / kPieces);
      const uint32_t target = tile + static_cast<uint32_t>(tile_offset(Dim, kMine * warp_ + n / kPieces, n % kPieces));
      const int64_t from = at < 0 ? 0 : at + n % kPieces * kPiece;
      if (copy.direct) {
        ptx::cp_async_16(target, static_cast<const T*>(data) + from, at >= 0);
      } else {
        copy_upcast_16B<T>(target, data, dtype, from, at >= 0);
      }
    }
  }

  int32_t num_items_ = -1;  ///< before the present one; -1: there is none yet
  int32_t num_edges_ = 0;
  int32_t parts_ = 0;            ///< done of what makes the next item ready
  BoxPlace first_boxes_{0, -1};  ///< the lane's, of the first tiles of the last item that was made ready
  Place keys_;                   ///< the next
  Place values_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
