#include "backends/token_pool/step.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

#include "backends/token_pool/device/kv_range_rule.hpp"
#include "backends/token_pool/ranks.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends::token_pool {
namespace {

using core::require;

/// The host's copy of an array that is given once per memory.
std::span<const int32_t> host_lengths(const char* name, std::span<const int32_t> given, std::span<const int32_t> on_cpu,
                                      size_t count, bool on_host) {
  const std::span<const int32_t> host = on_host && on_cpu.empty() ? given : on_cpu;
  require(host.size() == count, name, on_host ? "" : "_cpu", " has ", host.size(), " entries; the batch has ", count,
          " requests");
  require(given.size() == count || (on_host && given.empty()), name, " has ", given.size(), " entries; the batch has ",
          count, " requests");
  if (on_host && !given.empty() && !on_cpu.empty()) {
    require(std::ranges::equal(given, on_cpu), name, " and ", name, "_cpu differ");
  }
  return host;
}

void copy(std::span<const int32_t> from, std::vector<int32_t>& to) {
  to.assign(from.begin(), from.end());
}

/// Bits [begin, begin + count) of a block, count in [1, 64].
uint64_t bits_at(std::span<const uint8_t> block, int64_t begin, int64_t count) {
  const auto first = static_cast<size_t>(begin / 8);
  const auto shift = static_cast<int>(begin % 8);
  const auto bytes = static_cast<size_t>(core::ceil_div(shift + count, int64_t{8}));
  uint64_t value = 0;
  for (size_t i = 0; i < std::min<size_t>(bytes, 8); ++i) value |= uint64_t{block[first + i]} << (8 * i);
  value >>= shift;
  if (bytes == 9) value |= uint64_t{block[first + 8]} << (64 - shift);
  return count == 64 ? value : value & ((uint64_t{1} << count) - 1);
}

/// What a draft sees must be itself and what its parent sees: its parent is the last draft that it sees before itself.
void check_tree(std::span<const uint8_t> block, int64_t request, int64_t n) {
  constexpr int64_t kWord = 64;
  const auto word_at = [&](int64_t row, int64_t word) {
    return bits_at(block, row * n + word * kWord, std::min(kWord, n - word * kWord));
  };
  for (int64_t row = 0; row < n; ++row) {
    int64_t parent = -1;
    for (int64_t word = 0; word * kWord < n; ++word) {
      const int64_t own = row - word * kWord;  // the row's own bit of this word, if it is in it
      const uint64_t before = own <= 0 ? 0 : own >= kWord ? ~uint64_t{0} : (uint64_t{1} << own) - 1;
      const uint64_t own_bit = own >= 0 && own < kWord ? uint64_t{1} << own : 0;
      const uint64_t seen = word_at(row, word);
      require((seen & own_bit) == own_bit, "tree_mask of request ", request, ": draft ", row, " does not see itself");
      const uint64_t later = seen & ~(before | own_bit);
      require(later == 0, "tree_mask of request ", request, ": draft ", row, " sees draft ",
              word * kWord + std::countr_zero(later), "; a draft's ancestors come before it");
      if ((seen & before) != 0) parent = word * kWord + kWord - 1 - std::countl_zero(seen & before);
    }
    if (row == 0) continue;
    require(parent >= 0, "tree_mask of request ", request, ": draft ", row, " does not see draft 0, the root");
    for (int64_t word = 0; word * kWord < n; ++word) {
      const int64_t own = row - word * kWord;
      const uint64_t own_bit = own >= 0 && own < kWord ? uint64_t{1} << own : 0;
      const uint64_t differ = (word_at(row, word) & ~own_bit) ^ word_at(parent, word);
      require(differ == 0, "tree_mask of request ", request, ": draft ", row, " and its parent, draft ", parent,
              ", do not both see draft ", word * kWord + std::countr_zero(differ),
              "; a draft sees what its parent sees, and itself");
    }
  }
}

void check_tree_mask(const SpecInfo& spec, int32_t num_requests, bool on_host) {
  const int64_t n = spec.draft_token_num;
  const int64_t bytes_each = core::ceil_div(n * n, int64_t{8});
  require(static_cast<int64_t>(spec.tree_mask.size()) == num_requests * bytes_each, "tree_mask has ",
          spec.tree_mask.size(), " bytes; ", num_requests, " requests with ", n, " drafts each have ", bytes_each,
          " bytes each");
  require(spec.tree_mask_cpu.empty() || spec.tree_mask_cpu.size() == spec.tree_mask.size(), "tree_mask_cpu has ",
          spec.tree_mask_cpu.size(), " bytes; tree_mask has ", spec.tree_mask.size());
  const std::span<const uint8_t> mask = on_host ? spec.tree_mask : spec.tree_mask_cpu;
  for (int64_t r = 0; r < num_requests && !mask.empty(); ++r) {
    check_tree(mask.subspan(static_cast<size_t>(r * bytes_each), static_cast<size_t>(bytes_each)), r, n);
  }
}

void check_mode(const TokenPoolConfig& config, const ForwardBatch& batch) {
  const ForwardMode mode = batch.forward_mode;
  require(to_string(mode) != "invalid", "forward_mode is ", static_cast<int32_t>(mode));
  const SpecInfo& spec = batch.spec_info;
  const bool verify = is_target_verify(mode);
  require(!config.skip_prefill || is_decode_or_idle(mode), "forward_mode is ", to_string(mode),
          "; a backend with skip_prefill takes decode and idle");
  require(verify || spec.tree_mask.empty(), "spec_info.tree_mask is given; forward_mode is ", to_string(mode));
  require(verify || spec.draft_token_num == 0, "spec_info.draft_token_num is given; forward_mode is ", to_string(mode));
  require(!verify || spec.draft_token_num >= 1, "spec_info.draft_token_num is ", spec.draft_token_num,
          "; target_verify needs 1 or more");
  const bool drafts = !spec.kv_indptr.empty() || !spec.kv_indices.empty();
  require(!drafts || is_decode(mode), "spec_info.kv_indptr is given; forward_mode is ", to_string(mode));
  const bool prefixes = !batch.extend_prefix_lens.empty() || !batch.extend_prefix_lens_cpu.empty() ||
                        !batch.extend_seq_lens.empty() || !batch.extend_seq_lens_cpu.empty();
  require(!prefixes || is_extend(mode), "extend_prefix_lens or extend_seq_lens is given; forward_mode is ",
          to_string(mode));
  const bool encoder = !batch.encoder_lens.empty() || !batch.encoder_lens_cpu.empty();
  const bool two_pools = config.window_req_to_token.indices != nullptr;
  require(two_pools || (batch.window_token_to_kv_pool == nullptr && batch.window_out_cache_loc.empty()),
          "window_token_to_kv_pool or window_out_cache_loc is given; the configuration has no window_req_to_token");
  require(!encoder || config.is_encoder_decoder, "encoder_lens is given; the model is no encoder-decoder");
  if (drafts && (config.page_size != 1 || config.is_encoder_decoder || two_pools)) {
    core::fail(
        ErrorCode::kUnsupported,
        "spec_info.kv_indptr is given; draft rows are offered with page_size 1, one pool and decoder-only models");
  }
  if (shard_of(config).world == 1) return;
  if (drafts) {
    core::fail(ErrorCode::kUnsupported, "spec_info.kv_indptr is given with a dcp_group; draft rows name slots of one ",
               "rank, and not which tokens these are");
  }
  if (!spec.tree_mask.empty()) {
    core::fail(ErrorCode::kUnsupported, "spec_info.tree_mask is given with a dcp_group; over ranks drafts are chains");
  }
}

}  // namespace

