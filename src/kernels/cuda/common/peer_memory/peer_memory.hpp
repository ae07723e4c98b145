#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/device.hpp"
#include "kernels/cuda/common/merge_states/gather_header.hpp"
#include "kernels/cuda/common/merge_states/merge_states.hpp"
#include "kernels/cuda/common/merge_states/ranks.hpp"

/// Exchanges between the GPUs of one host by stores to each other's memory: a kernel stores what its peers need, and
/// waits on flags for what they store. Decision 0089 says why two halves suffice and why nothing waits for ever.
namespace folio::inline v0::kernels::cuda {

/// Ranks that one group over peer memory can have.
inline constexpr int32_t kMostPeers = 8;

/// What a rank's memory has, from its beginning. Equal on all ranks.
struct PeerMemoryLayout {
  int32_t world = 1;
  int32_t grid = 1;  ///< CTAs of every exchange, and so flags of every rank
  // Offsets in bytes.
  size_t fault = 0;       ///< PeerFault; written by any rank
  size_t counters = 0;    ///< uint32_t [grid]: exchanges that this rank's CTAs have been through
  size_t flags = 0;       ///< uint32_t [world][grid]: exchanges that each rank's CTAs have stored their part of
  size_t headers = 0;     ///< GatherHeader [world], header_stride bytes apart
  size_t slopes = 0;      ///< float: of all ranks' heads
  size_t queries = 0;     ///< of all ranks' heads
  size_t halves[2] = {};  ///< partial results, of an even or odd exchange
  size_t total = 0;
  static constexpr int64_t kHeaderStride = 64;
};

/// Why an exchange was given up, as one word: 0 while none was. A rank that reports itself has thrown.
struct PeerFault {
  uint32_t word = 0;
  static constexpr PeerFault of(int32_t missing, int32_t reporter) {
    return {static_cast<uint32_t>(missing + 1) | static_cast<uint32_t>(reporter) << 8};
  }
  constexpr int32_t missing() const { return static_cast<int32_t>(word & 0xff) - 1; }  ///< the rank that did not come
  constexpr int32_t reporter() const { return static_cast<int32_t>(word >> 8); }       ///< the rank that waited for it
};

/// One rank's view of all.
struct PeerRanks {
  std::byte* memory[kMostPeers] = {};  ///< every rank's, as this one reaches it
  PeerMemoryLayout layout;
  int32_t rank = 0;
  uint64_t timeout = 0;        ///< nanoseconds that one exchange waits for a peer
  PeerFault* fault = nullptr;  ///< in page-locked memory: a copy of this rank's, for the host
};

/// Brings this rank's queries, slopes and header to all ranks, where they lie as ArrangeParams arranges them, and waits
/// for the other ranks'. All addresses are the device's; strides are in bytes.
struct PeerQueriesParams {
  PeerRanks ranks;
  const std::byte* from = nullptr;  ///< row (token, head)
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t num_tokens = 0;
  int32_t heads = 1;   ///< of one rank
  int32_t groups = 1;  ///< KV heads; divides heads
  int64_t row_bytes = 0;
  bool sends_slopes = false;
  const float* slopes = nullptr;  ///< [heads]; null: zeros
  SentHeader sent;                ///< without `to`
  HeaderFault* header_fault = nullptr;
};
/// Throws Error(kDeviceError) where the launch fails.
void enqueue(const PeerQueriesParams& params, Stream stream);

/// Brings every rank the partial results of its heads, or of all heads, from all ranks, and merges them, together with
/// what `merges` has besides. Rows without all parts, after a rank stayed away, become NaN.
struct PeerCombineParams {
  PeerRanks ranks;
  RankHeads heads;         ///< parts: all ranks; how their heads stand in `partial`
  bool all_heads = false;  ///< every rank gets the rows of all heads, rank 0's first
  const std::byte* partial =
      nullptr;                 ///< rows [num_tokens, parts * local] of the dtype of source 0, at a multiple of 16
  int64_t row_bytes = 0;       ///< of a row of `partial`; a multiple of 16
  const float* lse = nullptr;  ///< [num_tokens, parts * local]
  /// For exchanges of even and odd number, whose parts lie in their half. Source 0: the parts of all ranks.
  CombineParams merges[2];
};
/// Where the LSEs stand in a half of so many rows a rank; the rows stand first.
constexpr size_t peer_lses_at(int32_t world, int64_t rows, int64_t row_bytes) {
  return static_cast<size_t>(world) * static_cast<size_t>(rows) * static_cast<size_t>(row_bytes);
}
/// Throws Error(kDeviceError) where the launch fails.
void enqueue(const PeerCombineParams& params, Stream stream);

}  // namespace folio::inline v0::kernels::cuda
