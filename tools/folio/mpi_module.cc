#include "mpi_module.hpp"

#include <mpi.h>

#include "folio/distributed/mpi_group.hpp"

extern "C" {

FOLIO_API folio::cli::OpenMpiSession folio_cli_open_mpi_session;
FOLIO_API folio::cli::CloseMpiSession folio_cli_close_mpi_session;

folio::distributed::ProcessGroup* folio_cli_open_mpi_session() {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  return folio::distributed::make_mpi_group().release();
}

void folio_cli_close_mpi_session(folio::distributed::ProcessGroup* group) {
  delete group;
  MPI_Finalize();
}
}
