#include <algorithm>

#include "core/error.hpp"
#include "folio/backends/virtual_batches.hpp"

namespace folio::inline v0::backends {
namespace {

/// Some neighbouring queries of one request and the chunk that they lie in.
struct Piece {
  int32_t num_queries;
  int32_t num_keys;
  int32_t first_page;
};

/// Calls `take` for every chunk that queries of a request with that many of its keys lie in.
template <typename Take>
void for_each_piece(int32_t chunk, int32_t page_size, int32_t query_len, int32_t seq_len, const Take& take) {
  for (int32_t done = 0; done < query_len;) {
    const int32_t position = seq_len - query_len + done;
    const int32_t start = position / chunk * chunk;
    const int32_t end = std::min(start <= seq_len - chunk ? start + chunk : seq_len, seq_len);
    const int32_t num_queries = std::min(end - position, query_len - done);
    take(Piece{num_queries, end - start, start / page_size});
    done += num_queries;
  }
}

void check(int32_t chunk, const CommonAttentionMetadata& batch, int32_t page_size) {
  core::require(chunk >= 1 && page_size >= 1 && chunk % page_size == 0, "attn_chunk_size ", chunk,
                " is not divisible by block_size ", page_size);
  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  core::require(batch.where == Where::kHost,
                "the batch's arrays are on a device; virtual batches are made on the host");
  core::require(batch.num_reqs >= 0 && batch.query_start_loc.size() > num_reqs && batch.seq_lens.size() >= num_reqs,
                "query_start_loc has ", batch.query_start_loc.size(), " entries, seq_lens ", batch.seq_lens.size(),
                "; num_reqs is ", batch.num_reqs);
  core::require(batch.block_table.num_rows >= batch.num_reqs, "the block table has ", batch.block_table.num_rows,
                " rows; num_reqs is ", batch.num_reqs);
  const int64_t table_tokens = int64_t{batch.block_table.num_columns} * page_size;
  for (int32_t i = 0; i < batch.num_reqs; ++i) {
    const int32_t seq_len = batch.seq_lens[static_cast<size_t>(i)];
    core::require(batch.query_len(i) >= 0 && seq_len >= batch.query_len(i), "request ", i, " has a seq_len of ",
                  seq_len, " and ", batch.query_len(i), " query tokens");
    core::require(seq_len <= table_tokens, "request ", i, " has a seq_len of ", seq_len,
                  "; a row of the block table has ", batch.block_table.num_columns, " pages of ", page_size, " tokens");
  }
}

}  // namespace

CommonAttentionMetadata make_local_attention_virtual_batches(int32_t chunk, const CommonAttentionMetadata& batch,
                                                             int32_t page_size, VirtualBatchStorage& storage) {
  check(chunk, batch, page_size);
  const int32_t width = chunk / page_size;
  storage.query_start_loc.assign(1, 0);
  storage.seq_lens.clear();
  storage.block_table.clear();
  CommonAttentionMetadata local = batch;
  local.max_query_len = local.max_seq_len = 0;
  for (int32_t i = 0; i < batch.num_reqs; ++i) {
    const int32_t* row = batch.block_table.data + i * batch.block_table.row_stride;
    for_each_piece(chunk, page_size, batch.query_len(i), batch.seq_lens[static_cast<size_t>(i)], [&](Piece piece) {
      storage.query_start_loc.push_back(storage.query_start_loc.back() + piece.num_queries);
      storage.seq_lens.push_back(piece.num_keys);
      // Behind the last column of the batch's table the last entry repeats: no key lies there.
      for (int32_t j = 0; j < width; ++j) {
        storage.block_table.push_back(row[std::min(piece.first_page + j, batch.block_table.num_columns - 1)]);
      }
      local.max_query_len = std::max(local.max_query_len, piece.num_queries);
      local.max_seq_len = std::max(local.max_seq_len, piece.num_keys);
    });
  }
  local.num_reqs = static_cast<int32_t>(storage.seq_lens.size());
  local.query_start_loc = storage.query_start_loc;
  local.seq_lens = storage.seq_lens;
  local.block_table = {storage.block_table.data(), local.num_reqs, width, width};
  local.causal = true;
  local.query_start_loc_host = local.seq_lens_host = {};
  local.is_prefilling = {};
  local.seq_lens_host_upper_bound = {};
  local.positions = {};
  return local;
}

}  // namespace folio::inline v0::backends
