#pragma once

#include <cstdint>

namespace folio::inline v0::attention {

/// Whether `set_nvtx_ranges` has turned ranges on: one relaxed load.
bool ranges_are_on() noexcept;

/// The profiler's side (nvtx_ranges.cc); builds without NVTX have none of it.
bool has_nvtx() noexcept;
void push_range(const char* name, int64_t payload) noexcept;
void pop_range() noexcept;

/// A range of the calling thread, from here to the end of the scope.
class ProfilerRange {
 public:
  ProfilerRange(const char* name, int64_t payload) noexcept : pushed_(ranges_are_on()) {
    if (pushed_) push_range(name, payload);
  }
  ~ProfilerRange() {
    if (pushed_) pop_range();
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  bool pushed_;  ///< ranges may be turned off in between
};

}  // namespace folio::inline v0::attention
