// The program as a whole, and its smaller commands.
#include <nlohmann/json.hpp>

#include "cli_test_util.hpp"

namespace cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

TEST(Cli, MisuseExitsWithTwoAndSaysWhatToDo) {
  expect_misuses({
      {{}, "subcommand is required"},
      {{"dance"}, "subcommand is required"},
      {{"info", "--soft-cap", "-5"}, "--soft-cap is -5"},
      {{"info", "--decode-tokens", "-5"}, "mix.decode_tokens is -5; it is 0 or a positive number"},
      {{"info", "--prefill-tokens", "nan"}, "mix.prefill_tokens is nan"},
      {{"verify", "--case", "kernel=nosuch"}, "nosuch"},
      {{"verify", "--case", "kernel=generic mask=purple"}, "purple"},
      {{"verify", "--kernel", "nosuch"}, "here run"},
  });
}

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
}  // namespace cli
