#pragma once

#include <cstddef>
#include <optional>

#include "folio/context.hpp"
#include "folio/pools.hpp"
#include "replay/memory.hpp"
#include "replay/stack_config.hpp"

namespace folio::replay {

/// A KvPool in the context's memory; on a CPU pages that nobody writes take none.
class MappedKvPool {
 public:
  MappedKvPool() = default;
  /// `num_layers` layers of `num_pages` pages, beside the dummy page, as the config's heads, page size and dtype have
  /// them. Throws kOutOfMemory.
  MappedKvPool(const Context& context, const StackConfig& config, KvFormat format, int32_t num_layers,
               int32_t num_pages);

  const KvPool& pool() const { return *pool_; }
  size_t bytes() const { return memory_.bytes(); }
  size_t resident_bytes() const { return memory_.resident_bytes(); }

 private:
  MappedMemory memory_;
  std::optional<KvPool> pool_;
};

}  // namespace folio::replay
