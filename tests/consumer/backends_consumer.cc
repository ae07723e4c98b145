// The engine backends and the oracle, each from its own library: an exception of theirs is the core's too.
#include <cstdio>

#include "folio/backends/common.hpp"
#include "folio/backends/flash_attn.hpp"
#include "folio/folio.hpp"
#include "folio/verify.hpp"

int main() {
  try {
    folio::backends::infer_global_hyperparameters({});
    return 1;
  } catch (const folio::Error& error) {
    if (error.code() != folio::ErrorCode::kInvalidArgument) return 2;
  }
  try {
    folio::verify::parse_case("no=case");
    return 3;
  } catch (const folio::Error& error) {
    if (error.code() != folio::ErrorCode::kInvalidArgument) return 4;
  }
  folio::verify::ConformanceCase plain;
  const folio::verify::CaseReport report = folio::verify::run_case(plain);
  if (!report.passed) {
    std::printf("%s\n", report.failure.c_str());
    return 5;
  }
  std::printf("folio %s, %s\n", folio::version(), folio::verify::to_string(plain).c_str());
  return 0;
}
