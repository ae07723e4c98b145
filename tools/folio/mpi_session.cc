#include "mpi_session.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "mpi_module.hpp"

namespace folio::cli {
namespace {

/// As Open MPI's, MPICH's and Slurm's launchers say it.
bool started_by_mpirun() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const char* const size = std::getenv(name);
    if (size != nullptr && std::string(size) != "1") return true;
  }
  return false;
}

/// A function of the module, which lies where the program's RUNPATH looks. Its symbols are global: an MPI's own
/// plug-ins take libmpi's from there. It stays loaded, since an MPI leaves handlers behind that run when the process
/// exits.
template <typename Function>
Function* function_of_module(const char* name) {
  void* const module = dlopen(kMpiModule, RTLD_NOW | RTLD_GLOBAL);
  void* const function = module != nullptr ? dlsym(module, name) : nullptr;
  if (function == nullptr) {
    throw Error(ErrorCode::kUnavailable,
                std::string("mpirun started several processes, but this folio has no MPI: ") + dlerror() +
                    "; build it where CMake finds one (FOLIO_MPI), or leave mpirun out: its ranks are then threads");
  }
  return reinterpret_cast<Function*>(function);
}

}  // namespace

MpiSession::MpiSession() {
  if (started_by_mpirun()) group_ = function_of_module<OpenMpiSession>(kOpenMpiSession)();
}

MpiSession::~MpiSession() {
  if (group_ != nullptr) function_of_module<CloseMpiSession>(kCloseMpiSession)(group_);
}

}  // namespace folio::cli
