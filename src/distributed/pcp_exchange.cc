// What ranks send each other: their new tokens, which every rank brings to pages in order of their positions; then, so
// that queries on one rank meet older keys on another, queries (pass-Q) or keys and values (pass-KV).
#include <algorithm>
#include <cstring>

#include "distributed/combine_call.hpp"
#include "distributed/pcp_run.hpp"
#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"
#include "kernels/cuda/common/merge_states/ranks.hpp"
#include "kernels/cuda/common/tables/tables.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0::distributed {

KvCacheView PcpRun::own_piece() const {
  KvCacheView cache;
  cache.dtype = config_.ragged_kv;
  cache.num_pages = 1;
  cache.page_size = plan_.max_tokens;
  cache.num_kv_heads = config_.num_kv_heads;
  cache.head_dim_qk = config_.head_dim_qk;
  cache.head_dim_v = config_.head_dim_v;
  const int64_t element = size_of(config_.ragged_kv), row = state_.fresh_row() / element;
  cache.k = piece(rank());
  cache.v = piece(rank()) + element * config_.num_kv_heads * config_.head_dim_qk;
  cache.k_strides = {plan_.max_tokens * row, row, config_.head_dim_qk};
  cache.v_strides = {plan_.max_tokens * row, row, config_.head_dim_v};
  return cache;
}

void PcpRun::pack_fresh() {
  CacheWriteArgs write;
  write.k = args_.k;
  write.v = args_.v;
  write.slot_mapping = state_.image.at<int64_t>(state_.arrays.own_slots);
  write.num_slots = tokens();
  write.cache = own_piece();
  write_kv_cache(state_.context, write, stream_);
  if (state_.gpu() != nullptr) return;
  const PcpHeader mine = header_of(state_, plan_, args_);
  std::memcpy(piece(rank()) + plan_.max_tokens * state_.fresh_row(), &mine, sizeof(mine));
}

void PcpRun::check_headers() const {
  const int32_t own = state_.group->rank();
  const PcpHeader mine = header_of(state_, plan_, args_);
  for (int32_t r = 0; r < state_.world(); ++r) {
    PcpHeader theirs;
    std::memcpy(&theirs, piece(r) + plan_.max_tokens * state_.fresh_row(), sizeof(theirs));
    check_header(mine, theirs, r, own);
  }
}

ConstTensorView PcpRun::piece_tensor(int64_t first_element, int64_t dim) const {
  const int64_t rows = state_.world() * state_.piece_rows(plan_.max_tokens);
  ConstTensorView tensor(piece(0) + first_element * size_of(config_.ragged_kv), config_.ragged_kv,
                         {rows, config_.num_kv_heads, dim});
  tensor.strides[0] = state_.fresh_row() / size_of(config_.ragged_kv);
  return tensor;
}

KvCacheShape PcpRun::shape_of(int64_t pages, int32_t page_size, DType dtype) const {
  KvCacheShape shape;
  shape.num_pages = pages;
  shape.page_size = page_size;
  shape.num_kv_heads = config_.num_kv_heads;
  shape.head_dim_qk = config_.head_dim_qk;
  shape.head_dim_v = config_.head_dim_v;
  shape.dtype = dtype;
  return shape;
}

KvCacheView PcpRun::fresh_cache() const {
  const int32_t pages =
      state_.bounded() ? state_.max_fresh_pages(plan_.num_requests, plan_.max_tokens) : state_.fresh_pages;
  const KvCacheShape shape = shape_of(pages, kFreshPage, config_.ragged_kv);
  std::byte* const keys = memory_ + layout_.fresh;
  return make_nhd_view(shape, keys, keys + k_elements(shape) * size_of(shape.dtype));
}

void PcpRun::gather_fresh() {
  state_.group->all_gather(piece(rank()), piece(0), piece_bytes(), stream_);
  if (state_.gpu() == nullptr) check_headers();
  CacheWriteArgs write;
  write.k = piece_tensor(0, config_.head_dim_qk);
  write.v = piece_tensor(int64_t{config_.num_kv_heads} * config_.head_dim_qk, config_.head_dim_v);
  write.slot_mapping = state_.image.at<int64_t>(state_.arrays.fresh_slots);
  write.num_slots = ssize(state_.fresh_slots.size());
  write.cache = fresh_cache();
  write_kv_cache(state_.context, write, stream_);
}

SegmentArgs PcpRun::fresh_segment() const {
  SegmentArgs segment;
  segment.cache = fresh_cache();
  segment.table = table_of(state_.fresh.indptr, state_.arrays.fresh_indptr, ints(state_.arrays.fresh_indices),
                           static_cast<int32_t>(state_.fresh.indices.size()));
  return segment;
}

