#include "json_output.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "folio/types/error.hpp"

namespace folio::cli {

void write_json(const nlohmann::ordered_json& json, const std::string& path) {
  const std::string text = json.dump(1) + "\n";
  const bool to_stdout = path == "-";
  std::FILE* file = to_stdout ? stdout : std::fopen(path.c_str(), "w");
  bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr) written = (to_stdout ? std::fflush(file) : std::fclose(file)) == 0 && written;
  if (!written)
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
}

}  // namespace folio::cli
