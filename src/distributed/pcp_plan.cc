// A step's plan: chunks as requests of their own, segments, positions.
#include <algorithm>
#include <exception>
#include <numeric>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "distributed/pcp_state.hpp"
#include "folio/distributed/context_parallel.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::distributed {

void ChunkRows::clear() {
  cu_q.assign(1, 0);
  q_first.clear();
  kv_first.clear();
  request.clear();
}

void ChunkRows::add(int32_t q_len, int32_t first_query, int32_t first_key, int32_t of_request) {
  cu_q.push_back(core::checked_cast<int32_t>(int64_t{cu_q.back()} + q_len));
  q_first.push_back(first_query);
  kv_first.push_back(first_key);
  request.push_back(of_request);
}

void ChunkKeys::clear() {
  kv_len.clear();
  indptr.assign(1, 0);
  indices.clear();
}

void ChunkKeys::add(int32_t tokens, int32_t page_size) {
  kv_len.push_back(tokens);
  indptr.push_back(core::checked_cast<int32_t>(int64_t{indptr.back()} + pages_for(tokens, page_size)));
}

void ChunkKeys::add(int32_t tokens, int32_t page_size, int32_t first_page) {
  add(tokens, page_size);
  while (indices.size() < static_cast<size_t>(indptr.back())) indices.push_back(first_page++);
}

void StepImage::reserve(const attention::GpuBackend& gpu, size_t bytes) {
  if (bytes <= capacity_) return;
  device_ = gpu.allocate(bytes);
  capacity_ = bytes;
}

void StepImage::place(const attention::GpuBackend* gpu, Stream stream) {
  memory_ = bytes_.data();
  if (gpu == nullptr) return;
  reserve(*gpu, bytes_.size());
  gpu->upload(device_.get(), bytes_.data(), bytes_.size(), stream);
  memory_ = static_cast<const std::byte*>(device_.get());
}

namespace {

/// The first older position that the batch's mask lets a request's first query see.
int32_t first_visible(const AttentionConfig& config, bool all_visible, int32_t first_query) {
  int32_t first = 0;
  if (all_visible) return first;
  if (config.window_left >= 0) first = std::max(first, first_query - config.window_left);
  if (config.attention_chunk > 0) {
    first = std::max(first, first_query / config.attention_chunk * config.attention_chunk);
  }
  return first;
}

/// Where a request's older tokens are read from: whole pages of every rank, so that its table can begin there.
struct OlderRange {
  int32_t first = 0;  ///< global position: a multiple of the world's pages
  int32_t end = 0;    ///< the first new token's position
  int32_t local(int32_t world, int32_t rank, int32_t interleave) const {
    return shard_len(end, world, rank, interleave) - first / world;
  }
};

OlderRange older_range(const PcpState& state, bool all_visible, int32_t q_len, int32_t first_query) {
  const int32_t first = first_visible(state.attention(), all_visible, first_query);
  if (q_len == 0 || first >= first_query) return {};
  const int64_t stripe = int64_t{state.attention().page_size} * state.world();
  return {static_cast<int32_t>(first / stripe * stripe), first_query};
}

/// One step, while it is planned.
class Step {
 public:
  Step(PcpState& state, const PcpBatch& batch, Stream stream)
      : state_(state),
        config_(state.attention()),
        world_(state.world()),
        rank_(state.group->rank()),
        batch_(batch),
        stream_(stream) {}

  PcpPlan plan() {
    PcpPlan planned;
    planned.num_requests = batch_.num_requests;
    planned.digest = digest();
    planned.max_tokens = padded_tokens();
    planned.step = state_.step;
    find_older();
    const bool any_older = older_pages_ > 0 || state_.bounded();  // a graph serves both
    planned.pass_q_bytes = any_older ? pass_q_bytes(planned.max_tokens) : 0;
    planned.pass_kv_bytes = any_older ? pass_kv_bytes() : 0;
    if (any_older) planned.exchange = choose(planned);
    divide();
    planned.num_tokens = state_.own.cu_q.back();
    plan_fresh(planned);
    if (planned.exchange == PcpExchange::kPassQ) plan_shard(planned);
    if (planned.exchange == PcpExchange::kPassKv) plan_gathered(planned);
    place_arrays(planned.exchange);
    return planned;
  }

