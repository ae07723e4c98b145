// Uses the installed package as an engine would: headers, a call into the library, and an exception that crosses its
// border.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "folio/folio.hpp"

int main() {
  if (std::strcmp(folio::version(), FOLIO_VERSION_STRING) != 0) {
    std::printf("headers are %s, the library is %s\n", FOLIO_VERSION_STRING, folio::version());
    return 1;
  }
  const folio::Context context = folio::Context::cpu({.num_threads = 1});
  if (context.concurrency() != 1) return 2;
  try {
    folio::Context::cpu({.num_threads = -1});
    return 3;
  } catch (const folio::Error& error) {
    if (error.code() != folio::ErrorCode::kInvalidArgument) return 4;
  }
  std::printf("folio %s\n", folio::version());
  return 0;
}
