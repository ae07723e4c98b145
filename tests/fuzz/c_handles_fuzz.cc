// The C functions that take ids, counts and handles beside attention: tables, pools, the prefix cache, gathers, a step
// of the token pool. Every call returns a status, says why when it fails, and touches only the memory it was given.
// Arrays have at least as many elements as the counts say, which C cannot check; counts, ids and lengths are anything.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "c_api_input.hpp"
#include "folio/c/backends.h"
#include "input.hpp"

namespace {

using Ints = std::vector<int32_t>;
constexpr int32_t kMost = 24;  // elements of every array

/// A count of an array of kMost elements, or one that is none.
int32_t take_count(FuzzInput& input) {
  const auto kind = input.take<uint8_t>();
  return kind < 248 ? kind % (kMost - 1) : -input.take_between(1, INT32_MAX);
}

Ints take_ids(FuzzInput& input) {
  return input.take_lengths(kMost, 12);
}

const folio_context* context() {
  static folio_context* const kContext = [] {
    folio_context_options options = FOLIO_CONTEXT_OPTIONS_INIT;
    options.num_threads = 1;
    folio_context* created = nullptr;
    FUZZ_CHECK(folio_create_cpu_context(&options, &created) == FOLIO_OK);
    return created;
  }();
  return kContext;
}

folio_page_table_view take_table(FuzzInput& input, const Ints& entries, Ints& indptr) {
  folio_page_table_view table = {FOLIO_TABLE_DENSE, entries.data(), kMost, nullptr, 0, 0, 0};
  table.num_rows = take_count(input);
  if (input.take<uint8_t>() % 2 == 0) {
    if (input.take<uint8_t>() % 4 != 0) std::sort(indptr.begin(), indptr.end());
    table.kind = FOLIO_TABLE_CSR;
    table.indptr = indptr.data();
  } else {
    table.row_stride = input.take_length(6);
    table.first_column = input.take_length(2);
  }
  disturb(input, table.kind);
  // A dense table has no indptr, which a kind that became CSR would then be read by.
  if (table.kind == FOLIO_TABLE_CSR && table.indptr == nullptr) table.indptr = indptr.data();
  if (input.take<uint8_t>() % 32 == 0) table.indices = nullptr;
  return table;
}

void tables(FuzzInput& input) {
  const Ints entries = take_ids(input), lens = take_ids(input), rows = take_ids(input);
  Ints indptr = take_ids(input), out(kMost), more(kMost), last(kMost);
  std::vector<int64_t> wide(kMost);
  const folio_page_table_view table = take_table(input, entries, indptr);
  const int32_t count = take_count(input), page_size = input.take_length(8);
  const folio_kv_shard shard = {input.take_length(3), input.take_length(3), input.take_length(4)};
  const int64_t room = std::min<int64_t>(take_count(input), kMost);
  ok(folio_paged_indptr(context(), lens.data(), count, page_size, out.data(), last.data(), nullptr, nullptr));
  ok(folio_seq_lens_from_paged(context(), indptr.data(), lens.data(), count, page_size, out.data(), nullptr, nullptr));
  ok(folio_table_to_csr(context(), &table, lens.data(), count, page_size, out.data(), more.data(), room, last.data(),
                        nullptr, nullptr));
  const int32_t columns = count > 0 ? take_count(input) / count : -1;
  ok(folio_table_to_dense(context(), &table, lens.data(), count, page_size, columns, -1, out.data(), nullptr, nullptr));
  ok(folio_token_indices(context(), &table, lens.data(), count, page_size, out.data(), more.data(), room, nullptr,
                         nullptr));
  ok(folio_token_offsets(context(), &table, lens.data(), count, page_size, input.take<int64_t>(), input.take<int64_t>(),
                         out.data(), wide.data(), room, nullptr, nullptr));
  ok(folio_slot_mapping(context(), &table, rows.data(), lens.data(), count, page_size, &shard, wide.data(), nullptr,
                        nullptr));
  ok(folio_expand_pages(context(), entries.data(), count, count > 0 ? take_count(input) / count : page_size, out.data(),
                        nullptr, nullptr));
  ok(folio_shard_lens(context(), lens.data(), count, &shard, out.data(), nullptr, nullptr));
  ok(folio_validate_page_table(context(), &table, lens.data(), count, page_size, input.take_length(12), nullptr,
                               nullptr));
}

/// Pages of a small cache are copied and gathered.
void pages(FuzzInput& input) {
  const Ints source = take_ids(input), destination = take_ids(input), entries = take_ids(input), lens = take_ids(input);
  Ints indptr = take_ids(input);
  std::vector<float> k(8 * 4 * 2 * 8), v(k.size()), k_out(64 * 16), v_out(k_out.size());
  const folio_kv_cache_shape shape = {8, 4, 2, 8, 8, FOLIO_DTYPE_FLOAT32};
  folio_kv_cache cache;
  FUZZ_CHECK(ok(folio_make_nhd_cache(&shape, k.data(), v.data(), nullptr, nullptr, &cache)));
  ok(folio_copy_pages(context(), &cache, &cache, source.data(), destination.data(), take_count(input), nullptr,
                      nullptr));
  const folio_page_table_view table = take_table(input, entries, indptr);
  const int64_t out_shape[] = {input.take_between(0, 64), 2, 8};
  folio_tensor_view k_view, v_view;
  FUZZ_CHECK(ok(folio_make_tensor_view(k_out.data(), FOLIO_DTYPE_FLOAT32, 3, out_shape, &k_view)));
  FUZZ_CHECK(ok(folio_make_tensor_view(v_out.data(), FOLIO_DTYPE_FLOAT32, 3, out_shape, &v_view)));
  ok(folio_gather_kv(context(), &cache, &table, lens.data(), take_count(input), &k_view, &v_view, nullptr, nullptr,
                     nullptr, nullptr));
}

void pools(FuzzInput& input) {
  folio_token_allocator* allocator = nullptr;
  folio_req_to_token_pool* requests = nullptr;
  if (ok(folio_create_token_allocator(input.take_length(64) % 100000, input.take_length(4), &allocator))) {
    for (int i = 0; i < 6; ++i) {
      Ints ids = take_ids(input), lens = take_ids(input);
      const Ints prefixes = take_ids(input);
      const int32_t count = take_count(input);
      int32_t allocated = 0;
      switch (input.take<uint8_t>() % 6) {
        case 0: ok(folio_token_allocator_alloc(allocator, ids.data(), count, &allocated)); break;
        case 1: ok(folio_token_allocator_free(allocator, ids.data(), count)); break;
        case 2:
          ok(folio_token_allocator_alloc_extend(allocator, prefixes.data(), lens.data(), prefixes.data(), count,
                                                ids.data(), take_count(input), &allocated));
          break;
        case 3:
          ok(folio_token_allocator_alloc_decode(allocator, lens.data(), prefixes.data(), count, ids.data(),
                                                &allocated));
          break;
        case 4: ok(folio_token_allocator_open_group(allocator)); break;
        default: ok(folio_token_allocator_close_group(allocator)); break;
      }
    }
  }
  folio_free_token_allocator(allocator);
  if (ok(folio_create_req_to_token_pool(input.take_length(4) % 1000, input.take_length(16) % 1000, &requests))) {
    Ints rows = take_ids(input);
    int32_t allocated = 0;
    ok(folio_req_to_token_pool_alloc(requests, rows.data(), take_count(input), &allocated));
    ok(folio_req_to_token_pool_write(requests, input.take_length(4), input.take_length(16), rows.data(),
                                     take_count(input)));
    ok(folio_req_to_token_pool_free_row(requests, input.take_length(4)));
  }
  folio_free_req_to_token_pool(requests);
}

/// Slots of tokens, each given out once, as an allocator does: what a cache owns twice, it cannot tell. Or a negative
/// one.
Ints take_slots(FuzzInput& input, int32_t& given) {
  Ints slots(kMost);
  for (int32_t& slot : slots) slot = given++;
  if (input.take<uint8_t>() % 16 == 0) slots[input.take<uint8_t>() % kMost] = -1;
  return slots;
}

void prefixes(FuzzInput& input) {
  folio_prefix_cache_options options = FOLIO_PREFIX_CACHE_OPTIONS_INIT;
  options.page_size = input.take_length(3);
  options.window_left = input.take<uint8_t>() % 2 == 0 ? -1 : input.take_length(4);
  options.partial_leaves = input.take<uint8_t>() % 2;
  folio_prefix_cache* cache = nullptr;
  if (!ok(folio_create_prefix_cache(&options, &cache))) return;
  folio_slot_changes* changes = nullptr;
  FUZZ_CHECK(ok(folio_create_slot_changes(&changes)));
  int32_t given = 0;
  for (int i = 0; i < 6; ++i) {
    const Ints tokens = input.take_lengths(kMost, 2);
    Ints slots = take_slots(input, given);
    const folio_prefix_key key = {tokens.data(), take_count(input), nullptr, 0};
    const int64_t begin = input.take_length(4);
    folio_prefix_lock* lock = nullptr;
    int64_t length = 0;
    switch (input.take<uint8_t>() % 4) {
      case 0: ok(folio_prefix_cache_insert(cache, &key, slots.data(), begin, changes, nullptr, nullptr)); break;
      case 1:
        ok(folio_prefix_cache_evict(cache, input.take_length(8), input.take_length(8), changes, nullptr, nullptr));
        break;
      case 2: ok(folio_prefix_cache_match(cache, &key, &length)); break;
      default:
        if (!ok(folio_prefix_cache_acquire(cache, &key, slots.data(), &lock))) break;
        FUZZ_CHECK(ok(folio_prefix_lock_length(lock, &length)) && length >= 0 && length <= key.num_tokens);
        ok(folio_prefix_cache_extend(cache, lock, &key, slots.data(), begin, changes));
        ok(folio_prefix_cache_finish(cache, lock, &key, slots.data(), begin, changes));
    }
    folio_prefix_cache_sizes sizes = FOLIO_PREFIX_CACHE_SIZES_INIT;
    FUZZ_CHECK(ok(folio_prefix_cache_get_sizes(cache, &sizes)));
    FUZZ_CHECK(sizes.evictable + sizes.protected_slots == sizes.size && sizes.protected_slots == 0);
  }
  folio_free_slot_changes(changes);
  folio_free_prefix_cache(cache);
}

/// A step of the token pool: rows, lengths and slots are anything.
void token_pool(FuzzInput& input) {
  folio_kv_pool_config sizes = FOLIO_KV_POOL_CONFIG_INIT;
  sizes.num_slots = 32;
  sizes.num_layers = 1;
  sizes.num_kv_heads = 1;
  sizes.head_dim_qk = sizes.head_dim_v = 8;
  sizes.dtype = FOLIO_DTYPE_FLOAT32;
  folio_kv_pool* pool = nullptr;
  FUZZ_CHECK(ok(folio_create_kv_pool(&sizes, &pool)));
  const Ints table = input.take_lengths(4 * 16, 32);
  folio_token_pool_config config = FOLIO_TOKEN_POOL_CONFIG_INIT;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = 8;
  config.kv_cache_dtype = config.q_dtype = FOLIO_DTYPE_FLOAT32;
  config.max_context_len = 16;
  config.max_req_pool_size = 4;
  config.req_to_token = {FOLIO_TABLE_DENSE, table.data(), 64, nullptr, 16, 0, 4};
  config.sliding_window_size = input.take<uint8_t>() % 2 == 0 ? 0 : input.take_length(6);
  disturb(input, config.extend_path);
  folio_token_pool_backend* backend = nullptr;
  if (ok(folio_create_token_pool_backend(context(), &config, &backend))) {
    const Ints rows = input.take_lengths(kMost, 3), lens = take_ids(input), extend = take_ids(input);
    std::vector<int64_t> slots(kMost);
    for (int64_t& slot : slots) slot = input.take_length(32);
    Padded<folio_forward_batch> batch{};
    batch.value = FOLIO_FORWARD_BATCH_INIT;
    batch.value.forward_mode = input.take_between(0, 7);
    batch.value.batch_size = input.take<uint8_t>() % 8 != 0 ? input.take_between(0, 4) : take_count(input);
    batch.value.req_pool_indices = rows.data();
    batch.value.seq_lens = lens.data();
    batch.value.extend_prefix_lens = extend.data();
    batch.value.draft_token_num = input.take_length(3);
    batch.value.out_cache_loc = slots.data();
    batch.value.num_out_cache_loc = take_count(input);
    batch.value.token_to_kv_pool = pool;
    disturb_size(input, batch);
    ok(folio_token_pool_init_forward_metadata(backend, &batch.value, nullptr));
    folio_radix_attention layer = FOLIO_RADIX_ATTENTION_INIT;
    layer.num_heads = 2;
    layer.num_kv_heads = 1;
    layer.head_dim = 8;
    layer.layer_id = input.take_length(1);
    layer.sliding_window_size = config.sliding_window_size;
    std::vector<float> q(kMost * 16), k(kMost * 8), out(q.size());
    const int64_t tokens = input.take_between(0, kMost);
    const int64_t q_shape[] = {tokens, 16}, k_shape[] = {tokens, 8};
    folio_const_tensor_view q_view, k_view;
    folio_tensor_view out_view;
    FUZZ_CHECK(ok(folio_make_const_tensor_view(q.data(), FOLIO_DTYPE_FLOAT32, 2, q_shape, &q_view)));
    FUZZ_CHECK(ok(folio_make_const_tensor_view(k.data(), FOLIO_DTYPE_FLOAT32, 2, k_shape, &k_view)));
    FUZZ_CHECK(ok(folio_make_tensor_view(out.data(), FOLIO_DTYPE_FLOAT32, 2, q_shape, &out_view)));
    ok(folio_token_pool_forward(backend, &layer, &batch.value, &q_view, &k_view, &k_view, &out_view,
                                input.take<uint8_t>() % 4 == 0, nullptr));
  }
  folio_free_token_pool_backend(backend);
  folio_free_kv_pool(pool);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  switch (input.take<uint8_t>() % 5) {
    case 0: tables(input); break;
    case 1: pages(input); break;
    case 2: pools(input); break;
    case 3: prefixes(input); break;
    default: token_pool(input); break;
  }
  return 0;
}
