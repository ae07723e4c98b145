#pragma once

#include <span>
#include <vector>

#include "folio/context.hpp"
#include "testing/guarded_buffer.hpp"

namespace folio::inline v0::verify {

/// Lets the context's GPU use guarded host memory at its own addresses while this object lives, so that cases need no
/// copies and keep their guard pages: an access beyond a buffer is an illegal address there, too. Does nothing on a
/// CPU. Small buffers' memory stays mapped, for the buffers that get it next.
class GpuMapping {
 public:
  GpuMapping(const Context& context, std::span<const GuardedBuffer* const> buffers);
  ~GpuMapping();
  GpuMapping(const GpuMapping&) = delete;
  GpuMapping& operator=(const GpuMapping&) = delete;
  /// Waits for the GPU.
  void synchronize() const;

 private:
  Context context_;
  std::vector<void*> mapped_;
};

}  // namespace folio::inline v0::verify
