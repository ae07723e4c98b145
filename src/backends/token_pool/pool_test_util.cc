#include "backends/token_pool/pool_test_util.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "folio/page_table.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends::testing {
namespace {

constexpr int32_t kUnusedEntry = 0x7fffffff;

float stored(DType dtype, float value, float scale = 1.0f) {
  std::byte memory[4];
  store_from_float(memory, dtype, 0, value / scale);
  return load_as_float(memory, dtype, 0) * scale;
}

}  // namespace

PoolFixture::PoolFixture(const PoolSetup& pool_setup, const PoolLengths& pool_lengths, uint32_t seed)
    : setup(pool_setup), lengths(pool_lengths) {
  if (folio::testing::on_gpu()) {
    for (DType* dtype : {&setup.q_dtype, &setup.kv_dtype}) {
      if (*dtype == DType::kFloat32) *dtype = DType::kFloat16;
    }
  }
  lay_out(seed);
  fill(seed);
  build_tree();
  batch.forward_mode = lengths.mode;
  batch.batch_size = static_cast<int32_t>(num_requests());
  batch.req_pool_indices = rows;
  batch.seq_lens = seq_lens;
  batch.seq_lens_sum = std::accumulate(seq_lens.begin(), seq_lens.end(), int64_t{0});
  batch.out_cache_loc = out_cache_loc;
  if (is_extend(lengths.mode)) {
    batch.extend_prefix_lens = lengths.prefix;
    batch.extend_seq_lens = lengths.fresh;
  }
  if (setup.encoder_decoder) {
    batch.encoder_lens = lengths.encoder;
    batch.encoder_out_cache_loc = encoder_out_cache_loc;
  }
  if (is_target_verify(lengths.mode)) {
    batch.spec_info.draft_token_num = lengths.fresh.empty() ? 1 : lengths.fresh[0];
    batch.spec_info.tree_mask = tree_mask;
  }
  if (folio::testing::on_gpu()) {
    batch.seq_lens_cpu = batch.seq_lens;
    batch.extend_prefix_lens_cpu = batch.extend_prefix_lens;
    batch.extend_seq_lens_cpu = batch.extend_seq_lens;
    batch.encoder_lens_cpu = batch.encoder_lens;
    batch.spec_info.tree_mask_cpu = batch.spec_info.tree_mask;
  }
  batch.token_to_kv_pool = pool.get();
}

/// A pool's own memory is the host's; kernels of a GPU find what operator new gives (attention/device_test_util.hpp).
void PoolFixture::make_pool(const KvPoolConfig& config) {
  if (!folio::testing::on_gpu()) {
    pool = std::make_unique<KvPool>(config);
    return;
  }
  std::vector<void*> keys, values;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    keys.push_back(pool_memory.emplace_back(KvPool::k_bytes_per_layer(config)).data());
    values.push_back(pool_memory.emplace_back(KvPool::v_bytes_per_layer(config)).data());
  }
  pool = std::make_unique<KvPool>(config, keys, values);
}

int32_t PoolFixture::own(int32_t tokens) const {
  if (setup.group == nullptr) return tokens;
  return shard_len(tokens, setup.group->size(), setup.group->rank(), setup.interleave);
}

int32_t PoolFixture::ranks_of(bool given) const {
  return given && setup.group != nullptr ? setup.group->size() : 1;
}

