#pragma once

namespace folio::testing {

/// Whether this program is instrumented by AddressSanitizer or ThreadSanitizer: everything takes ten times as long, and
/// what they look for shows in fewer cases than wrong numbers do.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kInstrumented = true;
#else
inline constexpr bool kInstrumented = false;
#endif

/// How many of `count` random cases a test runs in this build.
constexpr int random_cases(int count) {
  return kInstrumented ? count / 10 : count;
}

}  // namespace folio::testing
