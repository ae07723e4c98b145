#include "distributed/nccl/nccl_library.hpp"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "core/error.hpp"

namespace folio::inline v0::distributed {
namespace {

constexpr const char* kSoname = "libnccl.so.2";
/// Communicators that do not block, and ncclCommFinalize.
constexpr int kOldestVersion = 21400;

/// A handle that dlsym takes. Of the default search: what the process has loaded comes first, whether as global symbols
/// or, as Python loads it, as somebody's dependency.
void* open(const std::string& file) {
  if (file.empty()) {
    if (dlsym(RTLD_DEFAULT, "ncclCommInitRankConfig") != nullptr) return RTLD_DEFAULT;
    if (void* const loaded = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  }
  const char* const name = file.empty() ? kSoname : file.c_str();
  if (void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
  const char* const why = dlerror();
  core::fail(ErrorCode::kUnavailable, "NCCL cannot be loaded: ", why != nullptr ? why : name,
             "; install it (pip install nvidia-nccl-cu13) or name the file, NcclGroupOptions::library");
}

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) {
    core::fail(ErrorCode::kUnavailable, "the NCCL that was loaded has no ", name, "; version 2.14 or later has it");
  }
}

NcclLibrary load(const std::string& file) {
  void* const handle = open(file);
  NcclLibrary library;
  find(handle, "ncclGetVersion", library.get_version);
  int version = 0;
  if (library.get_version(&version) != ncclSuccess || version < kOldestVersion) {
    core::fail(ErrorCode::kUnavailable, "the NCCL that was loaded is of version ", version,
               " (as NCCL_VERSION_CODE); Folio takes ", kOldestVersion, " or later");
  }
  find(handle, "ncclGetErrorString", library.get_error_string);
  find(handle, "ncclGetLastError", library.get_last_error);
  find(handle, "ncclGetUniqueId", library.get_unique_id);
  find(handle, "ncclCommInitRankConfig", library.comm_init_rank_config);
  find(handle, "ncclCommFinalize", library.comm_finalize);
  find(handle, "ncclCommDestroy", library.comm_destroy);
  find(handle, "ncclCommAbort", library.comm_abort);
  find(handle, "ncclCommGetAsyncError", library.comm_get_async_error);
  find(handle, "ncclCommCount", library.comm_count);
  find(handle, "ncclCommUserRank", library.comm_user_rank);
  find(handle, "ncclCommCuDevice", library.comm_cu_device);
  find(handle, "ncclGroupStart", library.group_start);
  find(handle, "ncclGroupEnd", library.group_end);
  find(handle, "ncclSend", library.send);
  find(handle, "ncclRecv", library.recv);
  find(handle, "ncclAllGather", library.all_gather);
  find(handle, "ncclAllReduce", library.all_reduce);
  find(handle, "ncclReduceScatter", library.reduce_scatter);
  return library;
}

}  // namespace

const NcclLibrary& nccl_library(const std::string& file) {
  static std::mutex mutex;
  static std::map<std::string, NcclLibrary> libraries;
  const std::lock_guard lock(mutex);
  const auto found = libraries.find(file);
  if (found != libraries.end()) return found->second;
  return libraries.emplace(file, load(file)).first->second;
}

}  // namespace folio::inline v0::distributed
