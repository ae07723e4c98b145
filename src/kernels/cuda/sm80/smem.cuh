#pragma once

#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/sm80/config.hpp"
#include "ptx/memory.cuh"

/// What shared memory holds besides tiles: the work tile's constants, and what is known of its rows and tokens.
namespace folio::inline v0::kernels::cuda::sm80 {

/// This thread's number, read opaque: so that what one way derives from it is not kept in registers through the others.
__device__ __forceinline__ int32_t thread_index() {
  int32_t number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

/// Where a token of a segment lies. Ragged: page 0 and the token of the tensor.
struct TokenPlace {
  int32_t page;
  int32_t in_page;  ///< negative: no row of the work tile is_visible the token, which is not read
};

/// Where a token's key and value begin, in elements; kNotVisible for both where no row is_visible it.
struct TokenOffsets {
  int64_t k;
  int64_t v;
};
constexpr int64_t kNotVisible = INT64_MIN;

/// Where keys or values of an work tile lie, in bytes: of a segment's head.
struct alignas(16) TokenStrides {
  const std::byte* begin;  ///< page 0; ragged: the row's first token
  int64_t page;
  int64_t token;
};

/// Where a token's page stands in its row of the page table.
struct TokenColumn {
  int32_t column;
  int32_t in_page;  ///< as TokenPlace's
};

/// One work tile's constants. In shared memory: registers are what this kernel is short of.
struct WorkTileContext {
  scheduler::WorkTile work_tile;
  const SegmentParams* segment;
  int32_t num_rows;
  int32_t first_tile;  ///< local token: a multiple of kKvTile
  int32_t num_tiles;   ///< of kKvTile
  int64_t first_pos;
  KvShard shard;
  bool custom;          ///< the custom mask's bits apply
  bool even;            ///< 16 tokens from a multiple of 16 on lie one token stride apart
  int32_t first_token;  ///< ragged: the row's first token
  alignas(16) VisibleRange visible_range;
  alignas(16) const int32_t* pages;  ///< of the work tile's row of the page table; null: ragged
  int32_t page_shift;                ///< the page size is 2^page_shift; -1 if it is no power of two
  int32_t page_mask;                 ///< of a token's bits, those that say where it lies in its page
  TokenStrides steps[2];             ///< of keys and of values
};

/// How a row of an work tile epilogue. A factor below 0 means that there is nothing to be multiplied.
struct RowEpilogue {
  int64_t at;    ///< of the output, or of the partial results
  float scale;   ///< of the work tile's values
  float before;  ///< of the chain's values before the work tile
  float here;    ///< of the work tile's
  float factor;  ///< of the output
};

/// What is known of each row of an work tile, in shared memory, besides the tiles.
template <int32_t Rows>
struct SharedStorage {
  union {
    struct {
      int64_t mask_bit[Rows];    ///< custom mask: local token j stands at bit mask_bit + j of the mask's bytes,
      int32_t mask_begin[Rows];  ///< if j >= mask_begin; earlier tokens are visible
      int32_t position[Rows];
      int32_t visible_begin[Rows];  ///< local tokens; rows beyond the work tile's see nothing
      int32_t visible_end[Rows];
    };
    RowEpilogue epilogue[Rows];  ///< once the work tile's tokens are through
  };
  int32_t request[Rows];
  float logit_scale[Rows];  ///< the wide way's
  float score_scale[Rows];  ///< the wide way's: what is left of it once signs and zeros are seen to
  int8_t
      query_exponent[Rows];  ///< kernels of codes: queries in shared memory are to be multiplied with 2 to this power
  /// The wide way's elsewhere: where the keys and the values begin of the tokens that a warp copies, which are every
  /// fourth of each 16 of a tile: by tile, warp, key or value, number and 16. Null where no row is_visible the token.
  const std::byte* addresses[2][kWarps][2][4][kKvTile / 16];
  int32_t page_ids[2][Rows > kLargeHeadRows ? kThreads : 1];  ///< by tile: of the token that a thread looks up
  WorkTileContext context;
  scheduler::WorkTile next;  ///< the work tile after this one, where there is one
  union {
    struct {
      int64_t query[Rows];  ///< where a row's queries begin, in elements; while they are copied and rows are bound
      VisibleRange visible_range[kWarps];
    };
    TokenOffsets offsets[2][kKvTile];  ///< the wide way's, where tokens' places are no addresses
    struct {
      float row_max[Rows];  ///< of each state; then what its values are to be multiplied with
      float row_sum[Rows];
    } result;  ///< once the work tile's tokens are through
  };
};

/// A row's q head and token.
struct RowPlace {
  int32_t token;
  int32_t q_head;
};
__device__ __forceinline__ RowPlace row_place(const AttentionParams& params, const scheduler::WorkTile& work_tile,
                                              int32_t row) {
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t packed = work_tile.row_begin + row;
  return {packed / group_size, work_tile.kv_head * group_size + packed % group_size};
}

/// An address that the compiler does not know: what is derived from it is computed opaque in every tile, instead of
/// being kept in registers that the accumulators need.
__device__ __forceinline__ uint32_t opaque(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

}  // namespace folio::inline v0::kernels::cuda::sm80
