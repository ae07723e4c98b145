// The program as a user meets it: exit codes, what goes to which stream, interruption.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::string kTraces = FOLIO_EXAMPLE_TRACES;

struct Outcome {
  int code = -1;  ///< exit code, or 1000 + the signal that ended it
  std::string out, err;
};

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// A run of the program with its streams in files: pipes' usual case, not a terminal.
class Process {
 public:
  /// `other_out`: where standard output goes instead of a file; `most_memory`: bytes of address space, 0 = no limit;
  /// `launcher`: what starts the program, found in PATH.
  explicit Process(std::vector<std::string> arguments, const std::string& input = "/dev/null",
                   const std::string& other_out = {}, size_t most_memory = 0,
                   const std::vector<std::string>& launcher = {}) {
    static int count = 0;
    base_ = ::testing::TempDir() + "folio_cli_" + std::to_string(getpid()) + "_" + std::to_string(count++);
    arguments.insert(arguments.begin(), FOLIO_PROGRAM);
    arguments.insert(arguments.begin(), launcher.begin(), launcher.end());
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const std::string out = other_out.empty() ? base_ + ".out" : other_out;
    const std::string err = base_ + ".err";
    pid_ = fork();
    if (pid_ == 0) {
      dup2(open(input.c_str(), O_RDONLY), STDIN_FILENO);
      dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
      dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
      const rlimit memory = {most_memory, most_memory};
      if (most_memory > 0) setrlimit(RLIMIT_AS, &memory);
      execvp(argv[0], argv.data());
      _exit(127);
    }
  }

  void interrupt() const { kill(pid_, SIGINT); }

  Outcome wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    Outcome outcome;
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    outcome.out = read_file(base_ + ".out");
    outcome.err = read_file(base_ + ".err");
    std::filesystem::remove(base_ + ".out");
    std::filesystem::remove(base_ + ".err");
    return outcome;
  }

 private:
  std::string base_;
  pid_t pid_ = -1;
};

Outcome folio(std::vector<std::string> arguments) {
  return Process(std::move(arguments)).wait();
}

