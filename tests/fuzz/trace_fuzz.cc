// The trace readers, from arbitrary bytes. What they accept keeps the bounds that their header promises, and both ways
// of naming the format agree; what they refuse, they refuse with folio::Error.
#include <cstdint>
#include <string_view>

#include "folio/types/error.hpp"
#include "input.hpp"
#include "replay/trace.hpp"

namespace {

using folio::replay::kMaxTraceTokens;
using folio::replay::kTokensPerHash;
using folio::replay::Trace;
using folio::replay::TraceFormat;
using folio::replay::TraceRequest;

void check(const Trace& trace, std::string_view text) {
  FUZZ_CHECK(trace.format != TraceFormat::kDetect);
  int64_t line = 0;
  for (const TraceRequest& request : trace.requests) {
    FUZZ_CHECK(request.line > line && request.line <= static_cast<int64_t>(text.size()) + 1);
    line = request.line;
    FUZZ_CHECK(request.input_length >= 1 && request.input_length <= kMaxTraceTokens);
    FUZZ_CHECK(request.output_length >= 0 && request.output_length <= kMaxTraceTokens);
    FUZZ_CHECK(request.arrival_ms == request.arrival_ms);
    if (trace.format == TraceFormat::kMooncake) {
      FUZZ_CHECK(request.hash_ids.size() ==
                 static_cast<size_t>((request.input_length + kTokensPerHash - 1) / kTokensPerHash));
    } else {
      FUZZ_CHECK(request.hash_ids.empty());
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  constexpr TraceFormat kFormats[] = {TraceFormat::kDetect, TraceFormat::kMooncake, TraceFormat::kAzure};
  const TraceFormat format = kFormats[input.take<uint8_t>() % 3];
  const std::string_view text = input.rest();
  try {
    const Trace trace = folio::replay::parse_trace(text, format, "fuzz");
    FUZZ_CHECK(format == TraceFormat::kDetect || trace.format == format);
    check(trace, text);
    const Trace again = folio::replay::parse_trace(text, trace.format, "fuzz");
    FUZZ_CHECK(again.requests.size() == trace.requests.size());
  } catch (const folio::Error&) {
  }
  return 0;
}
