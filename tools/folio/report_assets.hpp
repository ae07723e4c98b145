#pragma once

#include <string_view>

namespace folio::cli {

/// What a page of `folio report` is made of.
struct ReportAssets {
  std::string_view page;      ///< page.html, with {{LICENCES}}, {{DATA}} and {{VEGA}} in that order
  std::string_view vega;      ///< Vega, Vega-Lite and vega-embed as one script; empty where the build had none
  std::string_view licences;  ///< theirs
};
ReportAssets report_assets();

}  // namespace folio::cli