/// A replay that takes a fraction of a second, with more options.
std::vector<std::string> small_replay(std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"replay",         kTraces + "/mooncake_excerpt.jsonl",
                                        "--num-q-heads",  "2",
                                        "--num-kv-heads", "1",
                                        "--head-dim",     "16",
                                        "--requests",     "8",
                                        "--threads",      "2"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// What ends with exit code 2, and part of what it says.
struct Misuse {
  std::vector<std::string> arguments;
  std::string says;
};

TEST(Cli, HelpAndVersion) {
  for (const char* subcommand : {"replay", "report", "info", "bench", "verify", "man", "completion"}) {
    const Outcome help = folio({subcommand, "--help"});
    EXPECT_EQ(help.code, 0);
    EXPECT_THAT(help.out, HasSubstr("Usage: "));
    EXPECT_THAT(help.err, IsEmpty());
  }
  EXPECT_EQ(folio({"--help"}).code, 0);
  EXPECT_THAT(folio({"--version"}).out, HasSubstr("folio "));
}

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

TEST(Cli, ManualPagesAndCompletions) {
  const Outcome man = folio({"man", "replay"});
  EXPECT_EQ(man.code, 0) << man.err;
  EXPECT_THAT(man.out, AllOf(HasSubstr(".TH \"FOLIO\\-REPLAY\" 1"), HasSubstr("\\fB\\-\\-clock\\fR"),
                             HasSubstr("\\fBmeasured\\fR"), HasSubstr("The default is \\fB32\\fR.")));
  EXPECT_THAT(folio({"man"}).out, HasSubstr("folio\\-bench"));
  const Outcome unknown = folio({"man", "dance"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("no subcommand is called 'dance'; there are replay, "));
  for (const char* shell : {"bash", "zsh", "fish"})
    EXPECT_THAT(folio({"completion", shell}).out, HasSubstr("measured"));
  EXPECT_EQ(folio({"completion", "cmd"}).code, 2);
}

/// A file in the temporary folder, removed at the end.
class Scratch {
 public:
  explicit Scratch(const std::string& name, const std::string& text = {})
      : path_(::testing::TempDir() + "folio_cli_" + std::to_string(getpid()) + "_" + name) {
    if (!text.empty()) std::ofstream(path_) << text;
  }
  ~Scratch() { std::filesystem::remove(path_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Cli, ReportIsOneWholePage) {
  const Scratch replay("a.json"), bench("b.json"), ranks("c.json"), page("page.html");
  ASSERT_EQ(folio(small_replay({"--json", replay.path(), "-q"})).code, 0);
  const auto measure = [](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"bench",    "--model", "tiny",     "--batch", "2",        "--kv-len", "64",
                                          "--kernel", "generic", "--rounds", "1",       "--min-ms", "0.1",      "-q"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return folio(arguments).code;
  };
  ASSERT_EQ(measure({"--q-len", "16", "--json", bench.path()}), 0);
  ASSERT_EQ(measure({"--sweep", "decode", "--ranks", "1,2", "--simulate", "--json", ranks.path()}), 0);
  const Outcome outcome =
      folio({"report", replay.path(), bench.path(), ranks.path(), "-o", page.path(), "--title", "a </script> title"});
  if (!FOLIO_HAS_VEGA) {
    EXPECT_EQ(outcome.code, 2);
    EXPECT_THAT(outcome.err, HasSubstr("no Vega-Lite"));
    EXPECT_FALSE(std::filesystem::exists(page.path()));
    return;
  }
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("3 files"));
  const std::string text = read_file(page.path());
  EXPECT_THAT(text, AllOf(HasSubstr("window.vegaEmbed="), HasSubstr("default-src 'none'"), HasSubstr("BSD-3-Clause"),
                          HasSubstr("a \\u003c/script> title"), Not(HasSubstr("{{"))));
  for (const char* loads : {"<link", "<img", " src=\"", "@import", "url(http"})
    EXPECT_EQ(text.substr(0, text.find("<script type=\"module\">")).find(loads), std::string::npos) << loads;
}

TEST(Cli, ReportRefusesWhatItCannotDraw) {
  const Scratch text("text.json", "not json"), other("other.json", R"({"tea": 1})"),
      old("old.json", R"({"attention": {}, "steps": {"count": 3}})"),
      ranks("ranks.json", R"({"device": "cpu", "rounds": 1, "simulated": 1, "cases": []})"),
      links("links.json",
            R"({"device": "cpu", "rounds": 1, "simulated": true, "cases": [)"
            R"({"kernel": "generic", "ranks": 2, "batch": 1, "q_len": 1, "kv_len": 8,)"
            R"( "one_rank_s": {"median": 2, "min": 2, "max": 2}, "layer_s": {"median": 1, "min": 1, "max": 1},)"
            R"( "efficiency": {"median": 1, "min": 1, "max": 1}, "rank_s": {"median": 1}}]})"),
      peers("peers.json", R"({"device": "cpu", "threads": 1, "results": [{"row": "a", "us": {"folio": [1, "x"]}}]})"),
      said("said.json",
           R"({"device": "cpu", "threads": 1, "results": [{"row": "a", "us": {"folio": [1]}, "said": {}}]})"),
      page("refused.html");
  const std::vector<Misuse> misuses = {
      {{"report"}, "files is required"},
      {{"report", text.path()}, "--output is required"},
      {{"report", "/nonexistent.json", "-o", page.path()}, "/nonexistent.json: cannot be opened"},
      {{"report", text.path(), "-o", page.path()}, "text.json: no JSON"},
      {{"report", other.path(), "-o", page.path()}, "other.json: neither of folio replay --json"},
      {{"report", old.path(), "-o", page.path()}, "old.json: latency is missing: the file is of an older folio replay"},
      {{"report", ranks.path(), "-o", page.path()}, "ranks.json: simulated is neither true nor false"},
      {{"report", links.path(), "-o", page.path()}, "links.json: cases[0].link_s is missing"},
      {{"report", peers.path(), "-o", page.path()}, "results[0].us.folio holds what is no number"},
      {{"report", said.path(), "-o", page.path()}, "results[0].said.folio is missing"},
      {{"report", text.path(), "-o", text.path()}, "is read and written"},
  };
  for (const Misuse& misuse : misuses) {
    const Outcome outcome = folio(misuse.arguments);
    EXPECT_EQ(outcome.code, 2) << ::testing::PrintToString(misuse.arguments);
    EXPECT_THAT(outcome.err, HasSubstr(misuse.says)) << ::testing::PrintToString(misuse.arguments);
  }
  EXPECT_FALSE(std::filesystem::exists(page.path()));
  EXPECT_EQ(read_file(text.path()), "not json");
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

TEST(Cli, MisuseExitsWithTwoAndSaysWhatToDo) {
  const std::string bad_trace = ::testing::TempDir() + "folio_cli_bad.jsonl";
  std::ofstream(bad_trace) << R"({"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]})"
                           << "\n{\"timest";
  const std::string trace = kTraces + "/mooncake_excerpt.jsonl";
  const std::vector<Misuse> misuses = {
      {{}, "subcommand is required"},
      {{"dance"}, "subcommand is required"},
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
      {{"info", "--soft-cap", "-5"}, "--soft-cap is -5"},
      {{"info", "--decode-tokens", "-5"}, "mix.decode_tokens is -5; it is 0 or a positive number"},
      {{"info", "--prefill-tokens", "nan"}, "mix.prefill_tokens is nan"},
      {{"replay", trace, "--scale", "0"}, "not in range 1 to 16777216"},
      {{"replay", trace, "--requests", "99999999999999999999"}, "not in range 0 to 2147483647"},
      {{"replay", trace, "--pool-mb", "9223372036854775807"}, "not in range 1 to 1073741824"},
      {{"replay", trace, "--pool-pages", "4294967297"}, "not in range 1 to 2147483647"},
      {{"replay", trace, "--page-size", "1048576"}, "a page of 1048576 tokens takes 8192.0 MiB over 2 layers"},
      {{"bench", "--min-ms", "nan"}, "--min-ms is nan"},
      {{"bench", "--ranks", "2"}, "--ranks without --simulate takes GPUs"},
      {{"bench", "--dcp-comm", "a2a"}, "--dcp-comm requires --ranks"},
      {{"bench", "--partial-dtype", "bf16"}, "--partial-dtype requires --ranks"},
      {{"bench", "--ranks", "2", "--simulate", "--partial-dtype", "fp16"}, "partial_dtype is float16 and out bfloat16"},
      {{"bench", "--ranks", "2", "--simulate", "--pcp", "--partial-dtype", "bf16"},
       "--partial-dtype is for ranks that"},
      {{"bench", "--ranks", "2", "--simulate", "--graph"}, "--graph is for --device cuda"},
      {{"bench", "--simulate"}, "--simulate and --pcp without --ranks"},
      {{"bench", "--ranks", "2", "--simulate", "--node-link", "450"}, "--node-link is '450'"},
      {{"bench", "--ranks", "3", "--simulate"}, "32 query heads over 3 ranks and 8 KV heads"},
      {{"verify", "--case", "kernel=nosuch"}, "nosuch"},
      {{"verify", "--case", "kernel=generic mask=purple"}, "purple"},
      {{"verify", "--kernel", "nosuch"}, "here run"},
      {{"bench", "--kv-len", "4", "--q-len", "8", "--sweep", "prefill"}, "nothing to measure"},
  };
  for (const Misuse& misuse : misuses) {
    const Outcome outcome = folio(misuse.arguments);
    EXPECT_EQ(outcome.code, 2) << ::testing::PrintToString(misuse.arguments);
    EXPECT_THAT(outcome.err, HasSubstr(misuse.says)) << ::testing::PrintToString(misuse.arguments);
  }
  std::filesystem::remove(bad_trace);
}

/// Sanitizers' shadows need more address space than a limit leaves.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kLittleMemory = 0;
#else
constexpr size_t kLittleMemory = size_t{256} << 20;
#endif

TEST(Cli, OutputFiles_OpenedBeforeTheRun_CostNoWork) {
  const std::string timeline = ::testing::TempDir() + "folio_cli_" + std::to_string(getpid()) + ".timeline";
  for (const char* option : {"--json", "--dump-samples"}) {
    const Outcome outcome = folio(small_replay({option, "/nonexistent/x", "--timeline", timeline}));
    EXPECT_EQ(outcome.code, 2) << option;
    EXPECT_THAT(outcome.err, HasSubstr("/nonexistent/x: cannot be written")) << option;
    EXPECT_FALSE(std::filesystem::exists(timeline)) << option;  // no step was recorded
    std::filesystem::remove(timeline);
  }
  const Outcome bench = folio({"bench", "--json", "/nonexistent/x"});
  EXPECT_EQ(bench.code, 2);
  EXPECT_THAT(bench.out, IsEmpty());  // no table was begun
}

TEST(Cli, OutputFile_OfARunThatIsRefused_KeepsWhatItHeld) {
  const std::string path = ::testing::TempDir() + "folio_cli_" + std::to_string(getpid()) + ".json";
  std::ofstream(path) << "an older result";
  EXPECT_EQ(folio(small_replay({"--pool-pages", "5", "--json", path})).code, 2);
  EXPECT_EQ(read_file(path), "an older result");
  EXPECT_EQ(folio(small_replay({"--json", path})).code, 0);
  EXPECT_TRUE(nlohmann::json::accept(read_file(path)));
  std::filesystem::remove(path);
}

TEST(Cli, FullDisk_UnderAnyOutput_ExitsWithTwoAfterTheRest) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  for (const char* option : {"--json", "--dump-samples", "--timeline"}) {
    const Outcome outcome = folio(small_replay({"--check-rate", "1", option, "/dev/full"}));
    EXPECT_EQ(outcome.code, 2) << option;
    EXPECT_THAT(outcome.err, HasSubstr("/dev/full: cannot be written")) << option;
  }
  EXPECT_THAT(folio(small_replay({"--timeline", "/dev/full"})).out, HasSubstr("replay finished"));
  for (const std::vector<std::string>& arguments : {small_replay(), {"info"}, {"--help"}, {"verify", "--list"}}) {
    const Outcome outcome = Process(arguments, "/dev/null", "/dev/full").wait();
    EXPECT_EQ(outcome.code, 2) << arguments[0];
    EXPECT_THAT(outcome.err, HasSubstr("standard output: cannot be written")) << arguments[0];
  }
}

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

