#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "folio/context.hpp"

namespace folio::replay {

/// Zeroed memory straight from the system, aligned to 2 MiB where it is large. It counts towards the resident set only
/// as it is touched, and goes back when the object dies. Throws folio::Error(kOutOfMemory).
class MappedMemory {
 public:
  MappedMemory() = default;
  explicit MappedMemory(size_t bytes);
  /// As much where the context's kernels read and write: on a GPU device memory, which has no part in the resident set.
  static MappedMemory on(const Context& context, size_t bytes);
  /// As much for keys and values, which all threads read: on a CPU its pages come from all memory nodes in turn.
  static MappedMemory of_cache_on(const Context& context, size_t bytes);
  /// As much for both, host and kernels: for a GPU page-locked memory.
  static MappedMemory shared_with(const Context& context, size_t bytes);
  ~MappedMemory();
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// Bytes that are resident now, in whole system pages.
  size_t resident_bytes() const;

 private:
  std::shared_ptr<std::byte> gpu_;  ///< device or page-locked memory, instead of a mapping
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Lets the pages of [data, data + bytes) come from all memory nodes that the process may use in turn, as they are
/// first touched. `data` begins a page. False where the process has a policy of its own (numactl), which stays, and
/// where the system allows none.
bool interleave_over_nodes(void* data, size_t bytes);

/// The largest resident set that this process ever had, in bytes.
int64_t peak_resident_bytes();

}  // namespace folio::replay
