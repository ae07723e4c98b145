#pragma once

#include "kernels/cuda/sm80/attention/code_stage.cuh"

/// How keys and values come to shared memory in the wide way: where tokens lie is found two tiles ahead, what lies
/// there is copied one tile ahead.
namespace folio::inline v0::kernels::cuda::sm80 {

/// An address that the compiler does not know: what is derived from it is computed anew in every tile, instead of
/// being kept in registers that the accumulators need.
__device__ __forceinline__ uint32_t anew(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

/// Bit 4 to 6 of an address inside 128 bytes change by XOR, the others by addition.
__device__ __forceinline__ uint32_t advance(uint32_t address, int32_t piece) {
  return (address ^ static_cast<uint32_t>((piece & 7) << 4)) + static_cast<uint32_t>((piece >> 3) << 7);
}

/// The same in rows of codes: in those of 64 or 192 bytes, only bits 4 and 5 change by XOR.
template <int32_t Dim>
__device__ __forceinline__ uint32_t advance_codes(uint32_t address, int32_t piece) {
  if constexpr (Dim % 128 == 0) return advance(address, piece);
  return (address ^ static_cast<uint32_t>((piece & 3) << 4)) + static_cast<uint32_t>((piece >> 2) << 6);
}

template <typename T, int32_t DimQk, int32_t DimV, bool Codes, int32_t Rows>
class WideCopies {
 protected:
  static constexpr int32_t kTile = wide_tokens({DimQk, DimV});
  static constexpr int32_t kGroups = kTile / 16;
  static constexpr int32_t kGroupThreads = 8;  ///< that copy one token's pieces
  static_assert(kThreads == 16 * kGroupThreads && DimQk % (8 * kPiece) == 0 && DimV % (8 * kPiece) == 0);

  __device__ __forceinline__ WideCopies(const AttentionParams& params, const ItemContext& context, RowInfo<Rows>& rows,
                                        uint32_t shared)
      : params_(params), context_(context), rows_(rows), q_(anew(shared)), thread_(thread_number()) {}

  /// What stands elsewhere in shared memory is found from where queries stand: an address that the compiler does not
  /// know is not computed anew from the CTA's number at every use.
  __device__ __forceinline__ uint32_t slots() const { return q_ + 2 * Rows * DimQk; }
  __device__ __forceinline__ uint32_t info(size_t offset) const {
    constexpr auto kContext = static_cast<uint32_t>(offsetof(RowInfo<Rows>, context));
    return q_ + tile_bytes({DimQk, DimV}) + kContext + static_cast<uint32_t>(offset);
  }

  /// This thread's number, for what is to be derived from it anew: see anew.
  __device__ __forceinline__ int32_t lane_and_warp() const {
    return static_cast<int32_t>(anew(static_cast<uint32_t>(thread_)));
  }
  /// Most tokens can be copied as they are, from addresses that each warp finds for the tokens that it copies: four of
  /// each 16 of a tile, by eight threads each.
  __device__ __forceinline__ void begin_copies() {
    const SegmentParams& segment = params_.segments[context_.item.segment];
    direct_ = segment.wide && params_.head_dim_qk == DimQk && params_.head_dim_v == DimV &&
              (context_.pages == nullptr || context_.page_shift >= 0);
    as_they_are_ = direct_ && !is_fp8(segment.dtype);
  }

  /// Finds the places of the first two tiles, and begins to look up those of the third. Tiles are named by their first
  /// token.
  __device__ __forceinline__ void begin_places(int32_t begin) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      if (direct_) {
        look_up(begin + i * kTile, sight_and_pages());
      } else {
        look_up_one(begin + i * kTile);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if (direct_) {
      note_places(begin, facts_of(begin));
      note_places(begin + kTile, facts_of(begin + kTile));
      __syncwarp();
      look_up(begin + 2 * kTile, sight_and_pages());
    } else {
      note_offsets(begin);
      look_up_one(begin + 2 * kTile);
      __syncthreads();
    }
  }

  /// What looking up needs to know, read ahead of its use.
  struct SightAndPages {
    uint4 sight;
    uint4 pages;  ///< an address, shift and mask
  };
  struct Facts {
    SightAndPages common;
    uint32_t page;
    uint4 begin_and_page;  ///< of PieceSteps
    uint2 token;
  };
  __device__ __forceinline__ SightAndPages sight_and_pages() const {
    return {ptx::ld_shared_16(info(offsetof(ItemContext, sight))),
            ptx::ld_shared_16(info(offsetof(ItemContext, pages)))};
  }
  __device__ __forceinline__ Facts facts_of(int32_t first) const {
    const int32_t thread = lane_and_warp();
    const uint32_t steps = info(offsetof(ItemContext, steps)) +
                           static_cast<uint32_t>(thread % 32 / 16) * static_cast<uint32_t>(sizeof(PieceSteps));
    Facts facts;
    facts.page = ptx::ld_shared_4(page_id(first));
    facts.common = sight_and_pages();
    facts.begin_and_page = ptx::ld_shared_16(steps);
    facts.token = ptx::ld_shared_8(steps + 16);
    return facts;
  }
  __device__ __forceinline__ static int64_t join(uint32_t low, uint32_t high) {
    return static_cast<int64_t>(uint64_t{high} << 32 | low);
  }

  /// This lane's token of those that its warp copies of a tile; -1 where no row sees it.
  __device__ __forceinline__ static int32_t own_token(int32_t first, int32_t thread, const uint4& sight) {
    const int32_t token = first + thread % 4 * 16 + thread / 32 * 4 + thread / 4 % 4;
    const bool seen =
        thread % 4 < kGroups && token >= static_cast<int32_t>(sight.x) && token < static_cast<int32_t>(sight.y);
    return seen ? token : -1;
  }

  /// Begins to look up the page of own_token. As note_places, without branches and without registers that wait, so that
  /// both are done among products.
  __device__ __forceinline__ void look_up(int32_t first, const SightAndPages& known) const {
    const int32_t token = own_token(first, lane_and_warp(), known.sight);
    const int64_t pages = join(known.pages.x, known.pages.y);
    ptx::cp_async_4(page_id(first), reinterpret_cast<const int32_t*>(pages) + (token >> (known.pages.z & 31u)),
                    direct_ && token >= 0 && pages != 0);
  }

  /// Notes where own_token lies, for the copies behind the next barrier: keys by half of the lanes, values by the
  /// others.
  __device__ __forceinline__ void note_places(int32_t first, const Facts& facts) const {
    const int32_t thread = lane_and_warp();
    const int32_t token = own_token(first, thread, facts.common.sight);
    const bool paged = (facts.common.pages.x | facts.common.pages.y) != 0;
    const int32_t page = paged ? static_cast<int32_t>(facts.page) : 0;
    const int64_t at = join(facts.begin_and_page.x, facts.begin_and_page.y) +
                       page * join(facts.begin_and_page.z, facts.begin_and_page.w) +
                       (token & static_cast<int32_t>(facts.common.pages.w)) * join(facts.token.x, facts.token.y);
    const uint32_t place =
        places(first) + 8 * (((thread / 32 * 2 + thread / 16 % 2) * 4 + thread / 4 % 4) * 4 + thread % 4);
    ptx::st_shared_8(place, token >= 0 ? static_cast<uint64_t>(at) : 0);
  }
  /// Where the places of a tile are noted.
  __device__ __forceinline__ uint32_t places(int32_t first) const {
    constexpr auto kPlaces = static_cast<uint32_t>(offsetof(RowInfo<Rows>, places));
    return q_ + tile_bytes({DimQk, DimV}) + kPlaces +
           parity(first) * static_cast<uint32_t>(sizeof(RowInfo<Rows>::places) / 2);
  }

  /// Where this thread's page id of a tile is copied to.
  __device__ __forceinline__ uint32_t page_id(int32_t first) const {
    constexpr auto kPageIds = static_cast<uint32_t>(offsetof(RowInfo<Rows>, page_ids));
    return q_ + tile_bytes({DimQk, DimV}) + kPageIds + 4 * (parity(first) * kThreads + static_cast<uint32_t>(thread_));
  }
  __device__ __forceinline__ static uint32_t parity(int32_t first) {
    return static_cast<uint32_t>(first) / kTile & 1u;
  }

  /// The same where tokens are looked up one by one.
  __device__ __forceinline__ void look_up_one(int32_t first) const {
    if (thread_ >= kTile) return;
    const TokenColumn at = column_of(context_, first + thread_);
    ptx::cp_async_4(page_id(first), context_.pages + at.column, at.in_page >= 0 && context_.pages != nullptr);
  }

  /// What was looked up token by token, for the copies of a tile.
  __device__ __forceinline__ void note_offsets(int32_t first) const {
    if (thread_ >= kTile) return;
    const TokenColumn at = column_of(context_, first + thread_);
    const int32_t page = context_.pages != nullptr ? static_cast<int32_t>(ptx::ld_shared_4(page_id(first))) : 0;
    rows_.offsets[parity(first)][thread_] = offsets_of(context_, {page, at.in_page});
  }

  __device__ __forceinline__ void copy_keys(int32_t first, uint32_t slot) const {
    if (as_they_are_ || direct_) {
      copy_noted<DimQk>(0, first, slot);
    } else {
      const SegmentParams& segment = params_.segments[context_.item.segment];
      copy_tokens<DimQk>({segment.k, segment.dtype, segment.wide}, &TokenOffsets::k, params_.head_dim_qk, first, slot);
    }
  }
  __device__ __forceinline__ void copy_values(int32_t first, uint32_t slot) const {
    if (as_they_are_ || direct_) {
      copy_noted<DimV>(1, first, slot);
    } else {
      const SegmentParams& segment = params_.segments[context_.item.segment];
      copy_tokens<DimV>({segment.v, segment.dtype, segment.wide}, &TokenOffsets::v, params_.head_dim_v, first, slot);
    }
  }

  /// Begins the copy of a tile's keys (0) or values (1), this thread's share of the tokens that its warp noted; of
  /// those that no row sees, zeros. fp8 is widened on the way, or, where all keys and values are codes, later.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_noted(int32_t half, int32_t first, uint32_t slot) const {
    const int32_t thread = lane_and_warp();
    if constexpr (Codes) {
      CodeStage<Dim, kTile>::copy(slot, rows_.places[parity(first)][thread / 32][half][thread % 32 / 8], thread);
    } else {
      constexpr int32_t kPieces = Dim / (kGroupThreads * kPiece);
      constexpr int32_t kWidth = kGroupThreads * 16;
      const uint32_t to = slot + piece_offset(Dim, thread / kGroupThreads, thread % kGroupThreads);
      const int32_t in_token = 16 * (thread % kGroupThreads);
      if (as_they_are_) {
        const std::byte* from[kGroups];  // read at once, not one behind each copy
        const uint32_t noted =
            places(first) + 8 * (((static_cast<uint32_t>(thread) / 32 * 2 + half) * 4 + thread % 32 / 8) * 4);
#pragma unroll
        for (int32_t i = 0; i < kGroups; i += 2) {
          const uint4 two = ptx::ld_shared_16(noted + 8 * i);
          from[i] = reinterpret_cast<const std::byte*>(join(two.x, two.y));
          from[i + 1] = reinterpret_cast<const std::byte*>(join(two.z, two.w));
        }
#pragma unroll
        for (int32_t i = 0; i < kGroups; ++i) {
#pragma unroll
          for (int32_t j = 0; j < kPieces; ++j) {
            ptx::cp_async_16(to + 32 * i * Dim + kWidth * j, from[i] + in_token + kWidth * j, from[i] != nullptr);
          }
        }
        return;
      }
      const auto& noted = rows_.places[parity(first)][thread / 32][half][thread % 32 / 8];
      const DType dtype = params_.segments[context_.item.segment].dtype;
#pragma unroll 1
      for (int32_t i = 0; i < kGroups; ++i) {
        const std::byte* const from = noted[i];
        uint2 codes[kPieces];
#pragma unroll
        for (int32_t j = 0; j < kPieces; ++j) {
          codes[j] = from != nullptr ? *reinterpret_cast<const uint2*>(from + (in_token + kWidth * j) / 2) : uint2{};
        }
#pragma unroll
        for (int32_t j = 0; j < kPieces; ++j) {
          ptx::st_shared_16(to + 32 * i * Dim + kWidth * j, widen_codes<T>(codes[j], dtype));
        }
      }
    }
  }

  /// The same of tokens whose places were looked up one by one.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_tokens(const PieceSource& source, int64_t TokenOffsets::*half, int32_t head_dim,
                                              int32_t first, uint32_t slot) const {
    const bool whole = source.direct() && first >= context_.sight.any_begin && first + kTile <= context_.sight.any_end;
    copy_tile<T, Dim, kTile>(slot, rows_.offsets[parity(first)], half, source, head_dim, whole, thread_);
  }

  const AttentionParams& params_;
  const ItemContext& context_;
  RowInfo<Rows>& rows_;
  const uint32_t q_;  ///< where shared memory begins, and queries in it
  const int32_t thread_;
  bool direct_;       ///< whole rows are copied, from addresses noted by warps
  bool as_they_are_;  ///< and they are of the 16-bit type
};

}  // namespace folio::inline v0::kernels::cuda::sm80