/// Rows of the table are shuffled, and so are pages; a row's encoder slots come first, in pages of their own.
void PoolFixture::lay_out(uint32_t seed) {
  std::mt19937 random(seed);
  const size_t count = lengths.prefix.size();
  const int32_t page = setup.page_size;
  if (lengths.encoder.empty()) lengths.encoder.assign(count, 0);
  int32_t num_pages = 0;
  cu_q = {0};
  for (size_t r = 0; r < count; ++r) {
    const int32_t total = lengths.prefix[r] + lengths.fresh[r];
    seq_lens.push_back(is_target_verify(lengths.mode) ? lengths.prefix[r] : total);
    cu_q.push_back(cu_q.back() + lengths.fresh[r]);
    num_pages += pages_for(own(lengths.encoder[r]), page) + pages_for(own(total), page);
    columns = std::max(columns, own(lengths.encoder[r]) + own(total));
    max_context_len = std::max(max_context_len, lengths.encoder[r] + total);
  }
  max_context_len += 3;
  columns = std::max(columns + 3, own(max_context_len));
  table_rows = static_cast<int32_t>(count) + 2;
  rows.resize(count);
  std::iota(rows.begin(), rows.end(), 1);
  std::shuffle(rows.begin(), rows.end(), random);
  std::vector<int32_t> pages(static_cast<size_t>(num_pages) + 3);
  std::iota(pages.begin(), pages.end(), 1);
  if (setup.slots == SlotLayout::kShuffled) std::shuffle(pages.begin(), pages.end(), random);
  if (setup.slots == SlotLayout::kDescending) std::reverse(pages.begin(), pages.end());
  KvPoolConfig config;
  config.num_slots = static_cast<int32_t>(pages.size()) * page;
  config.page_size = page;
  config.num_layers = 2;
  config.num_kv_heads = setup.num_kv_heads;
  config.head_dim_qk = setup.head_dim;
  config.head_dim_v = setup.v_head_dim;
  config.dtype = setup.kv_dtype;
  config.layout = setup.pool_layout;
  make_pool(config);
  if (is_fp8(setup.kv_dtype)) {
    for (int32_t layer = 0; layer < 2; ++layer)
      pool->set_scales(layer, {.value = setup.k_scale}, {.value = setup.v_scale});
  }
  table.assign(static_cast<size_t>(table_rows) * static_cast<size_t>(columns), kUnusedEntry);
  for (int32_t column = 0; column < columns; ++column) table[static_cast<size_t>(column)] = 0;  // the dummy row
  size_t next_page = 0;
  // Interleaved: request after request takes a page in turn; else each takes all of its own.
  const auto take = [&](size_t r, int32_t first, int32_t begin, int32_t end) {
    for (int32_t position = begin; position < end; ++position) {
      const size_t row = static_cast<size_t>(rows[r]) * static_cast<size_t>(columns);
      table[row + static_cast<size_t>(first + position)] = pages[next_page] * page + position % page;
    }
    ++next_page;
  };
  const auto total_of = [&](size_t r) { return own(lengths.prefix[r] + lengths.fresh[r]); };
  const auto encoder_of = [&](size_t r) { return own(lengths.encoder[r]); };
  for (size_t r = 0; setup.joint_pages && r < count; ++r) {
    const int32_t end = encoder_of(r) + total_of(r);
    for (int32_t begin = 0; begin < end; begin += page) take(r, 0, begin, std::min(begin + page, end));
  }
  for (size_t r = 0; !setup.joint_pages && r < count; ++r) {
    for (int32_t begin = 0; begin < encoder_of(r); begin += page) {
      take(r, 0, begin, std::min(begin + page, encoder_of(r)));
    }
    if (setup.slots == SlotLayout::kInterleaved) continue;
    for (int32_t begin = 0; begin < total_of(r); begin += page) {
      take(r, encoder_of(r), begin, std::min(begin + page, total_of(r)));
    }
  }
  for (int32_t begin = 0; setup.slots == SlotLayout::kInterleaved && begin < columns; begin += page) {
    for (size_t r = 0; r < count; ++r) {
      if (begin < total_of(r)) take(r, encoder_of(r), begin, std::min(begin + page, total_of(r)));
    }
  }
}

int32_t PoolFixture::column(size_t request, int32_t position) const {
  return own(lengths.encoder[request]) + own(position);
}
int32_t PoolFixture::slot(size_t request, int32_t position) const {
  if (own(position + 1) == own(position)) return -1;
  return table[static_cast<size_t>(rows[request] * columns + column(request, position))];
}
int32_t PoolFixture::encoder_slot(size_t request, int32_t position) const {
  if (own(position + 1) == own(position)) return -1;
  return table[static_cast<size_t>(rows[request] * columns + own(position))];
}

