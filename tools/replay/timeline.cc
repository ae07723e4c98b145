#include "replay/timeline.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

#include "folio/types/error.hpp"

namespace folio::replay {

TimelineWriter::TimelineWriter(const std::string& path) : file_(std::fopen(path.c_str(), "w"), &std::fclose) {
  if (file_ == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
  }
  std::fputs("[", file_.get());
}

TimelineWriter::~TimelineWriter() {
  std::fputs("\n]\n", file_.get());
}

void TimelineWriter::write(const std::string& event) {
  std::fputs(first_ ? "\n" : ",\n", file_.get());
  std::fputs(event.c_str(), file_.get());
  first_ = false;
}

void TimelineWriter::span(std::string_view name, int32_t layer, double seconds) {
  const double end_us = since_start_.elapsed() * 1e6;
  const std::string label = layer < 0 ? std::string(name) : fmt::format("{} {}", name, layer);
  write(fmt::format(R"({{"name":"{}","cat":"{}","ph":"X","ts":{:.3f},"dur":{:.3f},"pid":1,"tid":1}})", label, name,
                    end_us - seconds * 1e6, seconds * 1e6));
}

void TimelineWriter::counters(int64_t running, int64_t waiting, int32_t pages_held, int32_t pages_cached) {
  const double now_us = since_start_.elapsed() * 1e6;
  write(fmt::format(R"({{"name":"requests","ph":"C","ts":{:.3f},"pid":1,"args":{{"running":{},"waiting":{}}}}})",
                    now_us, running, waiting));
  write(fmt::format(R"({{"name":"pages","ph":"C","ts":{:.3f},"pid":1,"args":{{"held":{},"cached":{}}}}})", now_us,
                    pages_held, pages_cached));
}

}  // namespace folio::replay
