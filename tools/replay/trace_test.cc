#include "replay/trace.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Trace parse(std::string_view text, TraceFormat format = TraceFormat::kDetect) {
  return parse_trace(text, format, "t");
}

/// The message that a bad text gives; fails the test if it is accepted.
std::string refusal(std::string_view text, TraceFormat format = TraceFormat::kDetect) {
  try {
    parse(text, format);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text;
  return {};
}

constexpr const char* kRow = R"({"timestamp": 3000, "input_length": 513, "output_length": 7, "hash_ids": [5, 9]})";

TEST(MooncakeTrace, ReadsEveryField) {
  const Trace trace = parse(kRow);
  EXPECT_EQ(trace.format, TraceFormat::kMooncake);
  ASSERT_EQ(trace.requests.size(), 1u);
  const TraceRequest& request = trace.requests[0];
  EXPECT_EQ(request.arrival_ms, 3000.0);
  EXPECT_EQ(request.input_length, 513);
  EXPECT_EQ(request.output_length, 7);
  EXPECT_EQ(request.line, 1);
  EXPECT_THAT(request.hash_ids, ElementsAre(5, 9));
}

TEST(MooncakeTrace, ToleratesLineEndsBlankLinesAndUnknownFields) {
  const std::string text =
      "\xef\xbb\xbf\r\n" + std::string(kRow) + "\r\n\n  \t\r\n" +
      R"({"model":"x","timestamp":1.5,"input_length":1,"output_length":0,"hash_ids":[-3],"extra":{"a":[1]}})";
  const Trace trace = parse(text);
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[0].line, 2);
  EXPECT_EQ(trace.requests[1].line, 5);
  EXPECT_EQ(trace.requests[1].arrival_ms, 1.5);
  EXPECT_THAT(trace.requests[1].hash_ids, ElementsAre(static_cast<uint64_t>(-3)));
}

TEST(MooncakeTrace, CountsHashesAgainstTheLength) {
  EXPECT_NO_THROW(parse(R"({"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]})"));
  EXPECT_THAT(refusal(R"({"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1,2]})"),
              HasSubstr("hash_ids has 2 entries; input_length 512 needs 1"));
  EXPECT_THAT(refusal(R"({"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]})"), HasSubstr("needs 2"));
}

TEST(MooncakeTrace, NamesFileLineAndWhatWasExpected) {
  const std::string good = std::string(kRow) + "\n\n";
  const auto bad = [&](const std::string& row) { return refusal(good + row, TraceFormat::kMooncake); };
  EXPECT_THAT(bad(R"({"timestamp":0,"input_length":-4,"output_length":1,"hash_ids":[]})"),
              AllOf(HasSubstr("t:3: input_length is -4"), HasSubstr("from 1 to 16777216")));
  EXPECT_THAT(bad(R"({"timestamp":0,"input_length":1e3,"output_length":1,"hash_ids":[1]})"), HasSubstr("whole number"));
  EXPECT_THAT(bad(R"({"timestamp":0,"input_length":"7","output_length":1,"hash_ids":[1]})"), HasSubstr("whole number"));
  EXPECT_THAT(bad(R"({"timestamp":0,"input_length":99999999999999999999,"output_length":1,"hash_ids":[1]})"),
              HasSubstr("whole number"));
  EXPECT_THAT(bad(R"({"timestamp":0,"input_length":18446744073709551615,"output_length":1,"hash_ids":[1]})"),
              HasSubstr("whole number"));
  EXPECT_THAT(bad(R"({"timestamp":NaN,"input_length":1,"output_length":1,"hash_ids":[1]})"), HasSubstr("t:3: "));
  EXPECT_THAT(bad(R"({"timestamp":-1,"input_length":1,"output_length":1,"hash_ids":[1]})"),
              HasSubstr("timestamp is -1"));
  EXPECT_THAT(bad(R"({"timestamp":1e300,"input_length":1,"output_length":1,"hash_ids":[1]})"), HasSubstr("timestamp"));
  EXPECT_THAT(bad(R"({"timestamp":1e999,"input_length":1,"output_length":1,"hash_ids":[1]})"), HasSubstr("t:3: "));
  EXPECT_THAT(bad(R"({"timestamp":0,"input_length":1,"hash_ids":[1]})"), HasSubstr("\"output_length\" is missing"));
  EXPECT_THAT(bad(R"({"timestamp":0,"input_length":1,"output_length":1,"hash_ids":7})"), HasSubstr("not an array"));
  EXPECT_THAT(bad(R"({"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[0.5]})"), HasSubstr("hash_ids[0]"));
  EXPECT_THAT(bad("[1, 2]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(bad("\x80\x01\xff"), HasSubstr("t:3: "));
}

TEST(MooncakeTrace, CutOffFileIsAnError) {
  const std::string text = std::string(kRow) + "\n" + kRow;
  const size_t second_row = text.find('\n') + 1;
  for (size_t length = second_row + 1; length < text.size(); ++length) {
    EXPECT_THAT(refusal(std::string_view(text).substr(0, length)), HasSubstr("t:2: ")) << length;
  }
}

TEST(MooncakeTrace, SurvivesDeepNesting) {
  const std::string deep(200000, '[');
  EXPECT_THAT(refusal("{\"timestamp\":" + deep), HasSubstr("t:1: "));
  const std::string closed = deep + std::string(200000, ']');
  EXPECT_THAT(refusal("{\"timestamp\":" + closed + ",\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}"),
              HasSubstr("timestamp is an array"));
}

constexpr const char* kHeader = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

TEST(AzureTrace, ReadsTimesFromTheFirstRow) {
  const Trace trace = parse(std::string(kHeader) +
                            "2023-11-16 23:59:59.5000000,374,44\r\n"
                            "2023-11-17 00:00:01.2500000,396,0\r\n");
  EXPECT_EQ(trace.format, TraceFormat::kAzure);
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[0].arrival_ms, 0.0);
  EXPECT_NEAR(trace.requests[1].arrival_ms, 1750.0, 1e-3);  // a double holds today's milliseconds to 2^-12
  EXPECT_EQ(trace.requests[1].input_length, 396);
  EXPECT_EQ(trace.requests[1].output_length, 0);
  EXPECT_EQ(trace.requests[1].line, 3);
  EXPECT_TRUE(trace.requests[1].hash_ids.empty());
}

TEST(AzureTrace, FindsColumnsByNameAndReadsZones) {
  const Trace trace = parse(
      "\xef\xbb\xbf\"GeneratedTokens\", Model ,ContextTokens,TIMESTAMP\n"
      "5,x,6,2024-05-10 02:00:00+02:00\n"
      "7,y,8,2024-05-10T00:00:01.5Z");
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[0].input_length, 6);
  EXPECT_EQ(trace.requests[0].output_length, 5);
  EXPECT_EQ(trace.requests[1].arrival_ms, 1500.0);
}