  void check() const {
    core::require(batch_.num_requests >= 0, "num_requests is ", batch_.num_requests);
    core::require(batch_.cu_q != nullptr, "cu_q is null");
    core::require(batch_.seq_lens != nullptr || batch_.num_requests == 0, "seq_lens is null");
    core::require(batch_.cu_q[0] == 0, "cu_q[0] is ", batch_.cu_q[0], "; it must be 0");
    for (int32_t i = 0; i < batch_.num_requests; ++i) {
      core::require(batch_.cu_q[i + 1] >= batch_.cu_q[i], "request ", i, ": cu_q descends");
      core::require(batch_.seq_lens[i] >= q_len(i), "request ", i, ": seq_lens is ", batch_.seq_lens[i], "; it has ",
                    q_len(i), " new tokens");
    }
    check_bounds();
  }

  uint64_t digest() const {
    Digest digest(state_.config_digest);
    digest.add(batch_.num_requests).add(batch_.all_visible).add(batch_.max_tokens);
    for (int32_t i = 0; i < batch_.num_requests; ++i) digest.add(q_len(i)).add(batch_.seq_lens[i]);
    return digest.value();
  }

 private:
  void check_bounds() const {
    if (!state_.bounded()) {
      core::require(batch_.max_tokens == 0, "max_tokens is ", batch_.max_tokens, "; without PcpConfig::bounds it is 0");
      return;
    }
    const GraphBounds& bounds = *state_.config.bounds;
    core::require(batch_.num_requests <= bounds.max_requests, "num_requests is ", batch_.num_requests,
                  "; the bounds allow ", bounds.max_requests);
    core::require(cu_q().back() <= bounds.max_tokens, "the batch has ", cu_q().back(), " new tokens; the bounds allow ",
                  bounds.max_tokens);
    for (int32_t i = 0; i < batch_.num_requests; ++i) {
      core::require(q_len(i) <= bounds.max_q_len, "request ", i, " has ", q_len(i), " new tokens; the bounds allow ",
                    bounds.max_q_len);
      core::require(batch_.seq_lens[i] <= bounds.max_kv_len, "request ", i, ": seq_lens is ", batch_.seq_lens[i],
                    "; the bounds allow ", bounds.max_kv_len);
    }
    const int32_t most = max_pcp_tokens(cu_q(), world_);
    core::require(
        batch_.max_tokens == 0 || (batch_.max_tokens >= most && batch_.max_tokens <= state_.max_rank_tokens()),
        "max_tokens is ", batch_.max_tokens, "; it is 0, or from the most tokens of a rank, ", most, ", to ",
        state_.max_rank_tokens(), ", the most within the bounds");
  }

  int32_t padded_tokens() const { return batch_.max_tokens > 0 ? batch_.max_tokens : max_pcp_tokens(cu_q(), world_); }

  std::span<const int32_t> cu_q() const { return {batch_.cu_q, static_cast<size_t>(batch_.num_requests) + 1}; }
  int32_t q_len(int32_t i) const { return batch_.cu_q[i + 1] - batch_.cu_q[i]; }
  int32_t first_query(int32_t i) const { return batch_.seq_lens[i] - q_len(i); }
  OlderRange older(int32_t i) const { return older_range(state_, batch_.all_visible, q_len(i), first_query(i)); }

  /// This rank's older tokens, and the pages of the rank that has most.
  void find_older() {
    state_.older_first.clear();
    state_.older_len.clear();
    state_.older_indptr.assign(1, 0);
    state_.q_len.clear();
    int64_t most = 0;
    for (int32_t p = 0; p < world_; ++p) {
      int64_t pages = 0;
      for (int32_t i = 0; i < batch_.num_requests; ++i) {
        pages += pages_for(older(i).local(world_, p, state_.config.interleave), config_.page_size);
      }
      most = std::max(most, pages);
    }
    older_pages_ = most;
    state_.older_tokens = core::checked_mul(most, int64_t{config_.page_size});
    for (int32_t i = 0; i < batch_.num_requests; ++i) {
      const OlderRange range = older(i);
      const int32_t pages = pages_for(range.local(world_, rank_, state_.config.interleave), config_.page_size);
      state_.q_len.push_back(q_len(i));
      state_.older_first.push_back(range.first / world_);
      state_.older_len.push_back(core::checked_cast<int32_t>(int64_t{pages} * config_.page_size));
      state_.older_indptr.push_back(core::checked_cast<int32_t>(int64_t{state_.older_indptr.back()} + pages));
    }
  }

