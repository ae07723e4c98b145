#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "distributed/dcp_case_test_util.hpp"
#include "folio/backends/common.hpp"
#include "folio/backends/flash_attn.hpp"
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

/// What a test does with FlashAttention's options and with what was built.
struct FlashAttentionHooks {
  std::function<void(FlashAttentionOptions& options)> options;
  std::function<void(FlashAttentionMetadata& metadata)> built;
  bool builds_with_layers = false;  ///< once more, where Home::run_layers enqueues the layers
};

/// Where a step's arrays lie while it runs: in the case's own memory.
class Home {
 public:
  virtual ~Home() = default;
  virtual Where where() const { return Where::kHost; }
  /// The array where the context's kernels find it; what they write is in the case once `finish` has returned.
  virtual void* move_in(void* data, size_t /*bytes*/) { return data; }
  virtual void finish() {}
  /// The stream that the step's calls take.
  virtual Stream stream() const { return {}; }
  /// Runs what enqueues the layers, once `build` has planned the step.
  virtual void run_layers(const std::function<void()>& layers) { layers(); }

  template <typename T>
  std::span<T> move_in(std::span<T> values) {
    using Value = std::remove_const_t<T>;
    return {static_cast<T*>(move_in(const_cast<Value*>(values.data()), values.size_bytes())), values.size()};
  }
  template <typename T>
  std::span<T> move_in(std::vector<T>& values) {
    return move_in(std::span<T>(values));
  }
};

/// One rank's step through a backend's builder and implementation, cache write included, after `change`. The case's
/// `out` is filled; `home` null: in host memory. Backends return no LSE, so that a case's own is what it was.
void run_backend(DcpCase& whole, BackendKind kind, distributed::ProcessGroup& group, const Context& context,
                 const Change& change = {}, Home* home = nullptr, const FlashAttentionHooks& hooks = {});

}  // namespace folio::backends::testing
