#pragma once

#include <functional>
#include <string>
#include <vector>

#include "distributed/dcp_case_for_test.hpp"
#include "folio/backends/common.hpp"
#include "folio/distributed.hpp"

namespace folio::backends::testing {

using distributed::testing::DcpCase;
using distributed::testing::DcpSetup;

enum class BackendKind { kFlashInfer, kFlashAttention };
inline constexpr BackendKind kBackends[] = {BackendKind::kFlashInfer, BackendKind::kFlashAttention};

/// What goes with a setup and a backend: the step writes the new tokens; FlashInfer reads those of decodes, which stand
/// in front, from the cache. Encoders are FlashAttention's.
DcpSetup for_backend(DcpSetup setup, BackendKind kind);

using Change = std::function<void(EngineConfig& engine, CommonAttentionMetadata& batch)>;

/// One rank's step through a backend's builder and implementation, cache write included, after `change`. The case's
/// `out` is filled; backends return no LSE, so that a case's own is what it was.
void run_backend(DcpCase& whole, BackendKind kind, distributed::ProcessGroup& group, const Context& context,
                 const Change& change = {});

}  // namespace folio::backends::testing
