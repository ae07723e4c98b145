#pragma once

/// Attention over a KV cache that is divided over several ranks: process groups, context parallelism, and the combining
/// of partial results. The MPI group is a library of its own: folio/distributed/mpi_group.hpp.
#include "folio/distributed/context_parallel.hpp"  // IWYU pragma: export
#include "folio/distributed/dcp_attention.hpp"     // IWYU pragma: export
#include "folio/distributed/lse_combine.hpp"       // IWYU pragma: export
#include "folio/distributed/pcp_attention.hpp"     // IWYU pragma: export
#include "folio/distributed/pcp_tokens.hpp"        // IWYU pragma: export
#include "folio/distributed/process_group.hpp"     // IWYU pragma: export
#include "folio/distributed/simulated_group.hpp"   // IWYU pragma: export
#include "folio/distributed/thread_group.hpp"      // IWYU pragma: export
