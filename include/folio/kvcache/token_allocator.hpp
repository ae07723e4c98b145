#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "folio/types/export.hpp"

namespace folio::inline v0 {

/// Hands out the slots of a KvPool: the places of tokens. Slots below page_size are the dummy page, which takes padded
/// writes and is never handed out; slots page_size to size() + page_size - 1 are.
///
///     TokenAllocator allocator(pool_slots, page_size);
///     std::vector<int32_t> slots(num_new_tokens);
///     if (!allocator.alloc(slots)) ... evict from the prefix cache and try again ...
///     allocator.free(slots);
///
/// The unit of allocation is a page; a slot is page * page_size + offset. The order is deterministic: the lowest free
/// pages first; pages that were freed wait on a release list until the others no longer suffice (SGLang's order with
/// sorting on). Nothing is sorted, and after construction nothing is allocated: pages are bits.
///
/// What is not free is held. Freeing a slot that is not held (freed twice, foreign, the dummy page, never handed out)
/// throws kInvalidArgument naming it, and nothing changes. Freeing any slot of a page gives back the whole page.
///
/// Times below are for n slots of P pages in all. A call that needs the release list, or that comes upon a range
/// without free pages, reads some of the P / 64 words of bits besides, each once per merge. Host only; not thread-safe.
class FOLIO_API TokenAllocator {
 public:
  /// `num_slots`: slots to hand out, a multiple of page_size, at most 2^31 - 1 - page_size. Throws kInvalidArgument.
  explicit TokenAllocator(int32_t num_slots, int32_t page_size = 1);
  ~TokenAllocator();
  TokenAllocator(const TokenAllocator&) = delete;
  TokenAllocator& operator=(const TokenAllocator&) = delete;

  int32_t size() const noexcept;  ///< slots that it has to hand out
  int32_t page_size() const noexcept;
  int32_t available() const noexcept;  ///< slots of free and released pages; those of an open group do not count
  bool is_held(int32_t slot) const noexcept;

  /// Fills `slots` from ceil(n / page_size) fresh pages, page by page; of the last page the first ones. All or nothing:
  /// false, and nothing changed, if there are too few pages. O(n).
  [[nodiscard]] bool alloc(std::span<int32_t> slots);

  /// Slots for R requests that grow from prefix_lens[r] to seq_lens[r] tokens, so that every page_size tokens of a
  /// request lie in one page, in order: first the rest of the page that last_slots[r], the slot of token
  /// prefix_lens[r] - 1, lies in, then fresh pages. `slots` has sum(seq_lens - prefix_lens) entries, request after
  /// request; last_slots[r] is not read where prefix_lens[r] is 0. All or nothing, as above. Throws kInvalidArgument
  /// naming the request: lengths that shrink, a last slot that is not held or not at that offset of its page, a next
  /// slot that is held already (another request's). O(n + R).
  [[nodiscard]] bool alloc_extend(std::span<const int32_t> prefix_lens, std::span<const int32_t> seq_lens,
                                  std::span<const int32_t> last_slots, std::span<int32_t> slots);

  /// alloc_extend by one token a request: seq_lens count it. `slots` has R entries. O(R).
  [[nodiscard]] bool alloc_decode(std::span<const int32_t> seq_lens, std::span<const int32_t> last_slots,
                                  std::span<int32_t> slots);

  /// How many fresh pages alloc_extend would take for `num_slots` slots or, without prefix_lens, alloc_decode. Throws
  /// as they do; changes nothing. O(R).
  int64_t fresh_pages(std::span<const int32_t> prefix_lens, std::span<const int32_t> seq_lens,
                      std::span<const int32_t> last_slots, size_t num_slots);

  /// Gives the slots' pages to the release list, or to the open group. A slot may occur once; several slots of a page
  /// may come in one call, or in several calls of one group. O(n + pages * page_size).
  void free(std::span<const int32_t> slots);

  /// While it lives, freed pages are held back; when it ends they go to the release list. One at a time.
  class FOLIO_API FreeGroup {
   public:
    FreeGroup(FreeGroup&& other) noexcept;
    FreeGroup& operator=(FreeGroup&&) = delete;
    ~FreeGroup();

   private:
    friend class TokenAllocator;
    explicit FreeGroup(TokenAllocator* allocator) noexcept : allocator_(allocator) {}
    TokenAllocator* allocator_;
  };

  /// Opens a group. Throws kInvalidArgument if one is open. The allocator must outlive it.
  [[nodiscard]] FreeGroup free_group();

  /// Everything free, as constructed. Throws kInvalidArgument while a group is open. O(size).
  void clear();

  /// Throws kInternal if a page is not in exactly one state, or a count is wrong. O(size); for tests.
  void check_invariants() const;

 private:
  struct State;
  class Growth;
  std::unique_ptr<State> state_;
};

}  // namespace folio::inline v0
