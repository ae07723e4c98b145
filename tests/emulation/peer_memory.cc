// What the emulated CUDA runtime has of memory that several GPUs or processes use. A name of memory (IPC) is a file
// that this process has open; naming memory makes the file its pages.
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "runtime.hpp"

namespace folio::emulation {
namespace {

struct Name {
  pid_t process;
  int32_t file;
  size_t bytes;
};
static_assert(sizeof(Name) <= sizeof(cudaIpcMemHandle_t));

/// Replaces the memory's pages by those of a file with the same contents.
bool put_in_file(void* data, Memory& memory) {
  const int file = memfd_create("emulated device memory", MFD_CLOEXEC);
  if (file < 0) return false;
  const bool written = ftruncate(file, static_cast<off_t>(memory.bytes)) == 0 &&
                       pwrite(file, data, memory.bytes, 0) == static_cast<ssize_t>(memory.bytes);
  if (!written || mmap(data, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
    close(file);
    return false;
  }
  memory.file = file;
  return true;
}

}  // namespace
}  // namespace folio::emulation

using namespace folio::emulation;  // NOLINT: the runtime's functions are C functions

extern "C" {

/// FOLIO_EMULATED_PEER_ACCESS=0: GPUs cannot reach each other's memory.
cudaError_t cudaDeviceCanAccessPeer(int* possible, int device, int peer) {
  const char* const text = std::getenv("FOLIO_EMULATED_PEER_ACCESS");
  *possible = device != peer && (text == nullptr || std::strcmp(text, "0") != 0) ? 1 : 0;
  return result(cudaSuccess);
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  static std::set<std::pair<int, int>> enabled;
  int possible = 0;
  cudaDeviceCanAccessPeer(&possible, current_device, peer);
  if (possible == 0) return result(cudaErrorPeerAccessUnsupported);
  const std::lock_guard lock(runtime().mutex);
  return result(enabled.insert({current_device, peer}).second ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  const std::lock_guard lock(runtime().mutex);
  const auto found = runtime().memory.find(static_cast<const std::byte*>(data));
  if (found == runtime().memory.end() || !found->second.on_device || !found->second.mapped) {
    return result(cudaErrorInvalidValue);
  }
  Memory& memory = found->second;
  if (memory.file < 0 && !put_in_file(data, memory)) return result(cudaErrorMemoryAllocation);
  const Name name{getpid(), memory.file, memory.bytes};
  *handle = {};
  std::memcpy(handle, &name, sizeof(name));
  return result(cudaSuccess);
}
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned) {
  Name name;
  std::memcpy(&name, &handle, sizeof(name));
  if (name.process == getpid()) return result(cudaErrorDeviceUninitialized);
  const std::string path = "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return result(cudaErrorInvalidValue);
  *data = mmap(nullptr, name.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (*data == MAP_FAILED) return result(cudaErrorMapBufferObjectFailed);
  const std::lock_guard lock(runtime().mutex);
  runtime().memory[static_cast<const std::byte*>(*data)] = {name.bytes, true, current_device, true};
  return result(cudaSuccess);
}
cudaError_t cudaIpcCloseMemHandle(void* data) {
  return result(free_memory(data, true));
}

}  // extern "C"
