#pragma once

#include <cstdint>
#include <span>

#include "folio/backends/token_pool/device_faults.hpp"
#include "folio/types/device.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"

/// The lists of slots, or pages, that a batch's requests attend to, gathered from the request table: kv_indptr and
/// kv_indices as FlashInfer's planners take them. Attention over whole rows needs none of this (the request table is a
/// page table already, ReqToTokenPool::table); windows cut off in front, encoder tokens before the decoder's and
/// draft branches do, and so do engines that hand CSR arrays to other kernels.
///
/// Behaviour after pymllm's create_kv_indices and SGLang's create_flashinfer_kv_indices_triton; those check nothing and
/// skip or overrun what lies outside. Host memory, unless a function takes DeviceFaults; nothing is allocated, and
/// errors are thrown before anything is written.
namespace folio::inline v0::backends {

/// What create_kv_indices reads, all borrowed. B requests; request i reads row req_pool_indices[i], positions
/// [start, start + paged_kernel_lens[i]).
struct KvIndicesArgs {
  /// The request table: dense, a slot per position (pages of one token), as ReqToTokenPool::table.
  PageTableView req_to_token;
  std::span<const int32_t> req_pool_indices;   ///< [B], rows in [0, req_to_token.num_rows); row 0 is padding's
  std::span<const int32_t> paged_kernel_lens;  ///< [B], tokens, >= 0
  /// [>= B + 1], entries: indptr[i + 1] - indptr[i] == ceil(paged_kernel_lens[i] / page_size), indptr[0] >= 0, as
  /// kv_indptr_from_lens makes it. What follows indptr[B] is not read.
  std::span<const int32_t> kv_indptr;
  /// [B], the first position that is read: what a window leaves out, or the encoder's tokens in front of the decoder's;
  /// empty = 0 for all. A multiple of page_size.
  std::span<const int32_t> kv_start_idx;
  /// 1: entries are slots. Above 1: entries are page ids, slot / page_size, one for every page_size tokens. The
  /// allocator must keep a page's tokens together; the first and the last token of each are checked for it. Row 0 may
  /// have slot 0 throughout, as ReqToTokenPool's: its entries are page 0.
  int32_t page_size = 1;
  int64_t num_slots = 0;  ///< given (> 0): every slot read must be in [0, num_slots). 0: slots are not looked at
};

/// Fills kv_indices[kv_indptr[i] .. kv_indptr[i + 1]) for every request; nothing outside [kv_indptr[0], kv_indptr[B])
/// is written, so that the array may be larger. O(B + entries); checking slots reads them a second time. Throws
/// kInvalidArgument naming the request for rows, positions, offsets and slots that are not as described, and for a
/// kv_indices with fewer than kv_indptr[B] entries; nothing is then written.
FOLIO_API void create_kv_indices(const KvIndicesArgs& args, std::span<int32_t> kv_indices);

/// The same with all arrays on the device of `faults`, enqueued on `stream`; captured graphs may hold it. Sizes are
/// checked and thrown at once. What only the device knows (rows, lengths, offsets, slots) it tells `faults`: a request
/// that create_kv_indices would refuse gets page 0, the dummy, wherever its entries would be, and so does a slot that
/// is none. On a CPU it is create_kv_indices.
FOLIO_API void create_kv_indices(const KvIndicesArgs& args, std::span<int32_t> kv_indices, DeviceFaults& faults,
                                 Stream stream = {});

/// indptr[0] = 0, indptr[i + 1] = indptr[i] + ceil(lens[i] / page_size) for every length; what follows in a longer
/// indptr stays as it is. Returns indptr[B]. O(B). Throws kInvalidArgument for negative lengths, sums beyond 32 bits,
/// page_size < 1 and fewer than B + 1 entries; nothing is then written.
FOLIO_API int32_t kv_indptr_from_lens(std::span<const int32_t> lens, int32_t page_size, std::span<int32_t> indptr);

/// The keys that queries at positions [prefix_lens[i], seq_lens[i]) see through a window: lens[i] keys from starts[i]
/// to the end of the sequence. A query at p sees [p - window_left, p], so that a decode keeps window_left + 1 keys;
/// window_left -1 keeps all. With page_size > 1 starts are rounded down to a page: the window must then be applied by
/// the kernel as well, with starts as the segment's first position; with several queries it must be in any case.
/// - prefix_lens: [B], in [0, seq_lens[i]]; empty = decodes, one query at the end of each sequence.
/// - lens, starts: [B], written.
/// O(B). Throws kInvalidArgument naming the request; nothing is then written.
FOLIO_API void window_kv_ranges(std::span<const int32_t> seq_lens, std::span<const int32_t> prefix_lens,
                                int32_t window_left, int32_t page_size, std::span<int32_t> lens,
                                std::span<int32_t> starts);

/// The part of the cached prefix that the first new token, at prefix_lens[i], sees through a window: what the paged
/// side of an extend reads when the new tokens are handed over ragged. At most window_left keys (page_size 1), none of
/// the new tokens'. Otherwise as window_kv_ranges.
FOLIO_API void window_prefix_ranges(std::span<const int32_t> prefix_lens, int32_t window_left, int32_t page_size,
                                    std::span<int32_t> lens, std::span<int32_t> starts);

}  // namespace folio::inline v0::backends
