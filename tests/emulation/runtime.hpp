#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

/// Streams, captures, events and memory of the emulated CUDA runtime. cuda_runtime.cc has the runtime's functions.
namespace folio::emulation {

using Work = std::function<void()>;

inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local int32_t current_device = 0;
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
inline std::atomic<cudaError_t> device_fault{cudaSuccess};

/// The status of a call, which the thread's last error keeps.
cudaError_t result(cudaError_t status);
/// Every call fails from now on.
void fail_device(const char* what);

struct Capture;

/// Work of one stream, in order, on a thread of its own.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(int32_t device) : device_(device) {}

  int32_t device() const { return device_; }

  void enqueue(Work work) {
    const std::lock_guard lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([self = shared_from_this()] { self->run(); }).detach();
    }
    work_.push_back(std::move(work));
    ++unfinished_;
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return unfinished_ == 0;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return unfinished_ == 0; });
  }
  /// The thread ends once it has finished what is enqueued.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  std::shared_ptr<Capture> capture;

 private:
  void run() {
    for (;;) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !work_.empty() || closed_; });
        if (work_.empty()) break;
        work = std::move(work_.front());
        work_.pop_front();
      }
      try {
        if (device_fault.load() == cudaSuccess) work();
      } catch (const std::exception& error) {
        fail_device(error.what());
      }
      work = nullptr;
      const std::lock_guard lock(mutex_);
      --unfinished_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  int64_t unfinished_ = 0;
  int32_t device_;
  bool started_ = false;
  bool closed_ = false;
};

/// What a stream of a capture has behind it: so much work of each stream.
using Past = std::map<const Stream*, size_t>;

struct Capture {
  std::vector<Work> nodes;
  Stream* origin = nullptr;
  cudaStreamCaptureMode mode{};
  std::thread::id thread;
  std::map<Stream*, Past> pasts;
  bool invalid = false;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t passed = 0;
  std::chrono::steady_clock::time_point time;
  std::weak_ptr<Capture> capture;
  bool in_capture = false;
  Past past;
};

struct Graph {
  std::vector<Work> nodes;
};

struct Memory {
  size_t bytes;
  bool on_device;
  int32_t device;
  bool mapped;        ///< by mmap
  int32_t file = -1;  ///< that other processes map too, once the memory has a name there
};

struct Runtime {
  std::recursive_mutex mutex;  ///< a program's operator new may ask for page-locked memory
  std::map<const std::byte*, Memory> memory;
  std::set<std::shared_ptr<Stream>> streams;
  std::map<int32_t, Stream*> default_streams;
  std::set<std::shared_ptr<Capture>> captures;
  std::map<const void*, size_t> shared_memory;  ///< that kernels may use
};
Runtime& runtime();

Stream* stream_of(cudaStream_t handle);
std::vector<std::shared_ptr<Stream>> streams_of(int32_t device);
/// Whether a call that a capture forbids is made while one is under way that forbids it; then that capture is
/// invalidated.
bool forbidden_by_capture();
/// Work on a stream: enqueued, or a node of the graph that is being captured.
cudaError_t enqueue(Stream* stream, Work work);
cudaError_t wait_for(Stream* stream);

/// The allocation or page-locked range that holds the address; null where none does.
const Memory* memory_at(const void* data);
cudaError_t allocate(void** data, size_t bytes, bool on_device);
cudaError_t free_memory(void* data, bool on_device);
cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Stream* stream, bool waits);

}  // namespace folio::emulation
