#include "platform/cuda/stream.hpp"

#include <utility>

#include "platform/cuda/device.hpp"

namespace folio::inline v0::platform::cuda {

OwnedStream::OwnedStream() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

OwnedStream::~OwnedStream() {
  static_cast<void>(cudaStreamDestroy(stream_));
}

void synchronize(Stream stream) {
  const RelaxedCapture relaxed;
  check(cudaStreamSynchronize(native(stream)), "waiting for a stream");
}

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(native(stream), &status), "asking whether a stream is being captured");
  return status != cudaStreamCaptureStatusNone;
}

Event::Event() {
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event");
}

Event::~Event() {
  if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
}

Event::Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(event_, other.event_);
  return *this;
}

void Event::record(Stream stream) {
  check(cudaEventRecord(event_, native(stream)), "recording an event");
}

void Event::wait() const {
  const RelaxedCapture relaxed;
  check(cudaEventSynchronize(event_), "waiting for an event");
}

bool Event::passed() const {
  const RelaxedCapture relaxed;
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());  // no error: the next call of the runtime must not find it
    return false;
  }
  check(status, "asking for an event");
  return true;
}

void Event::hold(Stream stream) const {
  check(cudaStreamWaitEvent(native(stream), event_, 0), "letting a stream wait for an event");
}

void Graph::begin_capture(Stream stream) {
  check(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeThreadLocal), "beginning a graph capture");
}

Graph Graph::end_capture(Stream stream) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(native(stream), &graph), "ending a graph capture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  static_cast<void>(cudaGraphDestroy(graph));
  check(status, "instantiating a graph");
  return Graph(executable);
}

Graph::~Graph() {
  if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
}

Graph::Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}

void Graph::launch(Stream stream) const {
  check(cudaGraphLaunch(executable_, native(stream)), "launching a graph");
}

}  // namespace folio::inline v0::platform::cuda