void PoolFixture::fill(uint32_t seed) {
  std::mt19937 random(seed + 100);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const auto heads = static_cast<size_t>(setup.num_kv_heads);
  const size_t k_row = heads * static_cast<size_t>(setup.head_dim);
  const size_t v_row = heads * static_cast<size_t>(setup.v_head_dim);
  const auto element = static_cast<size_t>(size_of(setup.q_dtype));
  // All of the pool is NaN: written as fp8, too, 0xff is one.
  for (int32_t layer = 0; layer < 2; ++layer) {
    const KvCacheView& view = pool->view(layer);
    std::memset(view.k, 0xff, KvPool::k_bytes_per_layer(pool->config()));
    std::memset(view.v, 0xff, KvPool::v_bytes_per_layer(pool->config()));
  }
  const auto make = [&](int32_t tokens) {
    History history;
    for (size_t i = 0; i < static_cast<size_t>(tokens) * k_row; ++i) {
      history.k.push_back(stored(setup.q_dtype, uniform(random)));
      history.cached_k.push_back(stored(setup.kv_dtype, history.k.back(), setup.k_scale));
    }
    for (size_t i = 0; i < static_cast<size_t>(tokens) * v_row; ++i) {
      history.v.push_back(stored(setup.q_dtype, 2.0f * uniform(random)));
      history.cached_v.push_back(stored(setup.kv_dtype, history.v.back(), setup.v_scale));
    }
    return history;
  };
  // Appends tokens [begin, end) of a history to the rows of k and v.
  const auto append = [&](const std::vector<float>& values, size_t row, int32_t begin, int32_t end,
                          std::vector<std::byte>& memory) {
    for (size_t i = static_cast<size_t>(begin) * row; i < static_cast<size_t>(end) * row; ++i) {
      memory.resize(memory.size() + element);
      store_from_float(memory.data() + memory.size() - element, setup.q_dtype, 0, values[i]);
    }
  };
  const auto write = [&](const std::vector<std::byte>& k_rows, const std::vector<std::byte>& v_rows,
                         const std::vector<int64_t>& slots) {
    const auto tokens = static_cast<int64_t>(slots.size());
    for (int32_t layer = 0; layer < 2; ++layer) {
      write_kv_cache(context,
                     pool->write_args(layer, {k_rows.data(), setup.q_dtype, {tokens, static_cast<int64_t>(k_row)}},
                                      {v_rows.data(), setup.q_dtype, {tokens, static_cast<int64_t>(v_row)}}, slots));
    }
  };
  std::vector<std::byte> prefix_k, prefix_v;
  std::vector<int64_t> prefix_slots;
  for (size_t r = 0; r < num_requests(); ++r) {
    const int32_t prefix = lengths.prefix[r];
    const int32_t total = prefix + lengths.fresh[r];
    history_.push_back(make(total));
    for (int32_t p = 0; p < prefix; ++p) {
      append(history_[r].k, k_row, p, p + 1, prefix_k);
      append(history_[r].v, v_row, p, p + 1, prefix_v);
    }
    append(history_[r].k, k_row, prefix, total, k_memory);
    append(history_[r].v, v_row, prefix, total, v_memory);
    for (int32_t p = 0; p < total; ++p) (p < prefix ? prefix_slots : out_cache_loc).push_back(slot(r, p));
    encoder_history_.push_back(make(lengths.encoder[r]));
    append(encoder_history_[r].k, k_row, 0, lengths.encoder[r], encoder_k_memory);
    append(encoder_history_[r].v, v_row, 0, lengths.encoder[r], encoder_v_memory);
    for (int32_t p = 0; p < lengths.encoder[r]; ++p) encoder_out_cache_loc.push_back(encoder_slot(r, p));
  }
  write(prefix_k, prefix_v, prefix_slots);
  const int64_t tokens = num_tokens();
  const int64_t q_row = int64_t{setup.num_heads} * ranks_of(setup.replicated_queries) * setup.head_dim;
  // Every rank has heads of its own.
  if (setup.group != nullptr && !setup.replicated_queries)
    random.seed(seed + 200 + static_cast<uint32_t>(setup.group->rank()));
  for (int64_t i = 0; i < tokens * q_row; ++i) {
    q_memory.resize(q_memory.size() + element);
    store_from_float(q_memory.data() + q_memory.size() - element, setup.q_dtype, 0, 3.0f * uniform(random));
  }
  q = {q_memory.data(), setup.q_dtype, {tokens, q_row}};
  k = {k_memory.data(), setup.q_dtype, {tokens, static_cast<int64_t>(k_row)}};
  v = {v_memory.data(), setup.q_dtype, {tokens, static_cast<int64_t>(v_row)}};
  const auto encoded = static_cast<int64_t>(encoder_out_cache_loc.size());
  encoder_k = {encoder_k_memory.data(), setup.q_dtype, {encoded, static_cast<int64_t>(k_row)}};
  encoder_v = {encoder_v_memory.data(), setup.q_dtype, {encoded, static_cast<int64_t>(v_row)}};
  const int64_t out_row = int64_t{setup.num_heads} * ranks_of(setup.all_heads_out) * setup.v_head_dim;
  out_memory.resize(static_cast<size_t>(tokens * out_row) * element);
  out = {out_memory.data(), setup.q_dtype, {tokens, out_row}};
  clear_output();
}

void PoolFixture::clear_output() {
  std::fill(out_memory.begin(), out_memory.end(), std::byte{0xff});
}

int32_t PoolFixture::depth(int32_t draft) const {
  int32_t steps = 0;
  for (int32_t at = draft; lengths.parents[static_cast<size_t>(at)] >= 0;
       at = lengths.parents[static_cast<size_t>(at)]) {
    ++steps;
  }
  return steps;
}

