// `folio bench`.
#include <nlohmann/json.hpp>

#include "cli_test_util.hpp"

namespace cli {
namespace {

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

TEST(Cli, BenchMisuseSaysWhatToDo) {
  expect_misuses({
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
      {{"bench", "--ranks", "2", "--simulate", "--node-link", "450:6:"}, "--node-link is '450:6:'"},
      {{"bench", "--ranks", "2", "--simulate", "--node-link", "450:6:0"}, "--node-link is '450:6:0'"},
      {{"bench", "--ranks", "2", "--simulate", "--network-link", "50:15:50x"}, "--network-link is '50:15:50x'"},
      {{"bench", "--ranks", "3", "--simulate"}, "32 query heads over 3 ranks and 8 KV heads"},
      {{"bench", "--kv-len", "4", "--q-len", "8", "--sweep", "prefill"}, "nothing to measure"},
  });
}

}  // namespace
}  // namespace cli
