// `folio report`.
#include "cli_test_util.hpp"

namespace cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Cli, ReportIsOneWholePage) {
  const Scratch replay("a.json"), bench("b.json"), page("page.html");
  ASSERT_EQ(folio(small_replay({"--json", replay.path(), "-q"})).code, 0);
  ASSERT_EQ(folio({"bench", "--model", "tiny", "--batch", "2", "--kv-len", "64", "--q-len", "16", "--kernel", "generic",
                   "--rounds", "1", "--min-ms", "0.1", "-q", "--json", bench.path()})
                .code,
            0);
  const Outcome outcome =
      folio({"report", replay.path(), bench.path(), "-o", page.path(), "--title", "a </script> title"});
  if (!FOLIO_HAS_VEGA) {
    EXPECT_EQ(outcome.code, 2);
    EXPECT_THAT(outcome.err, HasSubstr("no Vega-Lite"));
    EXPECT_FALSE(std::filesystem::exists(page.path()));
    return;
  }
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("2 files"));
  const std::string text = read_file(page.path());
  EXPECT_THAT(text, AllOf(HasSubstr("window.vegaEmbed="), HasSubstr("default-src 'none'"), HasSubstr("BSD-3-Clause"),
                          HasSubstr("a \\u003c/script> title"), Not(HasSubstr("{{"))));
  for (const char* loads : {"<link", "<img", " src=\"", "@import", "url(http"})
    EXPECT_EQ(text.substr(0, text.find("<script type=\"module\">")).find(loads), std::string::npos) << loads;
}

TEST(Cli, ReportRefusesWhatItCannotDraw) {
  const Scratch text("text.json", "not json"), other("other.json", R"({"tea": 1})"),
      old("old.json", R"({"attention": {}, "steps": {"count": 3}})"),
      ranks("ranks.json", R"({"device": "cpu", "threads": 1, "rounds": 1, "cases": [{"ranks": 2}]})"),
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
      {{"report", ranks.path(), "-o", page.path()}, "cases are of --ranks, which this page does not draw"},
      {{"report", peers.path(), "-o", page.path()}, "results[0].us.folio holds what is no number"},
      {{"report", said.path(), "-o", page.path()}, "results[0].said.folio is missing"},
      {{"report", text.path(), "-o", text.path()}, "is read and written"},
  });
  EXPECT_FALSE(std::filesystem::exists(page.path()));
  EXPECT_EQ(read_file(text.path()), "not json");
}

}  // namespace
}  // namespace cli
