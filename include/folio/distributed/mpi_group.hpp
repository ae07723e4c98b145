#pragma once

#include <chrono>
#include <memory>

#include "folio/distributed/process_group.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

struct MpiGroupOptions {
  /// A communicator (the address of an MPI_Comm), duplicated for this group's own use; null = MPI_COMM_WORLD.
  const void* communicator = nullptr;
  /// How long a rank waits for the others in one operation before the group fails. Above 0.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// A group of MPI processes, over host memory. In the library folio_mpi (CMake target folio::mpi), which is built where
/// CMake finds MPI. Collective. The engine has initialised MPI and finalises it after the group is gone; without
/// MPI_THREAD_MULTIPLE no other thread may call MPI meanwhile.
///
/// fail() reaches this rank only: MPI cannot recall a peer from an operation, so the others fail when their time is
/// up. After a failure an operation may still be under way in MPI, so buffers that were handed to it must stay until
/// the process ends, which is what should come next.
///
/// Throws kInvalidArgument for a timeout of 0 or less, kUnavailable before MPI_Init and after MPI_Finalize.
FOLIO_API std::unique_ptr<ProcessGroup> make_mpi_group(const MpiGroupOptions& options = {});

}  // namespace folio::inline v0::distributed
