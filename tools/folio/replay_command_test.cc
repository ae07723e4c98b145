// `folio replay`: its summary, its files, its checks, interruption.
#include <chrono>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "cli_test_util.hpp"

namespace cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(Cli, ReplaySummarises) {
  const Outcome outcome = folio(small_replay());
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("replay finished"), HasSubstr("8 of 8 finished"), HasSubstr(" 0 leaked"),
                                 HasSubstr(" 0 wrong")));
  EXPECT_THAT(outcome.err, AllOf(Not(HasSubstr("\r")), Not(HasSubstr("\x1b"))));  // plain lines where nobody watches
}

TEST(Cli, ReplayReadsTheAzureTrace) {
  const Outcome outcome = folio({"replay", kTraces + "/azure_excerpt.csv", "--model", "tiny", "--layers", "1",
                                 "--requests", "20", "--json", "-"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json["requests"]["finished"], 20);
  EXPECT_EQ(json["tokens"]["prefix_hits"], 0);
}

TEST(Cli, JsonOnStandardOutputIsAlone) {
  const Outcome outcome = folio(small_replay({"--json", "-"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json["pages"]["leaked"], 0);
  EXPECT_EQ(json["checks"]["failures"], 0);
  EXPECT_THAT(outcome.err, HasSubstr("replay finished"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(json["memory"]["other_bytes"].get<int64_t>(), int64_t{64} << 20);
#endif
}

TEST(Cli, ReplayTellsLatencies) {
  const Outcome outcome = folio({"replay", kTraces + "/azure_excerpt.csv", "--model", "tiny", "--layers", "0",
                                 "--requests", "8", "--clock", "measured", "--request-rate", "50", "--json", "-"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("TTFT"), HasSubstr("TBT"), HasSubstr("TPOT"), HasSubstr("E2E")));
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json["checks"]["digested_rows"].get<int64_t>(), 2 * json["tokens"]["generated"].get<int64_t>())
      << "all layers of the model";
  const nlohmann::json& latency = json["latency"];
  EXPECT_EQ(latency["clock"], "measured");
  EXPECT_EQ(latency["ttft_s"]["count"], 8);
  EXPECT_GT(latency["ttft_s"]["p50"].get<double>(), 0.0);
  EXPECT_LE(latency["ttft_s"]["p50"], latency["e2e_s"]["p99"]);
  EXPECT_EQ(latency["tbt_s"]["quantiles"].size(), 101u);
  const nlohmann::json& series = json["series"];
  for (const char* column : {"step", "start_s", "duration_s", "decoding", "prefilling", "query_tokens", "kv_tokens",
                             "pages_held", "prefix_hits", "plan_s", "run_s"}) {
    EXPECT_EQ(series[column].size(), json["steps"]["count"].get<size_t>()) << column;
  }
}

TEST(Cli, LogsAreForThoseWhoAsk) {
  const Outcome silent = folio(small_replay({"-q"}));
  EXPECT_THAT(silent.err, IsEmpty());
  const Outcome info = folio(small_replay({"-q", "--log", "info"}));
  EXPECT_THAT(info.err, AllOf(HasSubstr("folio: context: CPU, 2 threads"), HasSubstr("folio: prepare: kernel "),
                              Not(HasSubstr("folio: plan: "))));
  const Outcome debug = folio(small_replay({"-q", "--log", "debug"}));
  EXPECT_THAT(debug.err, AllOf(HasSubstr("folio: plan: "), HasSubstr(" work tiles")));
}

TEST(Cli, CascadesAreCountedWithoutAttention) {
  const auto counted = [](const char* mode, const char* backend = "none") {
    const Outcome outcome = folio(
        {"replay", kTraces + "/mooncake_excerpt.jsonl", "--plan-only", "--scale", "1", "--requests", "40", "--layers",
         "1", "--unlimited-pool", "--cascade", mode, "--backend", backend, "--kv-format", "strided-nhd", "--json", "-",
         "-q"});  // the format that backends take: others have kernels, and so tiles, of their own
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out);
  };
  const nlohmann::json json = counted("auto");
  EXPECT_LT(json["cascade"]["kv_bytes_read"], json["cascade"]["kv_bytes_read_without"]);
  EXPECT_EQ(json["cascade"]["kv_bytes_read_without"], counted("off")["work"]["kv_bytes_read"]);
  for (const char* backend : {"flashinfer", "flash_attn"}) {
    EXPECT_EQ(counted("auto", backend)["cascade"], json["cascade"]) << backend;
  }
  const Outcome unknown = folio(small_replay({"--cascade", "on"}));
  EXPECT_NE(unknown.code, 0);
  EXPECT_THAT(unknown.err, HasSubstr("--cascade"));
}

TEST(Cli, CascadesOfBackends) {
  for (const char* backend : {"flashinfer", "flash_attn"}) {
    const Outcome outcome = folio(small_replay({"--cascade", "auto", "--backend", backend}));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("auto: "));
    const Outcome divided = folio(small_replay({"--cascade", "heuristic", "--backend", backend, "--ranks", "2"}));
    EXPECT_NE(divided.code, 0);
    EXPECT_THAT(divided.err, HasSubstr("--cascade heuristic is for --ranks 1"));
  }
}

/// A replay over a divided cache, whose bits depend on neither threads nor processes.
std::vector<std::string> divided_replay(const std::string& ranks, const std::string& scale) {
  return {"replay",
          kTraces + "/mooncake_excerpt.jsonl",
          "--scale",
          scale,
          "--layers",
          "1",
          "--backend",
          "flash_attn",
          "--json",
          "-",
          "--quiet",
          "--num-q-heads",
          "4",
          "--num-kv-heads",
          "1",
          "--head-dim",
          "16",
          "--requests",
          "1",
          "--threads",
          "2",
          "--pool-mb",
          "64",
          "--check-rate",
          "0.001",
          "--determinism",
          "schedule-invariant",
          "--ranks",
          ranks};
}

/// Tokens of the trace's first request, as the file has them.
TEST(Cli, RanksReplayWholeLengths) {
  for (const std::string ranks : {"1", "2"}) {
    const Outcome outcome = folio(divided_replay(ranks, "1"));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const nlohmann::json json = nlohmann::json::parse(outcome.out);
    EXPECT_EQ(json["attention"]["ranks"], std::stoi(ranks));
    EXPECT_EQ(json["tokens"]["prompt"], 6758);
    EXPECT_EQ(json["tokens"]["generated"], 500);
    EXPECT_GT(json["checks"]["rows"], 1);
  }
}

#if defined(FOLIO_MPIRUN)
TEST(Cli, RanksAreProcessesUnderMpirun) {
  const auto over_mpi = [](const std::vector<std::string>& arguments) {
    std::istringstream words(FOLIO_MPIRUN);
    const std::vector<std::string> launcher{std::istream_iterator<std::string>(words), {}};
    return Process(arguments, "/dev/null", {}, 0, launcher).wait();
  };
  const Outcome processes = over_mpi(divided_replay("2", "32"));
  ASSERT_EQ(processes.code, 0) << processes.err;
  const nlohmann::json theirs = nlohmann::json::parse(processes.out);  // one process prints
  const nlohmann::json threads = nlohmann::json::parse(folio(divided_replay("2", "32")).out);
  EXPECT_EQ(theirs["checks"]["digest"], threads["checks"]["digest"]);
  EXPECT_THAT(over_mpi(small_replay()).err, HasSubstr("mpirun started several processes; give --ranks"));
  EXPECT_THAT(over_mpi(divided_replay("4", "32")).err, HasSubstr("2 processes were started; --ranks 4 needs as many"));
}
#endif

TEST(Cli, QuietIsQuiet) {
  const Outcome outcome = folio(small_replay({"--quiet"}));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.out, IsEmpty());
  EXPECT_THAT(outcome.err, IsEmpty());
}

TEST(Cli, TraceFromStandardInput) {
  Process run({"replay", "-", "--count-prefix-hits", "--scale", "1"}, kTraces + "/mooncake_excerpt.jsonl");
  const Outcome outcome = run.wait();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json expected = nlohmann::json::parse(read_file(kTraces + "/expected_hits.json"));
  EXPECT_THAT(outcome.out, HasSubstr(expected["blocks"]["full_blocks"].dump()));
  EXPECT_THAT(outcome.out, HasSubstr(expected["blocks"]["with_partial"].dump()));
}

TEST(Cli, ReplayServesTreesOfDrafts) {
  const Outcome outcome = folio(small_replay(
      {"--backend", "token_pool", "--page-size", "1", "--draft-tokens", "7", "--draft-topk", "2", "--json", "-"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("tokens a step and request"));
  const nlohmann::json summary = nlohmann::json::parse(outcome.out);
  EXPECT_GT(summary["drafts"]["tokens_per_step"].get<double>(), 1.0);
  EXPECT_EQ(summary["pages"]["leaked"], 0);
}

TEST(Cli, ReplaySaysWhatWindowedLayersGaveUp) {
  const Outcome outcome =
      folio(small_replay({"--backend", "token_pool", "--page-size", "4", "--window", "7", "--no-prefix-reuse",
                          "--window-pages", "100", "--token-budget", "64", "--json", "-"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("100 pages of layers with the window"));
  const nlohmann::json window = nlohmann::json::parse(outcome.out)["window_pages"];
  EXPECT_GT(window["tokens_given_up"], 0);
  EXPECT_LE(window["peak_held"], 100);
}

TEST(Cli, DigestsAgreeOverSchedules) {
  const auto digest = [](std::vector<std::string> more) {
    // The format that backends take: where the one without a backend is another, so is the kernel.
    more.insert(more.end(), {"--determinism", "schedule-invariant", "--kv-format", "strided-nhd", "--json", "-", "-q"});
    const Outcome outcome = folio(small_replay(more));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out)["checks"]["digest"].get<std::string>();
  };
  const std::string usual = digest({});
  EXPECT_EQ(digest({"--no-prefix-reuse"}), usual);
  EXPECT_EQ(digest({"--pool-pages", "60", "--token-budget", "100"}), usual);
  EXPECT_EQ(digest({"--serial"}), usual);
  EXPECT_EQ(digest({"--backend", "token_pool", "--page-size", "1"}), usual);
  EXPECT_EQ(digest({"--backend", "token_pool", "--page-size", "4", "--pool-pages", "240", "--token-budget", "100"}),
            usual);
  EXPECT_EQ(digest({"--backend", "token_pool", "--draft-tokens", "4"}), usual);
  EXPECT_NE(digest({"--seed", "2"}), usual);
}

TEST(Cli, ReplayMisuseSaysWhatToDo) {
  const std::string bad_trace = ::testing::TempDir() + "folio_cli_bad.jsonl";
  std::ofstream(bad_trace) << R"({"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]})"
                           << "\n{\"timest";
  const std::string trace = kTraces + "/mooncake_excerpt.jsonl";
  expect_misuses({
      {{"replay"}, "trace is required"},
      {{"replay", "/nonexistent.jsonl"}, "/nonexistent.jsonl: cannot be opened"},
      {{"replay", bad_trace}, "folio_cli_bad.jsonl:2: "},
      {{"replay", trace, "--format", "azure"}, "not a header"},
      {{"replay", trace, "--scale", "3"}, "must divide 512"},
      {{"replay", trace, "--model", "gpt-99"}, "known are llama3-8b"},
      {{"replay", trace, "--kv-dtype", "int3"}, "none of"},
      {{"replay", trace, "--num-q-heads", "3"}, "multiple"},
      {{"replay", trace, "--head-dim", "20"}, "multiples of 8"},
      {{"replay", trace, "--pool-pages", "5"}, "--pool-pages"},
      {{"replay", trace, "--pool-pages", "500", "--pool-mb", "3"}, "--pool"},
      {{"replay", trace, "--kernel", "nosuch"}, "nosuch"},
      {{"replay", trace, "--check-rate", "2"}, "--check-rate"},
      {small_replay({"--draft-tokens", "4"}), "are for --backend token_pool"},
      {small_replay({"--backend", "token_pool", "--draft-tokens", "1"}), "--draft-tokens"},
      {small_replay({"--backend", "token_pool", "--draft-tokens", "4", "--draft-topk", "2"}), "is for --page-size 1"},
      {small_replay({"--backend", "token_pool", "--ranks", "2"}), "--ranks is for --backend flashinfer and flash_attn"},
      {small_replay({"--backend", "none", "--ranks", "2"}), "--ranks divides the KV of an engine backend's layers"},
      {small_replay({"--backend", "flash_attn", "--dcp-comm", "a2a"}), "--dcp-comm requires --ranks"},
      {small_replay({"--backend", "flash_attn", "--dcp-interleave", "2"}), "--dcp-interleave requires --ranks"},
      {small_replay({"--backend", "token_pool", "--window-pages", "9"}), "models with a sliding window"},
      {small_replay({"--backend", "flashinfer", "--kv-dtype", "int8"}), "the engine backends take no int8 caches"},
      {small_replay({"--q-dtype", "int8"}), "q is int8, which is a type of paged caches (kv) alone"},
      {small_replay({"--timeline", "/nonexistent/x"}), "/nonexistent/x: cannot be written"},
      {small_replay({"--json", "/nonexistent/x"}), "/nonexistent/x: cannot be written"},
      {small_replay({"--json", "x", "--timeline", "x"}), "--json and --timeline both write x"},
      {small_replay({"--clock", "sundial"}), "--clock"},
      {small_replay({"--clock", "measured", "--time-scale", "2"}), "--time-scale is for --clock wall, not measured"},
      {small_replay({"--clock", "measured", "--step-ms", "2"}), "--step-ms is for --clock fixed"},
      {small_replay({"--time-scale", "0"}), "must be above 0"},
      {small_replay({"--request-rate", "-1"}), "-1 requests a second"},
      {small_replay({"--request-rate", "5"}), "arrive at once"},
      {small_replay({"--soft-cap", "-5"}), "--soft-cap is -5"},
      {small_replay({"--soft-cap", "nan"}), "--soft-cap is nan"},
      {small_replay({"--soft-cap", "inf"}), "--soft-cap is inf"},
      {{"replay", trace, "--scale", "0"}, "not in range 1 to 16777216"},
      {{"replay", trace, "--requests", "99999999999999999999"}, "not in range 0 to 2147483647"},
      {{"replay", trace, "--pool-mb", "9223372036854775807"}, "not in range 1 to 1073741824"},
      {{"replay", trace, "--pool-pages", "4294967297"}, "not in range 1 to 2147483647"},
      {{"replay", trace, "--page-size", "1048576"}, "a page of 1048576 tokens takes 8192.0 MiB over 2 layers"},
  });
  std::filesystem::remove(bad_trace);
}

/// Sanitizers' shadows need more address space than a limit leaves.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kLittleMemory = 0;
#else
constexpr size_t kLittleMemory = size_t{256} << 20;
#endif

TEST(Cli, EndlessTrace_IsRefusedWithinBounds) {
  for (const char* path : {"/dev/zero", "-"}) {
    const Outcome outcome = Process({"replay", path}, "/dev/zero", {}, kLittleMemory).wait();
    EXPECT_EQ(outcome.code, 2) << path;
    EXPECT_THAT(outcome.err, HasSubstr("a line of more than 4 MiB")) << path;
  }
}

TEST(Cli, OutOfMemory_IsSaidInPlainWords) {
  if (kLittleMemory == 0) GTEST_SKIP() << "sanitizers need the address space";
  const std::string path = ::testing::TempDir() + "folio_cli_" + std::to_string(getpid()) + ".csv";
  std::ofstream file(path);
  file << "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  for (int i = 0; i < 4000000; ++i) file << "2023-11-16 18:15:46,1,1\n";
  file.close();
  const Outcome outcome = Process({"replay", path}, "/dev/null", {}, kLittleMemory).wait();
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("out of memory"), Not(HasSubstr("bad_alloc"))));
  std::filesystem::remove(path);
}

TEST(Cli, InterruptEndsWithTheSummarySoFar) {
  // The clock runs at a thousandth of real time: after the requests of the first moment the replay waits for the next
  // ones.
  const std::string timeline = ::testing::TempDir() + "folio_cli_" + std::to_string(getpid()) + ".timeline";
  Process run({"replay", kTraces + "/mooncake_excerpt.jsonl", "--model", "tiny", "--time-scale", "0.001", "--timeline",
               timeline});
  for (int i = 0; i < 1200 && (!std::filesystem::exists(timeline) || std::filesystem::file_size(timeline) == 0); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  run.interrupt();
  const Outcome outcome = run.wait();
  EXPECT_EQ(outcome.code, 130);
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("interrupted; so far"), HasSubstr("of 300 finished"), HasSubstr(" 0 leaked")));
  EXPECT_TRUE(nlohmann::json::accept(read_file(timeline)));
  std::filesystem::remove(timeline);
}

}  // namespace
}  // namespace cli
