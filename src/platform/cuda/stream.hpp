#pragma once

#include <cuda_runtime_api.h>

#include "folio/types/device.hpp"

/// Streams, events and graphs. Owned, move-only, destroyed with their object.
namespace folio::inline v0::platform::cuda {

inline cudaStream_t native(Stream stream) noexcept {
  return static_cast<cudaStream_t>(stream.handle);
}

/// A stream that does not wait for the legacy default stream.
class OwnedStream {
 public:
  OwnedStream();
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  Stream get() const noexcept { return {stream_}; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// While it lives, this thread may wait for, allocate and free what no capture holds, although somebody captures a
/// stream in global mode. Without it such a call invalidates that capture.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() noexcept { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&other_)); }

  cudaStreamCaptureMode other_ = cudaStreamCaptureModeRelaxed;  ///< while it lives, the thread's own
};

/// Waits until everything enqueued on `stream` so far is done.
void synchronize(Stream stream);

/// True while `stream` is being captured into a graph.
bool is_capturing(Stream stream);

/// A point in a stream. Without timing, so that recording is cheap.
class Event {
 public:
  Event();
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  void record(Stream stream);
  /// Returns once the stream has passed the last record; at once if there was none.
  void wait() const;
  /// Whether the stream has passed the last record; true if there was none. Waits for nothing.
  bool passed() const;
  /// What is enqueued on `stream` from here on waits until the last record has been passed.
  void hold(Stream stream) const;

 private:
  cudaEvent_t event_ = nullptr;
};

/// Work captured from a stream, to be launched many times.
class Graph {
 public:
  /// Begins capturing `stream`; what this thread enqueues on it from here on goes into the graph.
  static void begin_capture(Stream stream);
  /// Ends the capture and makes the graph launchable. Throws Error(kDeviceError) for a capture that something broke.
  static Graph end_capture(Stream stream);
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&&) = delete;
  void launch(Stream stream) const;

 private:
  explicit Graph(cudaGraphExec_t executable) : executable_(executable) {}
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace folio::inline v0::platform::cuda