  int64_t pass_q_bytes(int32_t max_tokens) const {
    const int64_t out = sizeof(float) * static_cast<int64_t>(config_.head_dim_v + kLsePadding);
    return core::checked_mul(int64_t{max_tokens}, int64_t{config_.num_q_heads},
                             config_.head_dim_qk * int64_t{size_of(config_.q)} + out);
  }
  int64_t pass_kv_bytes() const {
    return core::checked_mul(state_.older_tokens, int64_t{config_.num_kv_heads},
                             (int64_t{config_.head_dim_qk} + config_.head_dim_v) * size_of(config_.kv));
  }

  PcpExchange choose(const PcpPlan& planned) const {
    if (state_.config.exchange != PcpExchange::kAutomatic) return state_.config.exchange;
    if (!state_.can_pass_kv || config_.determinism == Determinism::kBatchInvariant) return PcpExchange::kPassQ;
    return planned.pass_kv_bytes < planned.pass_q_bytes ? PcpExchange::kPassKv : PcpExchange::kPassQ;
  }

  /// Appends a rank's chunks of every request.
  void add_chunks(ChunkRows& rows, int32_t rank) const {
    for (int32_t i = 0; i < batch_.num_requests; ++i) {
      const OlderRange range = older(i);
      for (const PcpChunk& chunk : pcp_chunks(q_len(i), i, world_, rank)) {
        rows.add(chunk.size(), first_query(i) + chunk.begin, range.first, i);
      }
    }
  }

  void divide() {
    state_.own.clear();
    add_chunks(state_.own, rank_);
  }

  BatchView view_of(const ChunkRows& rows, int32_t num_tokens, std::span<const KvSegment> segments) const {
    BatchView view;
    view.num_requests = rows.size();
    view.num_tokens = num_tokens;
    view.cu_q = rows.cu_q.data();
    view.q_first_pos = rows.q_first.data();
    view.segments = segments;
    return view;
  }

  KvSegment segment_of(const ChunkKeys& keys, const int32_t* first_pos) const {
    KvSegment segment;
    segment.kv_len = keys.kv_len.data();
    segment.first_pos = first_pos;
    segment.mask = batch_.all_visible ? SegmentMask::kAllVisible : SegmentMask::kAsConfig;
    return segment;
  }

  /// A request's new tokens begin a page; its two chunks name the same pages.
  void plan_fresh(PcpPlan& planned) {
    state_.fresh.clear();
    first_new_.clear();
    fresh_slots(planned.max_tokens);
    int32_t page = 0;
    for (int32_t i = 0; i < batch_.num_requests; ++i) {
      for (int32_t chunk = 0; chunk < 2; ++chunk) {
        state_.fresh.add(q_len(i), kFreshPage, page);
        first_new_.push_back(first_query(i));
      }
      page += pages_for(q_len(i), kFreshPage);
    }
    state_.fresh_pages = page;
    if (state_.bounded()) {
      const int32_t most = state_.max_fresh_pages(batch_.num_requests, planned.max_tokens);
      state_.fresh.indices.resize(2 * static_cast<size_t>(most), 0);
    }
    const int32_t rows = state_.rows(planned);
    if (rows == 0) return;
    const KvSegment segment = segment_of(state_.fresh, first_new_.data());
    planned.fresh =
        folio::plan(state_.fresh_op, view_of(state_.own, rows, {&segment, 1}), state_.fresh_buffer, stream_);
  }

  /// Where each row of the gathered pieces stands among the pages.
  void fresh_slots(int32_t max_tokens) {
    const auto rows = static_cast<size_t>(state_.piece_rows(max_tokens));
    state_.fresh_slots.assign(rows * static_cast<size_t>(world_), -1);
    state_.own_slots.resize(static_cast<size_t>(max_tokens));
    std::iota(state_.own_slots.begin(), state_.own_slots.end(), int64_t{0});
    for (int32_t p = 0; p < world_; ++p) {
      size_t row = static_cast<size_t>(p) * rows;
      int64_t slot = 0;
      for (int32_t i = 0; i < batch_.num_requests; ++i) {
        for (const PcpChunk& chunk : pcp_chunks(q_len(i), i, world_, p)) {
          for (int32_t k = chunk.begin; k < chunk.end; ++k) state_.fresh_slots[row++] = slot + k;
        }
        slot += int64_t{pages_for(q_len(i), kFreshPage)} * kFreshPage;
      }
    }
  }

