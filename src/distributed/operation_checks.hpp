#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "folio/types/device.hpp"
#include "folio/types/error.hpp"

/// What every operation of a group over host memory checks before anything is sent. Self-contained: the MPI library,
/// which sees only the exported part of libfolio, uses it too.
namespace folio::inline v0::distributed {

[[noreturn]] inline void refuse(const char* what, const char* why) {
  throw Error(ErrorCode::kInvalidArgument, std::string(what) + why);
}

inline void check_stream(Stream stream) {
  if (stream.handle != nullptr) refuse("a group over host memory", " takes the default stream only");
}

inline void check_buffer(const char* name, const void* buffer, size_t bytes) {
  if (buffer == nullptr && bytes > 0) refuse(name, " is null");
}

inline bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const auto x = reinterpret_cast<uintptr_t>(a);
  const auto y = reinterpret_cast<uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && x < y + b_bytes && y < x + a_bytes;
}

/// size * bytes. Throws kInvalidArgument where memory cannot hold it.
inline size_t bytes_of_all(int32_t size, size_t bytes) {
  if (bytes > SIZE_MAX / 2 / static_cast<size_t>(size)) refuse("the operation's size", " exceeds memory");
  return bytes * static_cast<size_t>(size);
}

inline size_t bytes_of_floats(size_t count) {
  if (count > SIZE_MAX / 2 / sizeof(float)) refuse("the operation's size", " exceeds memory");
  return count * sizeof(float);
}

inline void check_all_gather(const void* send, const void* recv, size_t bytes, int32_t rank, int32_t size) {
  check_buffer("send", send, bytes);
  check_buffer("recv", recv, bytes);
  const size_t all = bytes_of_all(size, bytes);
  const bool in_place = send == static_cast<const std::byte*>(recv) + static_cast<size_t>(rank) * bytes;
  if (!in_place && overlap(send, bytes, recv, all)) refuse("send", " overlaps recv, but is not this rank's part of it");
}

inline void check_exchange(const void* send, size_t send_bytes, const void* recv, size_t recv_bytes) {
  check_buffer("send", send, send_bytes);
  check_buffer("recv", recv, recv_bytes);
  if (overlap(send, send_bytes, recv, recv_bytes)) refuse("send", " overlaps recv");
}

}  // namespace folio::inline v0::distributed