void Step::read(const TokenPoolConfig& config, const ForwardBatch& batch, bool on_host, bool captured) {
  check_mode(config, batch);
  mode = batch.forward_mode;
  extend = is_extend(mode);
  spec_info = batch.spec_info;
  draft_token_num = spec_info.draft_token_num;
  require(batch.batch_size >= 0 && batch.batch_size <= config.max_req_pool_size, "batch_size is ", batch.batch_size,
          "; it must be in [0, ", config.max_req_pool_size, "], max_req_pool_size");
  num_requests = batch.batch_size;
  const auto count = static_cast<size_t>(batch.batch_size);
  const bool twin_missing =
      has_draft_rows() ? spec_info.kv_indptr_cpu.empty() || batch.seq_lens_cpu.empty() : batch.seq_lens_cpu.empty();
  lengths_known = on_host || !captured || !twin_missing || !spec_info.tree_mask.empty();
  stand_in_lengths = false;
  seq_lens_sum = batch.seq_lens_sum;
  read_lengths(config, batch, on_host);
  const auto slots_of = [](const KvPool* pool) { return pool == nullptr ? 0 : pool->buffer_len(); };
  const bool two_pools = config.window_req_to_token.indices != nullptr;
  num_slots = slots_of(batch.token_to_kv_pool);
  num_window_slots = two_pools ? slots_of(batch.window_token_to_kv_pool) : num_slots;
  if (has_draft_rows() || !spec_info.kv_indices.empty()) {
    read_draft_rows(config, batch, on_host);
    return;
  }
  require(batch.req_pool_indices.size() == count, "req_pool_indices has ", batch.req_pool_indices.size(),
          " entries; the batch has ", count, " requests");
  rows = batch.req_pool_indices;
  device_seq_lens = batch.seq_lens.data();
  read_encoders(config, batch, on_host);
  no_prefix = false;
  prefix_lens.clear();
  device_prefix_lens = nullptr;
  if (extend) read_extends(batch, on_host);
  if (!spec_info.tree_mask.empty()) check_tree_mask(spec_info, num_requests, on_host);
  cu_q.resize(count + 1);
  cu_q[0] = 0;
  for (size_t r = 0; r < count; ++r) {
    const int32_t q_len = extend ? seq_lens[r] - prefix_lens[r] : queries();
    cu_q[r + 1] = core::checked_cast<int32_t>(int64_t{cu_q[r]} + q_len);
  }
  num_tokens = cu_q[count];
  if (shard_of(config).world > 1 && lengths_known) check_queries();
}