  /// The queries of all ranks over this rank's shard.
  void plan_shard(PcpPlan& planned) {
    ChunkRows& rows = state_.all;
    ChunkKeys& keys = state_.shard;
    rows.clear();
    keys.clear();
    for (int32_t p = 0; p < world_; ++p) {
      add_chunks(rows, p);
      const int64_t padded = int64_t{planned.max_tokens} * (p + 1);
      rows.add(core::checked_cast<int32_t>(padded - rows.cu_q.back()), 0, 0, -1);
    }
    for (int32_t n = 0; n < rows.size(); ++n) {
      const auto at = static_cast<size_t>(n);
      const bool reads = rows.request[at] >= 0 && rows.cu_q[at + 1] > rows.cu_q[at];
      keys.add(reads ? older(rows.request[at]).local(world_, rank_, state_.config.interleave) : 0, config_.page_size);
    }
    KvSegment segment = segment_of(keys, rows.kv_first.data());
    segment.shard = {world_, rank_, state_.config.interleave};
    planned.older =
        folio::plan(state_.shard_op, view_of(rows, rows.cu_q.back(), {&segment, 1}), state_.shard_buffer, stream_);
  }

  /// This rank's queries over the shards of all ranks, one segment each.
  void plan_gathered(PcpPlan& planned) {
    for (int32_t p = 0; p < world_; ++p) {
      ChunkKeys& keys = state_.gathered[static_cast<size_t>(p)];
      keys.clear();
      int32_t page = 0;
      for (int32_t i = 0; i < batch_.num_requests; ++i) {
        const int32_t tokens = older(i).local(world_, p, state_.config.interleave);
        for (int32_t chunk = 0; chunk < 2; ++chunk) keys.add(tokens, config_.page_size, page);
        page += pages_for(tokens, config_.page_size);
      }
      KvSegment& segment = state_.segments[static_cast<size_t>(p)];
      segment = segment_of(keys, state_.own.kv_first.data());
      segment.shard = {world_, p, state_.config.interleave};
    }
    if (planned.num_tokens == 0) return;
    planned.older = folio::plan(state_.gathered_op, view_of(state_.own, planned.num_tokens, state_.segments),
                                state_.gathered_buffer, stream_);
  }

  void place_arrays(PcpExchange exchange) {
    StepImage& image = state_.image;
    StepArrays& arrays = state_.arrays;
    state_.table_row.clear();
    state_.table_first.clear();
    const auto add_row = [&](int32_t request) {
      state_.table_row.push_back(request);
      const int32_t first = request < 0 ? 0 : state_.older_first[static_cast<size_t>(request)];
      state_.table_first.push_back(first / config_.page_size);
    };
    if (exchange == PcpExchange::kPassQ) std::ranges::for_each(state_.all.request, add_row);
    for (int32_t i = 0; exchange == PcpExchange::kPassKv && i < batch_.num_requests; ++i) add_row(i);
    image.clear();
    arrays.own_slots = image.add(state_.own_slots);
    arrays.fresh_slots = image.add(state_.fresh_slots);
    arrays.fresh_indptr = image.add(state_.fresh.indptr);
    arrays.fresh_indices = image.add(state_.fresh.indices);
    arrays.table_row = image.add(state_.table_row);
    arrays.table_first = image.add(state_.table_first);
    arrays.table_indptr = image.add(state_.table_indptr(exchange));
    arrays.older_len = image.add(state_.older_len);
    for (size_t p = 0; exchange == PcpExchange::kPassKv && p < arrays.gathered.size(); ++p) {
      arrays.gathered[p] = {image.add(state_.gathered[p].indptr), image.add(state_.gathered[p].indices)};
    }
    image.place(state_.gpu(), stream_);
  }

  PcpState& state_;
  const AttentionConfig& config_;
  const int32_t world_;
  const int32_t rank_;
  const PcpBatch& batch_;
  const Stream stream_;
  int64_t older_pages_ = 0;
  std::vector<int32_t>& first_new_ = state_.first_new;
};

}  // namespace

PcpPlan PcpAttention::plan(const PcpBatch& batch, Stream stream) {
  PcpState& state = *state_;
  state.step += 1;
  Step step(state, batch, stream);
  if (state.gpu() == nullptr || state.world() == 1) {
    step.check();
    return step.plan();
  }
  PcpPlan planned;
  std::exception_ptr failure;
  try {
    step.check();
    planned = step.plan();
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  agree(*state.group, state.records, planned.digest, failure,
        {"could not plan this step", "runs another batch or configuration"});
  return planned;
}

}  // namespace folio::inline v0::distributed
