#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "folio/types/attention.hpp"
#include "folio/verify.hpp"

namespace folio::inline v0::verify {

/// Indices of ConformanceCase::levels.
enum Factor : int32_t {
  kDtypes,
  kHeadDims,
  kGroup,
  kPageSize,
  kFormat,
  kMask,
  kWindow,
  kSoftCap,
  kAlibi,
  kSinks,
  kRope,
  kSegments,
  kQueries,
  kLengths,
  kScales,
  kLse,
  kTable,
  kDeterminism,
  kWorkers,
  kExecutor,
  kFp8Products,
  kSpans,
  kChunks,
  kRequestCausal,
  kKvStart,
  kFactorEnd
};
static_assert(kFactorEnd == kNumFactors);

/// Levels, in the order of their names in factors.cc. Those not listed here are tables indexed by the level.
enum class FormatLevel { kNhd, kHnd, kInterleaved, kConcatenated, kPadded, kAlias, kPacked, kFar, kDsMla };
enum class MaskLevel { kCausal, kNone, kCustomAll, kCustomTail };
enum class WindowLevel { kNone, kLeft, kBoth, kWide };
enum class SegmentsLevel {
  kPaged,
  kRagged,
  kPrefixAndNew,
  kCascade1,
  kCascade2,
  kShard1,
  kShard2,
  kShardPage,
  kTruncated,
  kCross
};
enum class QueriesLevel { kDecode, kPrefill, kMixed, kVerify };
enum class LengthsLevel { kEdges, kMedium, kLong, kSkewed, kEmpty };
enum class ScalesLevel { kNone, kHost, kTensor, kHead, kRequest, kRequestAndHead };
enum class LseLevel { kBaseE, kNone, kBase2, kStrided };
enum class TableLevel { kCsr, kDense };
enum class SpansLevel { kOff, kClamped, kBeyond };
enum class ExecutorLevel { kPool, kSequential, kShuffled };

template <typename Level>
Level level(const ConformanceCase& conformance_case, Factor factor) {
  return static_cast<Level>(conformance_case.levels[static_cast<size_t>(factor)]);
}

inline bool is_on(const ConformanceCase& conformance_case, Factor factor) {
  return conformance_case.levels[static_cast<size_t>(factor)] != 0;
}

struct DtypeLevel {
  DType q, kv, out;
};
struct HeadDimLevel {
  int32_t qk, v;
};

DtypeLevel dtypes_of(const ConformanceCase& conformance_case);
HeadDimLevel head_dims_of(const ConformanceCase& conformance_case);
int32_t group_size_of(const ConformanceCase& conformance_case);
int32_t page_size_of(const ConformanceCase& conformance_case);
int32_t num_workers_of(const ConformanceCase& conformance_case);
bool is_sharded(SegmentsLevel segments);

/// A case some of whose levels are not chosen yet (-1).
using PartialLevels = std::array<int8_t, kNumFactors>;

/// A pair of levels that no valid case has: what cannot be said at all, or would say nothing.
struct Conflict {
  Factor a;
  uint32_t a_levels;  ///< set of levels, bit l for level l
  Factor b;
  uint32_t b_levels;
  const char* why;
};

/// Every conflict between two factors.
std::span<const Conflict> conflicts();

/// The configuration that a case prepares, but for its seed's part (KV heads, window widths, chunk sizes): what kernels
/// judge.
AttentionConfig kernel_question(const ConformanceCase& conformance_case);

}  // namespace folio::inline v0::verify
