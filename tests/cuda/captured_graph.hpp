#pragma once

#include <functional>

#include "device_array.hpp"

namespace folio::cuda_test {

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
