#include "mpi_session.hpp"

#include <cstdlib>
#include <string>

#ifdef FOLIO_CLI_HAS_MPI
#include <mpi.h>

#include "folio/distributed/mpi_group.hpp"
#endif

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

}  // namespace

MpiSession::MpiSession() {
  if (!started_by_mpirun()) return;
#ifdef FOLIO_CLI_HAS_MPI
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  initialised_ = true;
  group_ = distributed::make_mpi_group();
#else
  throw Error(ErrorCode::kUnavailable,
              "mpirun started several processes, but this build of folio has no MPI; --ranks without mpirun runs its "
              "ranks as threads");
#endif
}

MpiSession::~MpiSession() {
  group_.reset();
#ifdef FOLIO_CLI_HAS_MPI
  if (initialised_) MPI_Finalize();
#endif
}

}  // namespace folio::cli
