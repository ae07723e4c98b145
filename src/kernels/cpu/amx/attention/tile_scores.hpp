#pragma once

#include "kernels/cpu/amx/attention/ahead.hpp"
#include "kernels/cpu/amx/attention/lanes.hpp"
#include "kernels/cpu/amx/attention/step.hpp"

/// Products of keys and queries, transposed: the keys as stored are the left factor, the queries, packed once as
/// [dim / 2][row][2], the right one. So a token's scores stand side by side, a row in each lane.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// scores[token][lane] of the strips whose packed queries begin at `q`; strip s at scores + s * kTileTokens *
/// kStripRows.
template <class Tiles, int kStrips, class A>
FOLIO_INLINE void make_tile_scores(const unsigned char* q, int32_t dim_steps, const ReadyTokens& ready, float* scores,
                                   A& ahead) {
  const TileRow16* const k = ready.keys;
  if constexpr (kStrips == 1) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (int32_t i = 0; i < dim_steps; ++i) {
      ahead.enter_keys(i);
      Tiles::template load<5>(q + i * kTileBytes, kTileRowBytes);
      Tiles::template load<4>(ahead.key_tile(k, 0, i), k[0].stride);
      Tiles::template multiply_add<0, 4, 5>();
      ahead.at_product();
      Tiles::template load<6>(ahead.key_tile(k, 1, i), k[1].stride);
      Tiles::template multiply_add<1, 6, 5>();
      ahead.at_product();
      Tiles::template load<7>(ahead.key_tile(k, 2, i), k[2].stride);
      Tiles::template multiply_add<2, 7, 5>();
      ahead.at_product();
      Tiles::template load<4>(ahead.key_tile(k, 3, i), k[3].stride);
      Tiles::template multiply_add<3, 4, 5>();
      ahead.at_product();
    }
    Tiles::template store<0>(scores, kTileRowBytes);
    Tiles::template store<1>(scores + 16 * kStripRows, kTileRowBytes);
    Tiles::template store<2>(scores + 32 * kStripRows, kTileRowBytes);
    Tiles::template store<3>(scores + 48 * kStripRows, kTileRowBytes);
  } else {
    const unsigned char* const other_q = q + dim_steps * kTileBytes;
    float* const other_scores = scores + kTileTokens * kStripRows;
    for (int32_t g = 0; g < kTileTokens / kGroupTokens; g += 2) {
      Tiles::template zero<0>();
      Tiles::template zero<1>();
      Tiles::template zero<2>();
      Tiles::template zero<3>();
      for (int32_t i = 0; i < dim_steps; ++i) {
        Tiles::template load<4>(k[g].at + i * kTileRowBytes, k[g].stride);
        Tiles::template load<6>(q + i * kTileBytes, kTileRowBytes);
        Tiles::template multiply_add<0, 4, 6>();
        Tiles::template load<7>(other_q + i * kTileBytes, kTileRowBytes);
        Tiles::template multiply_add<1, 4, 7>();
        ahead.at_product();
        Tiles::template load<5>(k[g + 1].at + i * kTileRowBytes, k[g + 1].stride);
        Tiles::template multiply_add<2, 5, 6>();
        Tiles::template multiply_add<3, 5, 7>();
        ahead.at_product();
      }
      const int32_t first = g * kGroupTokens * kStripRows;
      Tiles::template store<0>(scores + first, kTileRowBytes);
      Tiles::template store<1>(other_scores + first, kTileRowBytes);
      Tiles::template store<2>(scores + first + kGroupTokens * kStripRows, kTileRowBytes);
      Tiles::template store<3>(other_scores + first + kGroupTokens * kStripRows, kTileRowBytes);
    }
  }
}

/// Packs the queries of all rows: [strip][dim step][dim / 2][row][2], with zeros for missing rows and dimensions.
static inline void pack_queries(const ItemCall& call, unsigned char* packed) {
  for (int32_t r = 0; r < call.num_rows; r += kStripRows) {
    for (int32_t d = 0; d < call.head_dim_qk; d += kDimStep, packed += kTileBytes) {
      const int32_t dims = smaller(call.head_dim_qk - d, kDimStep);
      const auto taken = static_cast<__mmask32>(bit_range(0, dims));
      IntVec words[kStripRows];
#pragma GCC unroll 16
      for (int i = 0; i < kStripRows; ++i) {
        words[i] = IntVec{};
        if (r + i < call.num_rows) {
          words[i] = reinterpret_cast<IntVec>(_mm512_maskz_loadu_epi16(taken, call.rows[r + i].q + d * kElement));
        }
      }
      transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < kStripRows; ++i) store(packed + i * 64, words[i]);
    }
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
