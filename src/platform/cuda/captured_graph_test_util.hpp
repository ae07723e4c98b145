#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <stdexcept>

#include "folio/types/device.hpp"

namespace folio::cuda_test {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// A stream of the test's own.
class TestStream {
 public:
  TestStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~TestStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  cudaStream_t native() const { return stream_; }
  Stream get() const { return {stream_}; }
  void wait() const { check(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Whatever is captured from a stream.
class CapturedGraph {
 public:
  CapturedGraph(const TestStream& stream, const std::function<void()>& enqueue) {
    check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal));
    enqueue();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream.native(), &graph));
    check(cudaGraphInstantiate(&executable_, graph, 0));
    check(cudaGraphDestroy(graph));
  }
  ~CapturedGraph() { static_cast<void>(cudaGraphExecDestroy(executable_)); }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  void launch(const TestStream& stream) const { check(cudaGraphLaunch(executable_, stream.native())); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace folio::cuda_test
