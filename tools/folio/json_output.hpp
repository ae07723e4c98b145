#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace folio::cli {

/// Writes `json` to a file, or to standard output for "-". Throws folio::Error(kInvalidArgument) if it cannot be
/// written.
void write_json(const nlohmann::ordered_json& json, const std::string& path);

}  // namespace folio::cli
