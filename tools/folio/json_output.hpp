#pragma once

#include <nlohmann/json.hpp>

#include "replay/output_file.hpp"

namespace folio::cli {

/// Writes `json` and closes the file. Throws folio::Error(kInvalidArgument) if it could not be written.
void write_json(const nlohmann::ordered_json& json, replay::OutputFile& file);

}  // namespace folio::cli
