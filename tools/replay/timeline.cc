#include "replay/timeline.hpp"

#include <fmt/format.h>

namespace folio::replay {

TimelineWriter::TimelineWriter(OutputFile& file) : file_(file) {
  file_.write("[");
}

TimelineWriter::~TimelineWriter() {
  file_.write("\n]\n");
}

void TimelineWriter::write(const std::string& event) {
  file_.write(first_ ? "\n" : ",\n");
  file_.write(event);
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
