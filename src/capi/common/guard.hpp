#pragma once

#include <exception>
#include <new>
#include <stdexcept>

#include "core/error.hpp"
#include "folio/c/types.h"
#include "folio/types/error.hpp"

namespace folio::inline v0::capi {

/// Calls `body`; an exception becomes its code and this thread's message, which the core keeps for both libraries.
template <typename Body>
folio_status guarded(const Body& body) noexcept {
  try {
    body();
    return FOLIO_OK;
  } catch (const Error& error) {
    folio_set_last_error(error.what());
    return static_cast<folio_status>(error.code());
  } catch (const std::bad_alloc&) {
    folio_set_last_error("out of host memory");
    return FOLIO_OUT_OF_MEMORY;
  } catch (const std::length_error& error) {  // a container asked for more than can exist
    folio_set_last_error(error.what());
    return FOLIO_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    folio_set_last_error(error.what());
    return FOLIO_INTERNAL;
  } catch (...) {
    folio_set_last_error("an exception of unknown type");
    return FOLIO_INTERNAL;
  }
}

/// *pointer, or Error(kInvalidArgument, "<name> is null").
template <typename T>
T& deref(T* pointer, const char* name) {
  core::require(pointer != nullptr, name, " is null");
  return *pointer;
}

}  // namespace folio::inline v0::capi