/// Ranks divide positions, and a query that has none could not be placed.
void Step::check_queries() const {
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    require(extend || seq_lens[r] + drafts() >= queries(), "request ", r, " has seq_len ", seq_lens[r],
            "; over ranks padding requests have length 1");
  }
}

void Step::read_lengths(const TokenPoolConfig& config, const ForwardBatch& batch, bool on_host) {
  const auto count = static_cast<size_t>(num_requests);
  seq_lens.clear();
  if (!lengths_known) {
    require(batch.seq_lens.size() == count, "seq_lens has ", batch.seq_lens.size(), " entries; the batch has ", count,
            " requests");
    return;
  }
  copy(host_lengths("seq_lens", batch.seq_lens, batch.seq_lens_cpu, count, on_host), seq_lens);
  int64_t sum = 0;
  for (size_t r = 0; r < count; ++r) {
    require(seq_lens[r] >= 0 && seq_lens[r] <= config.max_context_len, "request ", r, " has seq_len ", seq_lens[r],
            "; it must be in [0, ", config.max_context_len, "], max_context_len");
    sum += seq_lens[r];
  }
  require(batch.seq_lens_sum < 0 || batch.seq_lens_sum == sum, "seq_lens_sum is ", batch.seq_lens_sum,
          "; seq_lens, padding included, add up to ", sum);
}

void Step::read_encoders(const TokenPoolConfig& config, const ForwardBatch& batch, bool on_host) {
  encoder_lens.clear();
  device_encoder_lens = nullptr;
  if (!config.is_encoder_decoder) return;
  const auto count = static_cast<size_t>(num_requests);
  device_encoder_lens = batch.encoder_lens.data();
  if (!lengths_known) {
    require(batch.encoder_lens_cpu.empty() || batch.encoder_lens_cpu.size() == count, "encoder_lens_cpu has ",
            batch.encoder_lens_cpu.size(), " entries; the batch has ", count, " requests");
    require(batch.encoder_lens.size() == count, "encoder_lens has ", batch.encoder_lens.size(),
            " entries; the batch has ", count, " requests");
    return;
  }
  copy(host_lengths("encoder_lens", batch.encoder_lens, batch.encoder_lens_cpu, count, on_host), encoder_lens);
  for (size_t r = 0; r < count; ++r) {
    require(encoder_lens[r] >= 0, "request ", r, " has encoder_len ", encoder_lens[r], "; it must not be negative");
  }
}

void Step::check_new_slots(const SlotTable& table, const KvShard& shard, std::span<const int64_t> slots,
                           const char* name) const {
  if (rows.empty() || static_cast<int64_t>(slots.size()) != num_tokens) return;  // a write refuses other sizes
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t first = extend ? prefix_lens[r] : int64_t{seq_lens[r]} + drafts() - queries();
    const int64_t encoder = encoder_lens.empty() ? 0 : own_tokens(shard, encoder_lens[r]);
    for (int32_t token = cu_q[r]; token < cu_q[r + 1]; ++token) {
      const int64_t slot = slots[static_cast<size_t>(token)];
      const int64_t position = first + token - cu_q[r];
      if (slot < 0 || position < 0) continue;  // not stored; or padding of length 0, which has no position
      if (shard.world > 1 && rows[r] == kPaddingRow && slot == kDummySlot) continue;  // padding, on every rank
      const int32_t before = own_tokens(shard, static_cast<int32_t>(position));
      require(own_tokens(shard, static_cast<int32_t>(position) + 1) > before, name, " has slot ", slot, " for token ",
              token, ", position ", position, " of request ", r, ", which lies on another rank than this, ", shard.rank,
              ": its slot must be negative");
      const int64_t column = encoder + before;
      require(column < table.columns_of(rows[r]), "request ", r, " stores a token at position ", column, " of row ",
              rows[r], ", which has ", table.columns_of(rows[r]));
      require(slot == table.at(rows[r], column), name, " has slot ", slot, " for token ", token, "; request ", r,
              " has slot ", table.at(rows[r], column), " at position ", column, " of row ", rows[r],
              " of the request table");
    }
  }
}

