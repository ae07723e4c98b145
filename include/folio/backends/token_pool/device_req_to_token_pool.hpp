#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "folio/backends/token_pool/device_faults.hpp"
#include "folio/kvcache/req_to_token_pool.hpp"

namespace folio::inline v0::backends {

/// A batch's new slots for the request table, B requests, all borrowed: request i writes at positions first[i],
/// first[i] + 1, ... of row req_pool_indices[i]. Requests with row 0, the dummy row, are padding: their slots are
/// skipped.
///
///     {.req_pool_indices = rows, .first = extend_prefix_lens, .lens = extend_seq_lens, .out_cache_loc = slots}
///     {.req_pool_indices = rows, .ends = seq_lens, .out_cache_loc = slots}                           // decodes
///     {.req_pool_indices = rows, .first = seq_lens, .tokens_per_request = n, .out_cache_loc = slots}  // drafts
struct ReqToTokenWrites {
  std::span<const int32_t> req_pool_indices{};  ///< [B], rows
  std::span<const int32_t> first{};             ///< [B], the first position; or `ends`
  std::span<const int32_t> ends{};              ///< [B], the position behind the last
  std::span<const int32_t> lens{};              ///< [B], slots of each request; empty = tokens_per_request each
  int32_t tokens_per_request = 1;               ///< where there are no lens
  std::span<const int32_t> slots{};             ///< one request's after the other's; or `out_cache_loc`
  std::span<const int64_t> out_cache_loc{};
};

/// ReqToTokenPool with its table in the memory of a context's device, as pymllm and SGLang keep it: TokenPoolBackend
/// and the lists of slots read it there. Rows are handed out on the host; writes are enqueued on a stream, one kernel
/// each, and nothing waits for the GPU.
///
///     DeviceReqToTokenPool rows(context, max_requests, max_context_len);
///     config.req_to_token = rows.table();
///     std::optional<int32_t> row = rows.alloc();
///     rows.write(*row, 0, prefix_slots, stream);       // from the host
///     rows.write(writes, faults, stream);              // from the device: a captured graph may hold it
///
/// An engine that keeps its slots on the host too (for PrefixCache) makes it of its ReqToTokenPool: rows are then the
/// host pool's, and each write goes to both.
///
/// Work on other streams that reads the table must be ordered behind writes by the caller. On a CPU the table is host
/// memory and writes are done on return. Not thread-safe.
class FOLIO_API DeviceReqToTokenPool {
 public:
  /// All entries 0. Throws kInvalidArgument as ReqToTokenPool, kUnavailable, kOutOfMemory.
  DeviceReqToTokenPool(const Context& context, int32_t max_reqs, int32_t max_context_len);

  /// A copy of `host`, with what it holds now. `host` must outlive it, and is written through it from now on. On a CPU
  /// there is one table, the host's.
  DeviceReqToTokenPool(const Context& context, ReqToTokenPool& host);

  /// Waits for writes from the host that are under way.
  ~DeviceReqToTokenPool();
  DeviceReqToTokenPool(DeviceReqToTokenPool&&) noexcept;
  DeviceReqToTokenPool& operator=(DeviceReqToTokenPool&&) noexcept;

  int32_t size() const noexcept;  ///< requests that can run at once
  int32_t max_context_len() const noexcept;
  int32_t available() const noexcept;
  bool is_held(int32_t row) const noexcept;
  Device device() const noexcept;

  /// As ReqToTokenPool's. A row's entries stay until they are written again.
  std::optional<int32_t> alloc();
  [[nodiscard]] bool alloc(std::span<int32_t> rows);
  void free(int32_t row);

  /// Slots on the host at positions first, first + 1, ... of a held row. They may be changed on return. Throws
  /// kInvalidArgument for a row that is not held, for positions outside [0, max_context_len) and for a stream under
  /// capture; nothing is then written. Slots are not checked. O(slots); allocates when more writes are under way than
  /// ever before.
  void write(int32_t row, int32_t first, std::span<const int32_t> slots, Stream stream = {});

  /// A batch's slots, arrays on the host: one kernel. Throws as above, naming the request, and for arrays of other
  /// sizes.
  void write(const ReqToTokenWrites& writes, Stream stream = {});

  /// The same, arrays on the device of `faults` (DeviceFaults), which is this pool's; which rows are held is not looked
  /// at. A request beyond the table or the slots given is left out, and so is a slot beyond 32 bits. Throws
  /// kInvalidArgument on a GPU for a copy of a host pool, which would not learn of them.
  void write(const ReqToTokenWrites& writes, DeviceFaults& faults, Stream stream = {});

  /// The table on the device, borrowed: size() + 1 rows of max_context_len entries, pages of one token. Its address
  /// stays.
  PageTableView table() const noexcept;

  /// All rows free, in ascending order, and all entries 0, enqueued on `stream`.
  void clear(Stream stream = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace folio::inline v0::backends
