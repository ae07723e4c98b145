#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "replay/output_file.hpp"

namespace folio::cli {

/// A result that a page draws.
struct ReportFile {
  std::string name;  ///< as the page calls it
  nlohmann::ordered_json content;
  std::string_view kind{};
};

/// "replay", "bench", "ranks" (of bench --ranks) or "peers": by what the document holds. Throws
/// folio::Error(kInvalidArgument), with `path` and the field, for another document, for one of an older version, and
/// for fields that the page cannot draw.
std::string_view kind_of(const nlohmann::ordered_json& content, const std::string& path);

/// The page. Throws folio::Error(kUnavailable) in a build without Vega-Lite.
std::string report_page(const std::string& title, const std::vector<ReportFile>& files);

}  // namespace folio::cli
