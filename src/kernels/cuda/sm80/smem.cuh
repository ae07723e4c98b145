#pragma once

#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/sm80/config.hpp"
#include "ptx/control.cuh"
#include "ptx/memory.cuh"

/// What shared memory holds besides tiles: the work tile's constants, and what is known of its rows and tokens.
namespace folio::inline v0::kernels::cuda::sm80 {

using ptx::thread_index;

/// Where a token of a segment lies. Ragged: page 0 and the token of the tensor.
struct TokenPlace {
  int32_t page;
  int32_t in_page;  ///< negative: no row sees the token: it is not read
};

/// Where the K and the V of a token begin, in elements; kNotVisible for both where no row sees it.
struct TokenOffsets {
  int64_t k;
  int64_t v;
};
constexpr int64_t kNotVisible = INT64_MIN;

/// Strides of K or of V for one segment and KV head, in bytes.
struct alignas(16) TokenStrides {
  const std::byte* begin;  ///< page 0; ragged: the row's first token
  int64_t page;
  int64_t token;
};

/// The column of a token's page in its row of the page table.
struct TokenColumn {
  int32_t column;
  int32_t in_page;  ///< as TokenPlace's
};

/// Constants of a work tile. They are in shared memory because the kernel is short of registers.
struct WorkTileContext {
  scheduler::WorkTile work_tile;
  const SegmentParams* segment;
  int32_t num_rows;
  int32_t first_tile;  ///< first local token of the first KV tile: a multiple of kKvTile
  int32_t num_tiles;   ///< KV tiles
  int64_t first_pos;
  KvShard shard;
  bool custom;          ///< the bits of the custom mask apply
  bool even;            ///< any 16 tokens from a multiple of 16 on lie one token stride apart
  int32_t first_token;  ///< ragged: the row's first token
  alignas(16) VisibleRange visible_range;
  alignas(16) const int32_t* pages;  ///< of the work tile's row of the page table; null: ragged
  int32_t page_shift;                ///< the page size is 2^page_shift; -1 if it is no power of two
  int32_t page_mask;                 ///< the bits of a token that are its place in the page
  TokenStrides steps[2];             ///< of keys and of values
};

/// How a row of a work tile ends. A factor below 0 stands for "nothing to multiply".
struct RowEpilogue {
  int64_t at;    ///< where the row begins in the output or in the partial results
  float scale;   ///< v_scale
  float before;  ///< factor of what the output tile has accumulated before this work tile
  float here;    ///< factor of this work tile
  float factor;  ///< 1 / row_sum
};

/// Shared memory behind the tiles: the constants of the work tile, its rows, its tokens, the next work tile.
template <int32_t Rows>
struct SharedStorage {
  union {
    struct {
      int64_t mask_bit[Rows];    ///< custom mask: local token j stands at bit mask_bit + j of the mask's bytes,
      int32_t mask_begin[Rows];  ///< if j >= mask_begin; earlier tokens are visible
      int32_t position[Rows];
      int32_t visible_begin[Rows];  ///< local tokens; empty for rows that the work tile does not have
      int32_t visible_end[Rows];
    };
    RowEpilogue epilogue[Rows];  ///< from the epilogue on
  };
  int32_t request[Rows];
  float logit_scale[Rows];      ///< prefill path
  float score_scale[Rows];      ///< prefill path: 1, or |logit_scale| where prepare_scores leaves scores unscaled
  int8_t query_exponent[Rows];  ///< fp8 instantiations: Q in shared memory is to be multiplied with 2 to this power
  /// Prefill path: where K and V begin of the tokens that a warp copies: of each 16 tokens of a KV tile it copies every
  /// fourth. Index: parity of the KV tile, warp, K or V, token, sixteen. Null where no row sees the token.
  const std::byte* addresses[2][kWarps][2][4][kKvTile / 16];
  int32_t page_ids[2][Rows > kLargeHeadRows ? kThreads
                                            : 1];  ///< by parity of the KV tile: of the token that a thread looks up
  WorkTileContext context;
  scheduler::WorkTile next;  ///< prefetched; none after the last
  union {
    struct {
      int64_t query[Rows];                 ///< where Q of a row begins, in elements; until rows are bound
      VisibleRange visible_range[kWarps];  ///< reduced by warp
    };
    TokenOffsets offsets[2][kKvTile];  ///< where tokens are not copied by address
    struct {
      float row_max[Rows];  ///< of each state; then the factor that rescales it
      float row_sum[Rows];
    } result;  ///< from the epilogue on
  };
};

/// The token and the q head of a row.
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

/// Hides an address from the compiler. What is derived from it is then computed in every KV tile, instead of taking
/// registers that the accumulators need.
__device__ __forceinline__ uint32_t opaque(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

}  // namespace folio::inline v0::kernels::cuda::sm80
