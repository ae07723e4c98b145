// What went wrong on a thread, and the names of codes and types.
#include <string>

#include "capi/common/guard.hpp"
#include "folio/c/folio.h"
#include "folio/types/dtype.hpp"
#include "folio/types/tensor_view.hpp"
#include "folio/version.hpp"

using folio::capi::deref;
using folio::capi::guarded;

namespace {

struct LastError {
  std::string text;
  bool lost = false;  ///< there was no memory to keep it
};

LastError& last_error() noexcept {
  static thread_local LastError error;
  return error;
}

/// Strides of packed row-major memory.
template <typename View, typename Void>
folio_status make_view(Void* data, folio_dtype dtype, int32_t rank, const int64_t* shape, View* view) noexcept {
  return guarded([&] {
    deref(view, "view");
    folio::core::require(folio_dtype_size(dtype) > 0, "dtype is ", dtype, "; 1 to ", int32_t{FOLIO_DTYPE_INT8},
                         " are known");
    folio::core::require(rank >= 0 && rank <= FOLIO_MAX_RANK, "rank is ", rank, "; 0 to ", int32_t{FOLIO_MAX_RANK},
                         " are known");
    folio::core::require(shape != nullptr || rank == 0, "shape is null");
    View made{data, dtype, rank, {}, {}};
    int64_t stride = 1;
    for (int32_t i = rank - 1; i >= 0; --i) {
      folio::core::require(shape[i] >= 0, "shape[", i, "] is ", shape[i]);
      made.shape[i] = shape[i];
      made.strides[i] = stride;
      folio::core::require(!__builtin_mul_overflow(stride, shape[i], &stride), "shape has more than 2^63 - 1 elements");
    }
    *view = made;
  });
}

}  // namespace

const char* folio_version(void) noexcept {
  return folio::version();
}

const char* folio_last_error(void) noexcept {
  const LastError& error = last_error();
  return error.lost ? "the message of the last error found no memory" : error.text.c_str();
}

void folio_set_last_error(const char* message) noexcept {
  LastError& error = last_error();
  try {
    error.text = message == nullptr ? "" : message;
    error.lost = false;
  } catch (const std::exception&) {
    error.lost = true;
  }
}

const char* folio_status_name(folio_status status) noexcept {
  switch (status) {
    case FOLIO_OK: return "ok";
    case FOLIO_INVALID_ARGUMENT: return "invalid argument";
    case FOLIO_UNSUPPORTED: return "unsupported";
    case FOLIO_UNAVAILABLE: return "unavailable";
    case FOLIO_OUT_OF_MEMORY: return "out of memory";
    case FOLIO_WORKSPACE_TOO_SMALL: return "workspace too small";
    case FOLIO_STALE_PLAN: return "stale plan";
    case FOLIO_DEVICE_ERROR: return "device error";
    case FOLIO_INTERNAL: return "internal error";
    default: return "unknown status";
  }
}

const char* folio_dtype_name(folio_dtype dtype) noexcept {
  return folio::to_string(static_cast<folio::DType>(dtype)).data();  // of literals, which end in a 0
}

int32_t folio_dtype_size(folio_dtype dtype) noexcept {
  return folio::size_of(static_cast<folio::DType>(dtype));
}

folio_status folio_make_tensor_view(void* data, folio_dtype dtype, int32_t rank, const int64_t* shape,
                                    folio_tensor_view* view) noexcept {
  return make_view(data, dtype, rank, shape, view);
}

folio_status folio_make_const_tensor_view(const void* data, folio_dtype dtype, int32_t rank, const int64_t* shape,
                                          folio_const_tensor_view* view) noexcept {
  return make_view(data, dtype, rank, shape, view);
}
