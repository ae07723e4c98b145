#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "folio/context.hpp"
#include "folio/distributed/process_group.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

struct ThreadGroupOptions {
  /// How long a rank waits for the others in one operation before the group fails. Above 0.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// A GPU's: buffers lie in its memory, and every rank may have a stream of its own. An operation waits for its rank's
  /// stream before peers read what was sent, and for its own result before it returns: it cannot be captured. At most
  /// 64 ranks. A CPU's, or none: host memory.
  std::optional<Context> context = std::nullopt;
};

/// A group inside this process: handle r is rank r's and is given to one thread. Peers' buffers are read where they
/// lie; nothing is allocated by an operation. A handle that is destroyed while others wait for it makes them fail, so a
/// thread that owns its handle may simply throw. Handles may outlive each other. Throws kInvalidArgument unless world
/// >= 1 and the timeout is above 0.
FOLIO_API std::vector<std::unique_ptr<ProcessGroup>> make_thread_groups(int32_t world,
                                                                        const ThreadGroupOptions& options = {});

/// Runs body(group) on `world` threads, one a rank, and returns when all have ended. A body that ends, by throwing or
/// otherwise, has left the group, so that no other waits for it for long. The first error that was thrown is thrown
/// then. Throws kOutOfMemory if the OS gives fewer threads; the ranks that already run then fail at once.
FOLIO_API void run_ranks(int32_t world, const std::function<void(ProcessGroup& group)>& body,
                         const ThreadGroupOptions& options = {});

}  // namespace folio::inline v0::distributed
