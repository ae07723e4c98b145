#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace folio::replay {

/// Tokens that one Mooncake hash id stands for.
inline constexpr int32_t kTokensPerHash = 512;

/// The longest prompt or answer a reader accepts: beyond any model's context, small enough that sums never overflow.
inline constexpr int32_t kMaxTraceTokens = 1 << 24;

/// The longest line and the longest trace that read_trace takes: beyond any that is known, and what keeps an endless
/// input from taking all memory.
inline constexpr size_t kMaxTraceLineBytes = size_t{4} << 20;
inline constexpr size_t kMaxTraceBytes = size_t{1} << 30;

enum class TraceFormat { kDetect, kMooncake, kAzure };

/// One request as the trace tells it, before scaling.
struct TraceRequest {
  double arrival_ms = 0.0;    ///< since the trace began (Mooncake: as written; Azure: since the first row)
  int32_t input_length = 0;   ///< prompt tokens, at least 1
  int32_t output_length = 0;  ///< generated tokens, 0 or more
  int64_t line = 0;           ///< where it stands in the file, from 1
  std::vector<uint64_t>
      hash_ids;  ///< Mooncake: one per kTokensPerHash prompt tokens, the last may be partial; else empty
};

struct Trace {
  TraceFormat format = TraceFormat::kDetect;
  std::vector<TraceRequest> requests;  ///< in the file's order
};

/// Reads a trace from memory. `name` only appears in messages.
///
/// Mooncake: a JSON object a line, {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [ceil(n / 512)
/// ids]}. Azure: CSV whose header names TIMESTAMP, ContextTokens and GeneratedTokens, in any order. Unknown fields and
/// columns, blank lines, CRLF, a byte order mark and a missing final newline are accepted.
///
/// Throws folio::Error(kInvalidArgument) as "name:line: what was found, what was expected". Reads nothing outside
/// `text`, whatever the bytes; memory is linear in its size. Sources of the formats: the trace release of 'Mooncake'
/// (Qin et al., FAST 2025); the Azure LLM inference trace of 2023
/// ('Splitwise', Patel et al., ISCA 2024).
Trace parse_trace(std::string_view text, TraceFormat format, std::string_view name);

/// The same from a file; "-" is standard input. Throws folio::Error(kInvalidArgument) if it cannot be read,
/// or is longer than the bounds above.
Trace read_trace(const std::string& path, TraceFormat format);

/// Which format the text is in, by its first line that is not blank. Throws if it is neither.
TraceFormat detect_format(std::string_view text, std::string_view name);

}  // namespace folio::replay
