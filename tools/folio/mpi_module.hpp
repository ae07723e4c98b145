#pragma once

#include "folio/distributed.hpp"

/// The part of the program that needs MPI: a module of its own, which is loaded under mpirun alone. Everywhere else the
/// program neither needs nor loads libmpi.
namespace folio::cli {

inline constexpr const char* kMpiModule = "folio_cli_mpi.so";

/// Initialises MPI and makes the group of all its processes. May throw folio::Error.
using OpenMpiSession = distributed::ProcessGroup*();
inline constexpr const char* kOpenMpiSession = "folio_cli_open_mpi_session";

/// Destroys the group and finalises MPI.
using CloseMpiSession = void(distributed::ProcessGroup*);
inline constexpr const char* kCloseMpiSession = "folio_cli_close_mpi_session";

}  // namespace folio::cli