void PoolFixture::build_tree() {
  if (lengths.parents.empty()) return;
  const size_t n = lengths.parents.size();
  std::vector<uint8_t> block((n * n + 7) / 8, 0);
  for (size_t row = 0; row < n; ++row) {
    for (auto at = static_cast<int32_t>(row); at >= 0; at = lengths.parents[static_cast<size_t>(at)]) {
      const size_t bit = row * n + static_cast<size_t>(at);
      block[bit / 8] = static_cast<uint8_t>(block[bit / 8] | (1u << (bit % 8)));
    }
  }
  for (size_t r = 0; r < num_requests(); ++r) tree_mask.insert(tree_mask.end(), block.begin(), block.end());
}

TokenPoolConfig PoolFixture::config() const {
  TokenPoolConfig config;
  config.num_heads = setup.num_heads;
  config.num_kv_heads = setup.num_kv_heads;
  config.head_dim = setup.head_dim;
  config.v_head_dim = setup.v_head_dim;
  config.kv_cache_dtype = setup.kv_dtype;
  config.q_dtype = setup.q_dtype;
  config.kv_format = setup.pool_layout == KvPoolLayout::kCpuPacked ? KvFormat::kCpuPacked : KvFormat::kStrided;
  config.page_size = setup.kernel_page_size == 0 ? setup.page_size : setup.kernel_page_size;
  config.max_context_len = max_context_len;
  config.req_to_token = dense_table(table, table_rows, columns);
  config.max_req_pool_size = std::max(8, 4 * table_rows);
  config.sliding_window_size = setup.window;
  config.is_encoder_decoder = setup.encoder_decoder;
  config.logit_cap = setup.logit_cap > 0.0f || setup.logit_caps;
  config.extend_path = setup.extend_path;
  config.determinism = setup.determinism;
  config.dcp_group = setup.group;
  config.cp_kv_cache_interleave_size = setup.interleave;
  config.dcp_comm_backend = setup.combine;
  config.dcp_replicated_queries = setup.replicated_queries;
  config.dcp_all_heads_out = setup.all_heads_out;
  config.dcp_partial_dtype = setup.partial;
  return config;
}

RadixAttention PoolFixture::full_layer() const {
  RadixAttention layer;
  layer.num_heads = setup.num_heads;
  layer.head_dim = setup.head_dim;
  layer.v_head_dim = setup.v_head_dim;
  layer.num_kv_heads = setup.num_kv_heads;
  layer.scaling = 0.3f;
  layer.layer_id = 1;
  layer.logit_cap = setup.logit_cap;
  return layer;
}

RadixAttention PoolFixture::layer() const {
  RadixAttention layer = full_layer();
  layer.layer_id = 0;
  layer.sliding_window_size = setup.window.value_or(-1);
  return layer;
}

RadixAttention PoolFixture::cross_layer() const {
  RadixAttention layer = full_layer();
  layer.is_cross_attention = true;
  return layer;
}

void PoolFixture::forward(TokenPoolBackend& backend, const RadixAttention& layer, bool save_kv_cache) {
  if (layer.is_cross_attention) {
    layer.forward(backend, q, encoder_k, encoder_v, batch, out, save_kv_cache);
  } else {
    layer.forward(backend, q, k, v, batch, out, save_kv_cache);
  }
}

std::string PoolFixture::wrong_step(const RadixAttention& layer) {
  TokenPoolBackend backend(context, config());
  backend.init_forward_metadata(batch);
  forward(backend, layer);
  const auto* prefill = std::get_if<PrefillMetadata>(&backend.forward_metadata());
  std::string wrong = wrong_output(layer, prefill != nullptr && prefill->use_ragged);
  if (wrong.empty() && !layer.is_cross_attention) wrong = wrong_cache(layer.layer_id);
  return wrong;
}

distributed::ThreadGroupOptions group_options() {
  distributed::ThreadGroupOptions options;
  options.timeout = std::chrono::seconds(60);
  if (folio::testing::on_gpu()) options.context = folio::testing::device_context();
  return options;
}

void run_ranks(int32_t world, const std::function<void(distributed::ProcessGroup& group)>& body) {
  distributed::run_ranks(world, body, group_options());
}

ForwardBatch OwnBatch::copy(const ForwardBatch& padded) {
  ForwardBatch own = padded;
  const auto take = [](auto& list, auto& memory) {
    memory.assign(list.begin(), list.end());
    list = memory;
  };
  take(own.req_pool_indices, rows_);
  take(own.seq_lens, seq_lens_);
  take(own.encoder_lens, encoder_lens_);
  take(own.out_cache_loc, slots_);
  take(own.window_out_cache_loc, window_slots_);
  take(own.spec_info.tree_mask, tree_mask_);
  return own;
}

}  // namespace folio::inline v0::backends::testing