TEST(Cli, InfoExplains) {
  const Outcome outcome = folio({"info", "--explain", "--model", "llama3-8b"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("cpu"), HasSubstr("takes it")));
  const nlohmann::json json = nlohmann::json::parse(folio({"info", "--json", "-"}).out);
  EXPECT_FALSE(json["kernels"].empty());
  EXPECT_FALSE(json["kernel"].get<std::string>().empty());
}

TEST(Cli, InfoListsModels) {
  const Outcome outcome = folio({"info", "--models", "--json", "-"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("gpt-oss-120b"), HasSubstr("moonshotai/Kimi-K2-Instruct")));
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_GT(json.size(), 20u);
  EXPECT_EQ(json[0]["name"], "llama3-8b");
}

TEST(Cli, ModelsOfMlaKeepValuesInsideKeys) {
  const auto pool_of = [](std::vector<std::string> more) {
    std::vector<std::string> arguments = {
        "bench",    "--model", "kimi-k2-decode", "--sweep", "decode", "--batch", "1", "--kv-len", "64",
        "--rounds", "1",       "--min-ms",       "0.1",     "--json", "-",       "-q"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome outcome = folio(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out)["cases"][0]["kv_bytes"].get<double>();
  };
  EXPECT_EQ(pool_of({}), 64.0 * 576 * 2);
  EXPECT_EQ(pool_of({"--head-dim", "576", "--head-dim-v", "512"}), 64.0 * (576 + 512) * 2) << "heads given by number";
}

TEST(Cli, InfoRanksForAMix) {
  const Outcome outcome = folio({"info", "--decode-tokens", "3", "--prefill-tokens", "0.5"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("3 decode and 0.5 prefill tokens"));
  const nlohmann::json json = nlohmann::json::parse(folio({"info", "--decode-tokens", "3", "--json", "-"}).out);
  EXPECT_EQ(json["mix"]["decode_tokens"], 3.0);
  EXPECT_EQ(json["mix"]["prefill_tokens"], 0.0);
}

TEST(Cli, InfoTellsOfProductsOfFp8) {
  const Outcome outcome = folio({"info", "--allow-fp8-mma", "--q-dtype", "e4m3", "--kv-dtype", "e4m3", "--json", "-"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["fp8_mma"], false);  // no kernel of a CPU has them
}

TEST(Cli, BenchMeasuresBesideItsYardsticks) {
  const Outcome outcome = folio({"bench", "--model", "tiny", "--batch", "2", "--kv-len", "64", "--q-len", "16",
                                 "--kernel", "generic", "--rounds", "2", "--min-ms", "0.1", "--json", "-"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  ASSERT_EQ(json["cases"].size(), 2u);
  for (const nlohmann::json& row : json["cases"]) {
    EXPECT_GT(row["run_s"]["median"].get<double>(), 0.0);
    EXPECT_GT(row["yardstick_read_bytes_per_s"]["min"].get<double>(), 0.0);
    EXPECT_GT(row["yardstick_multiply_flop_per_s"]["min"].get<double>(), 0.0);
    EXPECT_EQ(row["yardstick_matrix_flop_per_s"]["max"].get<double>(), 0.0) << "the kernel has no tile registers";
  }
  // 2 requests x 1 KV head pair: 64 keys x 2 heads x (64 + 64) x 2 bytes each.
  EXPECT_EQ(json["cases"][0]["kv_bytes"].get<double>(), 2.0 * 64 * 2 * 128 * 2);
}

/// A layer of 2 requests: what rank 0 sends to the 3 others, and what links take for it.
TEST(Cli, BenchSimulatesRanks) {
  const Outcome outcome = folio({"bench",
                                 "--sweep",
                                 "decode",
                                 "--num-q-heads",
                                 "8",
                                 "--num-kv-heads",
                                 "2",
                                 "--head-dim",
                                 "64",
                                 "--batch",
                                 "2",
                                 "--kv-len",
                                 "256",
                                 "--ranks",
                                 "1,4",
                                 "--simulate",
                                 "--ranks-per-node",
                                 "4",
                                 "--node-link",
                                 "1:10",
                                 "--rounds",
                                 "2",
                                 "--min-ms",
                                 "0.1",
                                 "--json",
                                 "-"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json cases = nlohmann::json::parse(outcome.out)["cases"];
  ASSERT_EQ(cases.size(), 2u);
  EXPECT_EQ(cases[0]["operations"], 0) << "one rank";
  EXPECT_EQ(cases[0]["link_s"], 0.0);
  const nlohmann::json& four = cases[1];
  EXPECT_EQ(four["operations"], 3) << "queries, LSEs, outputs";
  // Of 2 tokens: 2 own heads of 64 bfloat16 behind a header, 8 LSEs, the outputs of 2 heads in float32.
  const double queries = 256 + 512, lses = 2 * 8 * 4, outputs = 2 * 2 * 64 * 4;
  EXPECT_EQ(four["bytes_sent"].get<double>(), 3 * (queries + lses + outputs));
  EXPECT_DOUBLE_EQ(four["link_s"].get<double>(), 3 * 10e-6 + four["bytes_sent"].get<double>() / 1e9);
  EXPECT_GT(four["rank_s"]["min"].get<double>(), 0.0);
  EXPECT_GT(four["layer_s"]["median"].get<double>(), four["rank_s"]["median"].get<double>());
}

TEST(Cli, BenchSimulatesSixteenBitPartialResults) {
  for (const char* const combine : {"ag_rs", "a2a"}) {
    const Outcome outcome = folio({"bench",
                                   "--sweep",
                                   "decode",
                                   "--num-q-heads",
                                   "8",
                                   "--num-kv-heads",
                                   "2",
                                   "--head-dim",
                                   "64",
                                   "--batch",
                                   "2",
                                   "--kv-len",
                                   "256",
                                   "--ranks",
                                   "4",
                                   "--simulate",
                                   "--partial-dtype",
                                   "bf16",
                                   "--dcp-comm",
                                   combine,
                                   "--rounds",
                                   "1",
                                   "--min-ms",
                                   "0.1",
                                   "--json",
                                   "-"});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const nlohmann::json json = nlohmann::json::parse(outcome.out);
    EXPECT_EQ(json["partial_dtype"], "bfloat16");
    EXPECT_EQ(json["cases"][0]["operations"], 2) << "queries, rows with their LSEs";
    const double queries = 256 + 512, rows = 2 * 2 * (64 * 2 + 4);
    EXPECT_EQ(json["cases"][0]["bytes_sent"].get<double>(), 3 * (queries + rows)) << combine;
  }
}

/// 64 new tokens on 4 ranks: each sends its 16 tokens' keys and values to the 3 others, and its queries or its shard.
TEST(Cli, BenchSimulatesRanksThatDivideTheQueries) {
  const auto sent = [](const std::string& exchange) {
    const Outcome outcome =
        folio({"bench", "--sweep",        "prefill", "--num-q-heads", "8",   "--num-kv-heads", "2", "--head-dim",
               "64",    "--q-len",        "64",      "--kv-len",      "320", "--ranks",        "4", "--simulate",
               "--pcp", "--pcp-exchange", exchange,  "--page-size",   "16",  "--rounds",       "1", "--min-ms",
               "0.1",   "--json",         "-"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const nlohmann::json row = nlohmann::json::parse(outcome.out)["cases"][0];
    EXPECT_EQ(row["operations"], exchange == "pass_q" ? 3 : 2);
    return row["bytes_sent"].get<double>();
  };
  const double queries = 16 * 8 * (64 * 2 + 4 * (64 + 4)), shard = 64 * 2 * 128 * 2;
  EXPECT_EQ(sent("pass_q") - sent("pass_kv"), 3 * (queries - shard));
}

/// Without a GPU every command says so; with one, every backend's replay is as right as on the CPU.
TEST(Cli, TheGpuServesReplaysOrIsMissed) {
  const auto replay = [](const std::string& backend) {
    return folio({"replay", kTraces + "/mooncake_excerpt.jsonl", "--num-q-heads", "2", "--num-kv-heads", "1",
                  "--head-dim", "16", "--requests", "8", "--check-rate", "1", "--device", "cuda", "--backend",
                  backend});
  };
  const Outcome info = folio({"info", "--device", "cuda", "--json", "-"});
  if (info.code != 0) {
    for (const Outcome& outcome : {info, folio({"bench", "--device", "cuda"}), replay("flashinfer")}) {
      EXPECT_EQ(outcome.code, 2);
      EXPECT_THAT(outcome.err, HasSubstr("CUDA device 0"));
    }
    return;
  }
  EXPECT_EQ(nlohmann::json::parse(info.out)["device"], "cuda");
  for (const char* backend : {"none", "flashinfer", "flash_attn", "token_pool"}) {
    const Outcome outcome = replay(backend);
    EXPECT_EQ(outcome.code, 0) << backend << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("SMs"), HasSubstr(" 0 leaked"))) << backend;
  }
}

TEST(Cli, VerifyRunsCases) {
  const Outcome list = folio({"verify", "--list"});
  EXPECT_EQ(list.code, 0);
  EXPECT_THAT(list.out, HasSubstr("dtypes"));
  const Outcome one = folio({"verify", "--case", "seed=3", "--json", "-"});
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(nlohmann::json::parse(one.out)["cases"], 1);
}

}  // namespace
