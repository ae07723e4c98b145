// `folio report`.
#include "cli_test_util.hpp"

namespace cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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
  expect_misuses({
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
  });
  EXPECT_FALSE(std::filesystem::exists(page.path()));
  EXPECT_EQ(read_file(text.path()), "not json");
}

}  // namespace
}  // namespace cli
