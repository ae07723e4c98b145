#include "folio/distributed/context_parallel.hpp"

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::distributed {

void get_dcp_local_seq_lens(std::span<const int32_t> seq_lens, int32_t world, int32_t rank, int32_t interleave,
                            std::span<int32_t> local) {
  core::require(local.size() == seq_lens.size(), "local has ", local.size(), " entries; there are ", seq_lens.size(),
                " lengths");
  shard_len(0, world, rank, interleave);  // refuses a bad shard also where there are no lengths
  for (size_t i = 0; i < seq_lens.size(); ++i) local[i] = shard_len(seq_lens[i], world, rank, interleave);
}

void get_dcp_local_seq_lens(std::span<const int32_t> seq_lens, int32_t world, int32_t interleave,
                            std::span<int32_t> local) {
  shard_len(0, world, 0, interleave);
  core::require(local.size() == seq_lens.size() * static_cast<size_t>(world), "local has ", local.size(), " entries; ",
                seq_lens.size(), " lengths on ", world, " ranks are ", seq_lens.size() * static_cast<size_t>(world));
  size_t next = 0;
  for (const int32_t length : seq_lens) {
    for (int32_t rank = 0; rank < world; ++rank) local[next++] = shard_len(length, world, rank, interleave);
  }
}

int32_t max_dcp_context_len(int32_t max_len, int32_t world, int32_t interleave) {
  core::require(max_len >= 0, "max_len is ", max_len, "; it must not be negative");
  shard_len(0, world, 0, interleave);
  const int64_t stripe = int64_t{world} * interleave;
  return core::checked_cast<int32_t>((max_len + stripe - 1) / stripe * interleave);
}

}  // namespace folio::inline v0::distributed
