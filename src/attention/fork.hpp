#pragma once

#include "attention/gpu_backend.hpp"

namespace folio::inline v0::attention {

/// A side stream while it is forked from the caller's. It is joined even where enqueueing throws: a capture that is
/// left with a fork could not be ended.
class Fork {
 public:
  Fork(GpuSideStream& side, Stream main) : side_(side), main_(main), stream_(side.fork(main)) {}
  ~Fork() {
    if (joined_) return;
    try {
      side_.join(main_);
    } catch (...) {  // whoever unwinds has an error to report already
    }
  }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;
  Stream stream() const noexcept { return stream_; }
  void join() {
    joined_ = true;
    side_.join(main_);
  }

 private:
  GpuSideStream& side_;
  Stream main_;
  Stream stream_;
  bool joined_ = false;
};

}  // namespace folio::inline v0::attention
