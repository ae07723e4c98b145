// The covering array and the random cases, dealt to as many tests as ctest may run at once; the quick program has the
// 2-wise array and fewer random cases, and under a sanitizer half of them; an emulated GPU has few.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "core/instrumented_test_util.hpp"
#include "folio/attention.hpp"
#include "folio/context.hpp"
#include "folio/verify.hpp"

namespace folio::verify {
namespace {

#ifdef FOLIO_QUICK_CONFORMANCE
constexpr int32_t kStrength = 2;
constexpr int64_t kRandomCases = 60;
constexpr size_t kShards = 2;
#else
constexpr int32_t kStrength = 3;
constexpr int64_t kRandomCases = 1000;
constexpr size_t kShards = 12;
#endif

#if defined(FOLIO_CUDA_CONFORMANCE)
constexpr const char* kNoKernel = "no GPU";
#else
constexpr const char* kNoKernel = "the emulation of AMX is compiled for AVX-512";
#endif

/// The kernels under test; empty where there is no device to run them on.
std::vector<std::string> kernels() {
#ifdef FOLIO_CUDA_CONFORMANCE
  try {
    return runnable_kernels(Context::cuda(0));
  } catch (const Error& error) {
    std::cout << error.what() << '\n';
    return {};
  }
#else
  return runnable_kernels();
#endif
}

/// An emulated GPU takes a third of a second a case or more: few of them, or all where the environment asks for it.
size_t every() {
#ifdef FOLIO_EMULATED_GPU
  return std::getenv("FOLIO_WHOLE_EMULATION") == nullptr ? FOLIO_EMULATED_EVERY : 1;
#else
  return folio::testing::kInstrumented ? 8 : 1;
#endif
}

/// The case being run, so that a crash at a guard page can say which it was.
char current_case[2048] = "none";

void report_crash(int signal) {
  constexpr char kBefore[] = "\ncrashed in the conformance case: ";
  static_cast<void>(!write(STDERR_FILENO, kBefore, sizeof(kBefore) - 1));
  static_cast<void>(!write(STDERR_FILENO, current_case, std::strlen(current_case)));
  static_cast<void>(!write(STDERR_FILENO, "\n", 1));
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

/// Runs every kShards-th case (or fewer, see every) from `shard` on; reports the first few that fail.
void run_shard(const std::vector<ConformanceCase>& cases, size_t shard) {
  struct sigaction action {};
  action.sa_handler = report_crash;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  int failures = 0;
  double worst = 0.0;
  for (size_t i = shard; i < cases.size(); i += every() * kShards) {
    const std::string text = to_string(cases[i]);
    std::strncpy(current_case, text.c_str(), sizeof(current_case) - 1);
    const CaseReport report = run_case(cases[i]);
    worst = std::max(worst, report.worst_share);
    if (report.passed) continue;
    ADD_FAILURE() << report.failure << "\n  reproduce: folio verify --case \"" << text << "\"";
    if (++failures == 5) FAIL() << "more may fail; stopped after " << failures;
  }
  std::cout << "worst error: " << worst << " of what is allowed\n";
}

class Conformance : public ::testing::TestWithParam<size_t> {};

TEST_P(Conformance, CoveringArray) {
  const std::vector<std::string> tested = kernels();
  if (tested.empty()) GTEST_SKIP() << kNoKernel;
  static const CoveringArray array = covering_array(tested, kStrength);  // takes seconds; a part has several shards
  std::cout << array.cases.size() << " cases cover " << array.coverage.covered << " of " << array.coverage.valid
            << " valid " << kStrength << "-tuples (" << array.coverage.tuples << " with the impossible ones)\n";
  ASSERT_EQ(array.coverage.covered, array.coverage.valid);
  run_shard(array.cases, GetParam());
}

TEST_P(Conformance, RandomCases) {
  const std::vector<std::string> tested = kernels();
  if (tested.empty()) GTEST_SKIP() << kNoKernel;
  const std::vector<ConformanceCase> cases = random_cases(tested, kRandomCases, 20240601);
  ASSERT_EQ(static_cast<int64_t>(cases.size()), kRandomCases);
  run_shard(cases, GetParam());
}

// ctest gives tests of one name one set of labels: names differ by program.
#if defined(FOLIO_EMULATED_GPU)
constexpr const char* kProgram = FOLIO_EMULATED_GPU;
#elif defined(FOLIO_CUDA_CONFORMANCE)
constexpr const char* kProgram = "cuda";
#elif defined(FOLIO_EMULATED_CONFORMANCE)
constexpr const char* kProgram = "amx_emulated";
#elif defined(FOLIO_QUICK_CONFORMANCE)
constexpr const char* kProgram = "quick";
#else
constexpr const char* kProgram = "whole";
#endif

INSTANTIATE_TEST_SUITE_P(Shard, Conformance, ::testing::Range<size_t>(0, kShards), [](const auto& shard) {
  return std::string(kProgram).append("_").append(std::to_string(shard.param));
});

#if defined(FOLIO_QUICK_CONFORMANCE) && !defined(FOLIO_CUDA_CONFORMANCE) && !defined(FOLIO_EMULATED_CONFORMANCE)
/// ctest runs this program once for each instruction set too, with newer ones hidden.
TEST(MaxCpuIsa, NewerKernelsAreNeitherRunnableNorChosen) {
  const char* const isa = std::getenv("FOLIO_MAX_CPU_ISA");
  if (isa == nullptr) GTEST_SKIP() << "FOLIO_MAX_CPU_ISA is not set";
  const std::map<std::string, std::vector<std::string>> newest_first = {
      {"amx", {"amx"}},           {"avx512_bf16", {"avx512-bf16"}}, {"avx512", {"avx512", "generic-v4"}},
      {"bf16", {"generic-bf16"}}, {"avx2", {"avx2", "generic-v3"}}, {"generic", {"generic"}}};
  std::vector<std::string> allowed;
  bool reached = false;
  for (const std::string set : {"amx", "avx512_bf16", "avx512", "bf16", "avx2", "generic"}) {
    reached = reached || set == isa;
    const std::vector<std::string>& its = newest_first.at(set);
    if (reached) allowed.insert(allowed.end(), its.begin(), its.end());
  }
  EXPECT_THAT(runnable_kernels(), ::testing::IsSubsetOf(allowed));
  AttentionConfig config;
  config.num_q_heads = config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = 64;
  config.page_size = 32;
  config.q = config.kv = DType::kBFloat16;
  EXPECT_THAT(prepare(Context::cpu(), config).kernel_name(), ::testing::AnyOfArray(allowed));
}
#endif

#ifndef FOLIO_CUDA_CONFORMANCE
TEST(Refusals, EveryBadCallIsRefusedAndWritesNothing) {
  for (const std::string& kernel : runnable_kernels()) {
    for (const std::string& failure : check_refusals(kernel)) ADD_FAILURE() << kernel << ": " << failure;
  }
}
#endif

}  // namespace
}  // namespace folio::verify