void Step::read_extends(const ForwardBatch& batch, bool on_host) {
  const auto count = static_cast<size_t>(num_requests);
  const bool has_lens = !batch.extend_seq_lens.empty() || !batch.extend_seq_lens_cpu.empty();
  const bool has_prefixes = !batch.extend_prefix_lens.empty() || !batch.extend_prefix_lens_cpu.empty();
  std::span<const int32_t> lens;
  if (has_lens) {
    const bool host_twin = !batch.extend_seq_lens_cpu.empty() || !on_host;  // nobody reads a device's
    lens = host_twin ? batch.extend_seq_lens_cpu : batch.extend_seq_lens;
    require(lens.size() == count, "extend_seq_lens", host_twin ? "_cpu" : "", " has ", lens.size(),
            " entries; the batch has ", count, " requests");
  }
  if (has_prefixes) {
    copy(host_lengths("extend_prefix_lens", batch.extend_prefix_lens, batch.extend_prefix_lens_cpu, count, on_host),
         prefix_lens);
  } else {
    require(on_host || count == 0, "extend_prefix_lens is needed on a GPU");
    prefix_lens.assign(count, 0);
    for (size_t r = 0; has_lens && r < count; ++r) prefix_lens[r] = seq_lens[r] - lens[r];
  }
  device_prefix_lens = batch.extend_prefix_lens.data();
  no_prefix = true;
  for (size_t r = 0; r < count; ++r) {
    require(prefix_lens[r] >= 0 && prefix_lens[r] <= seq_lens[r], "request ", r, " has a prefix of ", prefix_lens[r],
            " tokens; it must be in [0, ", seq_lens[r], "], its seq_len");
    require(!has_lens || lens[r] == seq_lens[r] - prefix_lens[r], "request ", r, " has extend_seq_len ",
            has_lens ? lens[r] : 0, "; seq_len ", seq_lens[r], " less its prefix of ", prefix_lens[r], " tokens is ",
            seq_lens[r] - prefix_lens[r]);
    no_prefix = no_prefix && prefix_lens[r] == 0;
  }
}

/// A row for each branch of each request: seq_lens of rows are those of their lists.
void Step::read_draft_rows(const TokenPoolConfig& config, const ForwardBatch& batch, bool on_host) {
  const SpecInfo& spec = batch.spec_info;
  require(!spec.kv_indptr.empty(), "spec_info.kv_indices is given without kv_indptr");
  const bool host_twin = lengths_known && (!spec.kv_indptr_cpu.empty() || !on_host);
  const std::span<const int32_t> indptr = host_twin ? spec.kv_indptr_cpu : spec.kv_indptr;
  require(indptr.size() == spec.kv_indptr.size(), "spec_info.kv_indptr_cpu has ", indptr.size(),
          " entries; kv_indptr has ", spec.kv_indptr.size());
  require(static_cast<int64_t>(indptr.size()) - 1 <= config.max_req_pool_size, "spec_info.kv_indptr has ",
          indptr.size() - 1, " rows; max_req_pool_size is ", config.max_req_pool_size);
  num_requests = core::checked_cast<int32_t>(indptr.size() - 1);
  require(batch.batch_size == 0 ? num_requests == 0 : num_requests % batch.batch_size == 0, "spec_info.kv_indptr has ",
          num_requests, " rows; a batch of ", batch.batch_size, " requests has as many branches for each");
  cu_q.resize(indptr.size());
  std::iota(cu_q.begin(), cu_q.end(), 0);
  num_tokens = num_requests;
  rows = {};
  encoder_lens.clear();
  prefix_lens.clear();
  no_prefix = false;
  if (!lengths_known) return;
  require(indptr[0] == 0, "spec_info.kv_indptr[0] is ", indptr[0], "; it must be 0");
  const auto count = static_cast<size_t>(num_requests);
  seq_lens.resize(count);
  for (size_t r = 0; r < count; ++r) {
    const int64_t len = int64_t{indptr[r + 1]} - indptr[r];
    require(len >= 0 && indptr[r + 1] <= static_cast<int64_t>(spec.kv_indices.size()), "draft row ", r,
            " has entries [", indptr[r], ", ", indptr[r + 1], ") of spec_info.kv_indptr; kv_indices has ",
            spec.kv_indices.size());
    seq_lens[r] = static_cast<int32_t>(len);
  }
  if (on_host && num_slots > 0) {
    for (const int32_t slot : spec.kv_indices.first(static_cast<size_t>(indptr[count]))) {
      require(slot >= 0 && slot < num_slots, "spec_info.kv_indices has slot ", slot, "; the pool has ", num_slots);
    }
  }
}

}  // namespace folio::inline v0::backends::token_pool