TEST(AzureTrace, NamesFileLineAndWhatWasExpected) {
  const auto bad = [](const std::string& row) { return refusal(std::string(kHeader) + "\n" + row); };
  const std::string time = "2023-11-16 18:15:46.68";
  EXPECT_THAT(bad(time + ",374"), AllOf(HasSubstr("t:3: the row has 2 fields; the header has 3")));
  EXPECT_THAT(bad(time + ",374,44,9"), HasSubstr("4 fields"));
  EXPECT_THAT(bad(time + ",0,44"), HasSubstr("ContextTokens is '0'"));
  EXPECT_THAT(bad(time + ",-3,44"), HasSubstr("ContextTokens is '-3'"));
  EXPECT_THAT(bad(time + ",3.5,44"), HasSubstr("ContextTokens is '3.5'"));
  EXPECT_THAT(bad(time + ",nan,44"), HasSubstr("whole number from 1 to 16777216"));
  EXPECT_THAT(bad(time + ",3,99999999999999999999"), HasSubstr("GeneratedTokens is"));
  EXPECT_THAT(bad(time + ",3,16777217"), HasSubstr("GeneratedTokens is"));
  EXPECT_THAT(bad(time + ",3,"), HasSubstr("GeneratedTokens is ''"));
  for (const char* not_a_time : {"", "18:15:46", "2023-13-16 18:15:46", "2023-02-30 18:15:46", "2023-11-16 24:15:46",
                                 "2023-11-16 18:15:46.", "2023-11-16 18:15:46 PM", "2023-11-16 18:15:46+2"}) {
    EXPECT_THAT(bad(std::string(not_a_time) + ",3,4"), HasSubstr("t:3: TIMESTAMP is '")) << not_a_time;
  }
}

TEST(TraceFormats, UnknownAndEmptyTextsAreRefused) {
  EXPECT_THAT(refusal("a,b,c\n1,2,3\n"), HasSubstr("t:1: 'a,b,c' begins neither a Mooncake trace"));
  EXPECT_THAT(refusal(""), HasSubstr("empty"));
  EXPECT_THAT(refusal("\n\r\n  \n"), HasSubstr("empty"));
  EXPECT_THAT(refusal(kHeader), HasSubstr("no requests"));
  EXPECT_THAT(refusal("{}", TraceFormat::kAzure), HasSubstr("not a header"));
  EXPECT_THAT(refusal(kHeader, TraceFormat::kMooncake), HasSubstr("not valid JSON"));
}

TEST(TraceFormats, ShippedExcerptsAreRead) {
  const Trace mooncake = read_trace(FOLIO_EXAMPLE_TRACES "/mooncake_excerpt.jsonl", TraceFormat::kDetect);
  EXPECT_EQ(mooncake.format, TraceFormat::kMooncake);
  EXPECT_EQ(mooncake.requests.size(), 300u);
  EXPECT_EQ(mooncake.requests[0].input_length, 6758);
  const Trace azure = read_trace(FOLIO_EXAMPLE_TRACES "/azure_excerpt.csv", TraceFormat::kDetect);
  EXPECT_EQ(azure.format, TraceFormat::kAzure);
  EXPECT_EQ(azure.requests.size(), 400u);
  EXPECT_NEAR(azure.requests[1].arrival_ms, 4314.579, 1e-3);
}

TEST(TraceFormats, MissingFileIsAnError) {
  EXPECT_THROW(read_trace("/nonexistent/trace.csv", TraceFormat::kDetect), Error);
}

}  // namespace
}  // namespace folio::replay
