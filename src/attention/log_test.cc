#include "folio/log.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/expect_refused_test_util.hpp"
#include "folio/attention.hpp"
#include "folio/context.hpp"

namespace folio {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Lines that the core logs while this lives.
class Listening {
 public:
  explicit Listening(LogLevel least) {
    set_log_callback([this](LogLevel level, std::string_view line) { lines_.emplace_back(level, line); }, least);
  }
  ~Listening() { set_log_callback({}); }
  std::vector<std::string> lines() const {
    std::vector<std::string> texts;
    for (const auto& [level, line] : lines_) texts.push_back(line);
    return texts;
  }
  std::vector<std::pair<LogLevel, std::string>> lines_;
};

AttentionConfig small_config() {
  AttentionConfig config;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = 64;
  config.q = config.kv = DType::kBFloat16;
  config.page_size = 16;
  return config;
}

Context two_threads() {
  ContextOptions options;
  options.num_threads = 2;
  return Context::cpu(options);
}

void plan_one(const AttentionOp& op) {
  PlanBuffer buffer = make_plan_buffer(op);
  const int32_t cu_q[] = {0, 1, 2}, kv_len[] = {5, 9};
  KvSegment segment;
  segment.kv_len = kv_len;
  BatchView batch;
  batch.num_requests = 2;
  batch.num_tokens = 2;
  batch.cu_q = cu_q;
  batch.segments = {&segment, 1};
  plan(op, batch, buffer);
}

TEST(Log, ContextAndPrepare_AreInfo) {
  const Listening listening(LogLevel::kInfo);
  const Context context = two_threads();
  PrepareOptions portable;
  portable.force_kernel = "generic";
  plan_one(prepare(context, small_config(), portable));
  EXPECT_THAT(listening.lines(), ElementsAre(StartsWith("context: CPU, 2 threads"),
                                             AllOf(StartsWith("prepare: kernel generic, 4 q heads, 2 KV heads"),
                                                   HasSubstr("kv bfloat16 strided, page size 16"))));
  for (const auto& [level, line] : listening.lines_) EXPECT_EQ(level, LogLevel::kInfo) << line;
}

TEST(Log, RefusalsAndPlans_AreDebug) {
  const Listening listening(LogLevel::kDebug);
  const Context context = two_threads();
  AttentionConfig config = small_config();
  config.features = Feature::kRopeLlama;  // the portable kernels alone
  plan_one(prepare(context, config));
  EXPECT_THAT(listening.lines(), ::testing::Contains(AllOf(StartsWith("prepare: "), HasSubstr(" refuses: "))));
  EXPECT_THAT(listening.lines().back(), StartsWith("plan: 2 requests, 2 tokens, "));
}

TEST(Log, NobodyListens_NothingIsSaid) {
  int lines = 0;
  const auto count = [&lines](LogLevel, std::string_view) { ++lines; };
  set_log_callback(count, LogLevel::kError);
  two_threads();
  EXPECT_EQ(lines, 0) << "below the level";
  set_log_callback(count);
  set_log_callback({});
  two_threads();
  EXPECT_EQ(lines, 0) << "the listener is gone";
}

TEST(Log, ACallbackMayCallTheLibrary) {
  int contexts = 0;
  set_log_callback([&contexts](LogLevel, std::string_view) {
    if (++contexts == 1) two_threads();
  });
  two_threads();
  set_log_callback({});
  EXPECT_EQ(contexts, 2);
}

TEST(Log, Refusals) {
  testing::expect_refused(
      "least is 7", [] { set_log_callback({}, static_cast<LogLevel>(7)); }, ErrorCode::kInvalidArgument);
}

#ifdef FOLIO_WITHOUT_CUDA
TEST(NvtxRanges, WithoutCuda_AreRefused) {
  set_nvtx_ranges(false);
  testing::expect_refused(
      "no NVTX", [] { set_nvtx_ranges(true); }, ErrorCode::kUnavailable);
}
#endif

}  // namespace
}  // namespace folio
