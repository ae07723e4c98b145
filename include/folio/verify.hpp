#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "folio/context.hpp"
#include "folio/types/export.hpp"

/// Conformance: generated attention problems, run through the public API and compared with a float64 oracle. A case is
/// a level of every factor (dtypes, page size, mask ...) and a seed for everything else; its string reproduces it.
/// Library: folio_testing.
namespace folio::inline v0::verify {

inline constexpr int32_t kNumFactors = 25;

/// One dimension of the space of cases. Level 0 is the plain one.
struct FactorInfo {
  std::string_view name;
  std::span<const std::string_view> levels;
};

/// The factors, in the order of ConformanceCase::levels. Static storage.
FOLIO_API std::span<const FactorInfo> factors();

/// One problem.
struct ConformanceCase {
  std::string kernel;                         ///< forced, and asserted; empty = whichever `prepare` picks
  uint64_t seed = 1;                          ///< values, lengths within their profile, page orders, strides
  std::array<uint8_t, kNumFactors> levels{};  ///< index into factors()[i].levels
  friend bool operator==(const ConformanceCase&, const ConformanceCase&) = default;
};

/// "kernel=generic seed=7 dtypes=bf16/e4m3/bf16 page=1": factors at level 0 are left out.
FOLIO_API std::string to_string(const ConformanceCase& conformance_case);

/// The inverse. Throws kInvalidArgument naming the word it cannot use and what it could have been.
FOLIO_API ConformanceCase parse_case(std::string_view text);

/// Empty if the case's levels go together, else which do not and why.
FOLIO_API std::string invalid_reason(const ConformanceCase& conformance_case);

/// The kernels that this machine can run on a device, the preferred first. Without a context: the CPU's.
FOLIO_API std::vector<std::string> runnable_kernels();
FOLIO_API std::vector<std::string> runnable_kernels(const Context& context);

/// What a covering array covers. A tuple is a choice of levels of `strength` factors (the kernel is one of them); it is
/// valid if some whole case has it.
struct Coverage {
  int32_t strength = 0;
  int64_t tuples = 0;   ///< all combinations of levels
  int64_t valid = 0;    ///< those that some valid case has
  int64_t covered = 0;  ///< those that some case of the array has
};

struct CoveringArray {
  std::vector<ConformanceCase> cases;
  Coverage coverage;
};

/// Cases such that every valid combination of levels of `strength` (1 to 3) factors occurs in one of them.
/// Deterministic. Greedy, one case at a time (in the manner of Cohen et al., "The AETG system", 1997); seconds. Throws
/// kInvalidArgument for another strength or an unknown kernel.
FOLIO_API CoveringArray covering_array(std::span<const std::string> kernels, int32_t strength = 3, uint64_t seed = 1);

/// `count` valid cases drawn at random. Deterministic.
FOLIO_API std::vector<ConformanceCase> random_cases(std::span<const std::string> kernels, int64_t count,
                                                    uint64_t seed = 1);

/// The case, changed so that FP8 MMA are allowed, and taken by kernels that have them: e4m3 queries, keys and
/// values at head_dim 128, no soft cap, ALiBi, rotation or custom mask. Its other levels stay.
FOLIO_API ConformanceCase with_fp8_mma(ConformanceCase conformance_case);

/// What became of a case.
struct CaseReport {
  bool passed = false;
  std::string failure;       ///< empty if it passed; else what differed, where, and by how much
  int64_t values = 0;        ///< output and LSE values compared with the oracle
  double worst_share = 0.0;  ///< largest error as a share of what was allowed; above 1 only in failures
};

/// Builds the case, runs it and checks it: outputs and LSE against the oracle; memory that must not be read (poisoned)
/// or written (canaries, guard pages: a stray access crashes); the determinism level by running it again in other ways.
/// Never throws for what the library under test does; throws kInvalidArgument for a case that is not valid.
/// Needs POSIX memory protection. Milliseconds to a second.
FOLIO_API CaseReport run_case(const ConformanceCase& conformance_case);

/// Calls that must be refused (an undeclared feature, a wrong dtype, a small workspace, a stale plan ...), for one
/// kernel: every one must throw the right code and write nothing. Returns one line per call that did not; empty = all
/// well.
FOLIO_API std::vector<std::string> check_refusals(const std::string& kernel);

}  // namespace folio::inline v0::verify
