#include "report_assets.hpp"

// The files as they are, in read-only memory. Their paths come from CMake; an empty file is none.
#define FOLIO_EMBED(name, path) \
  __asm__(                      \
      ".pushsection .rodata\n"  \
      ".global folio_" name     \
      "_begin\n"                \
      ".global folio_" name     \
      "_end\n"                  \
      "folio_" name             \
      "_begin:\n"               \
      ".incbin \"" path         \
      "\"\n"                    \
      "folio_" name             \
      "_end:\n"                 \
      ".popsection\n")

FOLIO_EMBED("report_page", FOLIO_REPORT_PAGE);
FOLIO_EMBED("report_vega", FOLIO_REPORT_VEGA);
FOLIO_EMBED("report_licences", FOLIO_REPORT_LICENCES);

extern "C" {
extern const char folio_report_page_begin[], folio_report_page_end[];
extern const char folio_report_vega_begin[], folio_report_vega_end[];
extern const char folio_report_licences_begin[], folio_report_licences_end[];
}

namespace folio::cli {
namespace {

std::string_view between(const char* begin, const char* end) {
  return {begin, static_cast<size_t>(end - begin)};
}

}  // namespace

ReportAssets report_assets() {
  return {between(folio_report_page_begin, folio_report_page_end),
          between(folio_report_vega_begin, folio_report_vega_end),
          between(folio_report_licences_begin, folio_report_licences_end)};
}

}  // namespace folio::cli
