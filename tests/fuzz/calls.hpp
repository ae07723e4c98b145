#pragma once

// How a call of the library ended. It may refuse what it is given, with folio::Error, or find no memory for it; that
// its own work failed (kInternal) is a mistake wherever it is found.
#include <new>

#include "folio/types/error.hpp"
#include "input.hpp"

/// True if the call did what it was asked, false if it refused.
template <typename Call>
bool accepted(Call&& call) {
  try {
    call();
    return true;
  } catch (const folio::Error& error) {
    FUZZ_CHECK(error.code() != folio::ErrorCode::kInternal);
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

/// True if the call refused, which it must do with this code.
template <typename Call>
bool refused(folio::ErrorCode code, Call&& call) {
  try {
    call();
    return false;
  } catch (const folio::Error& error) {
    FUZZ_CHECK(error.code() == code);
    return true;
  }
}