void PcpRun::read_table() const {
  const std::vector<int32_t>& indptr = state_.table_indptr(plan_.exchange);
  if (const attention::GpuBackend* const gpu = state_.gpu()) {
    kernels::cuda::TableRowsParams params;
    params.table = args_.table;
    params.row = ints(state_.arrays.table_row);
    params.first_column = ints(state_.arrays.table_first);
    params.indptr = ints(state_.arrays.table_indptr);
    params.num_rows = static_cast<int32_t>(state_.table_row.size());
    params.out = table_memory();
    gpu->enqueue(params, stream_);
    return;
  }
  for (size_t n = 0; n < state_.table_row.size(); ++n) {
    const int32_t begin = indptr[n], pages = indptr[n + 1] - begin, first = state_.table_first[n];
    if (pages == 0) continue;
    const std::span<const int32_t> row = kvcache::row_pages(args_.table, state_.table_row[n], int64_t{first} + pages);
    std::copy(row.begin() + first, row.end(), table_memory() + begin);
  }
}

void PcpRun::pack_queries() const {
  if (const attention::GpuBackend* const gpu = state_.gpu()) {
    const int64_t element = size_of(config_.q);
    kernels::cuda::ArrangeParams params;
    params.from = static_cast<const std::byte*>(args_.q.data);
    params.token_stride = args_.q.strides[0] * element;
    params.head_stride = args_.q.strides[1] * element;
    params.to = own_queries();
    params.num_tokens = tokens();
    params.heads = config_.num_q_heads;
    params.row_bytes = config_.head_dim_qk * element;
    if (tokens() > 0) gpu->enqueue(params, stream_);
    return;
  }
  const auto head = static_cast<size_t>(int64_t{config_.head_dim_qk} * size_of(config_.q));
  const auto element = static_cast<size_t>(size_of(config_.q));
  const auto copy = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < config_.num_q_heads; ++h) {
        const auto from = static_cast<size_t>(t * args_.q.strides[0] + h * args_.q.strides[1]) * element;
        std::memcpy(own_queries() + t * ssize(query_bytes()) + h * ssize(head),
                    static_cast<const std::byte*>(args_.q.data) + from, head);
      }
    }
  };
  for_rows(state_.context, tokens(), int64_t{config_.num_q_heads} * config_.head_dim_qk, copy);
}

SegmentArgs PcpRun::shard_segment() const {
  SegmentArgs segment;
  segment.cache = args_.cache;
  segment.table = table_of(state_.shard.indptr, state_.arrays.table_indptr, table_memory(),
                           state_.bounded() ? state_.max_table_pages(plan_.num_requests) : 0);
  segment.k_scale = row_k_scale_;
  segment.v_scale = row_v_scale_;
  return segment;
}

AttentionArgs PcpRun::shard_args(std::span<const SegmentArgs> segments) const {
  const int64_t rows = int64_t{state_.world()} * plan_.max_tokens;
  AttentionArgs args = common_args();
  args.q_scale = row_q_scale_;
  args.q = ConstTensorView(memory_ + layout_.queries, config_.q, {rows, config_.num_q_heads, config_.head_dim_qk});
  args.segments = segments;
  set_out(args, floats(layout_.sent), rows);
  return args;
}

void PcpRun::pass_q() {
  const size_t bytes = static_cast<size_t>(plan_.max_tokens) * query_bytes();
  state_.group->all_gather(own_queries(), memory_ + layout_.queries, bytes, stream_);
  const SegmentArgs segment = shard_segment();
  folio::run(*plan_.older, shard_args({&segment, 1}), scratch(), stream_);
  const size_t partials = static_cast<size_t>(plan_.max_tokens * state_.partial_row()) * sizeof(float);
  state_.group->all_to_all(floats(layout_.sent), floats(layout_.states), partials, stream_);
}

void PcpRun::pack_older() {
  const int64_t own = int64_t{state_.older_indptr.back()} * config_.page_size;
  const TensorView k(older_piece(rank()), config_.kv, {own, config_.num_kv_heads, config_.head_dim_qk});
  const TensorView v(older_piece(rank()) + layout_.older_values, config_.kv,
                     {own, config_.num_kv_heads, config_.head_dim_v});
  gather_kv(state_.context, args_.cache, table_of(state_.older_indptr, state_.arrays.table_indptr, table_memory()),
            {ints(state_.arrays.older_len), state_.older_len.size()}, k, v, {}, {}, stream_);
}

std::span<const SegmentArgs> PcpRun::gathered_segments() const {
  const KvCacheShape shape = shape_of(state_.older_tokens / config_.page_size, config_.page_size, config_.kv);
  for (int32_t p = 0; p < state_.world(); ++p) {
    const ChunkKeys& keys = state_.gathered[static_cast<size_t>(p)];
    SegmentArgs& segment = state_.arguments[static_cast<size_t>(p)];
    segment.cache = make_nhd_view(shape, older_piece(p), older_piece(p) + layout_.older_values);
    const StepArrays::Table& table = state_.arrays.gathered[static_cast<size_t>(p)];
    segment.table = table_of(keys.indptr, table.indptr, ints(table.indices));
    segment.k_scale = row_k_scale_;
    segment.v_scale = row_v_scale_;
  }
  return state_.arguments;
}

void PcpRun::pass_kv() {
  state_.group->all_gather(older_piece(rank()), older_piece(0), layout_.older_piece, stream_);
  if (plan_.older) folio::run(*plan_.older, own_args(0, gathered_segments()), scratch(), stream_);
}

}  // namespace folio::inline v0::distributed
