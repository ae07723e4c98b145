// Pools, allocators and the request table: the C functions do what the C++ classes do.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "c_handles.hpp"
#include "folio/c/folio.h"
#include "folio/pools.hpp"

namespace folio_c_test {
namespace {

using Ints = std::vector<int32_t>;

Owned<folio_token_allocator> make_allocator(int32_t num_slots, int32_t page_size) {
  return make<folio_token_allocator>(
      [&](folio_token_allocator** allocator) { return folio_create_token_allocator(num_slots, page_size, allocator); });
}

folio_kv_pool_config pool_config() {
  folio_kv_pool_config config = FOLIO_KV_POOL_CONFIG_INIT;
  config.num_slots = 16;
  config.page_size = 4;
  config.num_layers = 2;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = 8;
  config.dtype = FOLIO_DTYPE_FLOAT8_E4M3;
  return config;
}

folio::KvPoolConfig cpp_config() {
  return {.num_slots = 16,
          .page_size = 4,
          .num_layers = 2,
          .num_kv_heads = 2,
          .head_dim_qk = 8,
          .head_dim_v = 8,
          .dtype = folio::DType::kFloat8E4M3};
}

TEST(CTokenAllocator, HandsOutWhatTheClassDoes) {
  const auto owned = make_allocator(16, 4);
  folio_token_allocator* c = owned.get();
  folio::TokenAllocator cpp(16, 4);
  const auto same_available = [&] {
    int32_t available = -1;
    EXPECT_EQ(folio_token_allocator_available(c, &available), FOLIO_OK);
    EXPECT_EQ(available, cpp.available());
  };
  int32_t allocated = -1;
  Ints slots(5, -1), expected(5, -1);
  ASSERT_EQ(folio_token_allocator_alloc(c, slots.data(), 5, &allocated), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(allocated, 1);
  ASSERT_TRUE(cpp.alloc(expected));
  EXPECT_EQ(slots, expected);

  const Ints prefix = {5}, lens = {9}, last = {slots[4]};
  Ints more(4, -1), expected_more(4, -1);
  ASSERT_EQ(
      folio_token_allocator_alloc_extend(c, prefix.data(), lens.data(), last.data(), 1, more.data(), 4, &allocated),
      FOLIO_OK)
      << folio_last_error();
  ASSERT_TRUE(cpp.alloc_extend(prefix, lens, last, expected_more));
  EXPECT_EQ(more, expected_more);
  same_available();

  const Ints decode_lens = {10}, decode_last = {more[3]};
  int32_t next = -1;
  ASSERT_EQ(folio_token_allocator_alloc_decode(c, decode_lens.data(), decode_last.data(), 1, &next, &allocated),
            FOLIO_OK)
      << folio_last_error();
  EXPECT_EQ(next, more[3] + 1);

  // Too few: no error, and nothing changes.
  Ints many(8, -7);
  ASSERT_EQ(folio_token_allocator_alloc(c, many.data(), 8, &allocated), FOLIO_OK);
  EXPECT_EQ(allocated, 0);
  EXPECT_EQ(many, Ints(8, -7));
  same_available();

  // A group holds freed pages back.
  ASSERT_EQ(folio_token_allocator_open_group(c), FOLIO_OK);
  EXPECT_EQ(folio_token_allocator_open_group(c), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(folio_token_allocator_clear(c), FOLIO_INVALID_ARGUMENT);
  ASSERT_EQ(folio_token_allocator_free(c, slots.data(), 1), FOLIO_OK);
  same_available();
  ASSERT_EQ(folio_token_allocator_close_group(c), FOLIO_OK);
  cpp.free(Ints{slots[0]});
  same_available();
  expect_refusal(folio_token_allocator_close_group(c), FOLIO_INVALID_ARGUMENT, "no open group");
  expect_refusal(folio_token_allocator_free(c, slots.data(), 1), FOLIO_INVALID_ARGUMENT, std::to_string(slots[0]));
  ASSERT_EQ(folio_token_allocator_clear(c), FOLIO_OK);
  cpp.clear();
  same_available();
}

TEST(CTokenAllocator, AnOpenGroupIsNoReasonNotToFree) {
  const auto allocator = make_allocator(16, 4);
  ASSERT_EQ(folio_token_allocator_open_group(allocator.get()), FOLIO_OK);
}

TEST(CReqToTokenPool, RowsAndTheTable) {
  const auto owned = make<folio_req_to_token_pool>(
      [](folio_req_to_token_pool** pool) { return folio_create_req_to_token_pool(3, 8, pool); });
  folio_req_to_token_pool* pool = owned.get();
  Ints rows(2);
  int32_t allocated = -1, available = -1;
  ASSERT_EQ(folio_req_to_token_pool_alloc(pool, rows.data(), 2, &allocated), FOLIO_OK);
  EXPECT_EQ(allocated, 1);
  EXPECT_EQ(rows, (Ints{1, 2}));
  ASSERT_EQ(folio_req_to_token_pool_alloc(pool, rows.data(), 2, &allocated), FOLIO_OK);
  EXPECT_EQ(allocated, 0);
  ASSERT_EQ(folio_req_to_token_pool_available(pool, &available), FOLIO_OK);
  EXPECT_EQ(available, 1);
  const Ints slots = {7, 3, 9};
  ASSERT_EQ(folio_req_to_token_pool_write(pool, 2, 1, slots.data(), 3), FOLIO_OK) << folio_last_error();
  folio_page_table_view table;
  ASSERT_EQ(folio_req_to_token_pool_table(pool, &table), FOLIO_OK);
  EXPECT_EQ(table.kind, FOLIO_TABLE_DENSE);
  EXPECT_EQ(table.num_rows, 4);
  EXPECT_EQ(table.indices[2 * table.row_stride + 3], 9);
  EXPECT_EQ(folio_req_to_token_pool_write(pool, 2, 6, slots.data(), 3), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(folio_req_to_token_pool_write(pool, 3, 0, slots.data(), 3), FOLIO_INVALID_ARGUMENT);
  ASSERT_EQ(folio_req_to_token_pool_free_row(pool, 1), FOLIO_OK);
  EXPECT_EQ(folio_req_to_token_pool_free_row(pool, 1), FOLIO_INVALID_ARGUMENT);
  ASSERT_EQ(folio_req_to_token_pool_clear(pool), FOLIO_OK);
  EXPECT_EQ(table.indices[2 * table.row_stride + 3], 0);
}

TEST(CKvPool, WritesWhatTheClassDoes) {
  const auto context = make_context();
  const folio_kv_pool_config config = pool_config();
  const auto pool = make<folio_kv_pool>([&](folio_kv_pool** made) { return folio_create_kv_pool(&config, made); });
  folio::KvPool cpp(cpp_config());
  size_t k_bytes = 0, v_bytes = 0;
  ASSERT_EQ(folio_kv_pool_bytes_per_layer(&config, &k_bytes, &v_bytes), FOLIO_OK);
  EXPECT_EQ(k_bytes, folio::KvPool::k_bytes_per_layer(cpp_config()));
  EXPECT_EQ(v_bytes, folio::KvPool::v_bytes_per_layer(cpp_config()));

  folio_scale k_scale = FOLIO_SCALE_INIT, v_scale = FOLIO_SCALE_INIT, read;
  k_scale.value = 0.5f;
  ASSERT_EQ(folio_kv_pool_set_scales(pool.get(), 1, &k_scale, &v_scale), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(folio_kv_pool_scales(pool.get(), 1, &read, &v_scale), FOLIO_OK);
  EXPECT_EQ(read.value, 0.5f);
  folio::Scale cpp_scale;
  cpp_scale.value = 0.5f;
  cpp.set_scales(1, cpp_scale, {});

  const std::vector<float> k = random_floats(3 * 16, 1), v = random_floats(3 * 16, 2);
  const std::vector<int64_t> slots = {4, -1, 17};
  const folio_const_tensor_view k_view = const_packed(k.data(), FOLIO_DTYPE_FLOAT32, {3, 2, 8});
  const folio_const_tensor_view v_view = const_packed(v.data(), FOLIO_DTYPE_FLOAT32, {3, 16});
  ASSERT_EQ(folio_kv_pool_write(pool.get(), context.get(), 1, &k_view, &v_view, slots.data(), 3, nullptr), FOLIO_OK)
      << folio_last_error();
  folio::write_kv_cache(folio::Context::cpu(), cpp.write_args(1, {k.data(), folio::DType::kFloat32, {3, 2, 8}},
                                                              {v.data(), folio::DType::kFloat32, {3, 16}}, slots));
  folio_tensor_view k_buffer, v_buffer;
  ASSERT_EQ(folio_kv_pool_buffers(pool.get(), 1, &k_buffer, &v_buffer), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(k_buffer.shape[0], 20);
  EXPECT_EQ(std::memcmp(k_buffer.data, cpp.key_buffer(1).data, k_bytes), 0);
  EXPECT_EQ(std::memcmp(v_buffer.data, cpp.value_buffer(1).data, v_bytes), 0);

  folio_kv_cache_view view;
  ASSERT_EQ(folio_kv_pool_view(pool.get(), 1, 0, &view), FOLIO_OK);
  EXPECT_EQ(view.page_size, 4);
  EXPECT_EQ(view.k, k_buffer.data);
  ASSERT_EQ(folio_kv_pool_view(pool.get(), 1, 1, &view), FOLIO_OK);
  EXPECT_EQ(view.num_pages, 20);
  EXPECT_EQ(folio_kv_pool_view(pool.get(), 2, 0, &view), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(folio_kv_pool_view(pool.get(), 1, 3, &view), FOLIO_INVALID_ARGUMENT);
}

TEST(CKvPool, OverTheCallersMemory) {
  const folio_kv_pool_config config = pool_config();
  size_t k_bytes = 0, v_bytes = 0;
  ASSERT_EQ(folio_kv_pool_bytes_per_layer(&config, &k_bytes, &v_bytes), FOLIO_OK);
  std::vector<unsigned char> memory(2 * (k_bytes + v_bytes));
  void* k[] = {memory.data(), memory.data() + k_bytes};
  void* v[] = {memory.data() + 2 * k_bytes, memory.data() + 2 * k_bytes + v_bytes};
  const auto pool =
      make<folio_kv_pool>([&](folio_kv_pool** made) { return folio_create_kv_pool_over(&config, k, v, made); });
  folio_kv_cache_view view;
  ASSERT_EQ(folio_kv_pool_view(pool.get(), 1, 0, &view), FOLIO_OK);
  EXPECT_EQ(view.k, k[1]);
  EXPECT_EQ(view.v, v[1]);
  folio_kv_pool* none = nullptr;
  expect_null_refused(folio_create_kv_pool_over(&config, nullptr, v, &none), "k");
}

TEST(CPools, BadArguments) {
  folio_token_allocator* no_allocator = nullptr;
  folio_req_to_token_pool* no_rows = nullptr;
  folio_kv_pool* no_pool = nullptr;
  int32_t number = -7;
  expect_null_refused(folio_create_token_allocator(8, 1, nullptr), "allocator");
  expect_refusal(folio_create_token_allocator(9, 4, &no_allocator), FOLIO_INVALID_ARGUMENT, "9");
  EXPECT_EQ(no_allocator, nullptr);
  expect_null_refused(folio_token_allocator_available(nullptr, &number), "allocator");
  expect_null_refused(folio_token_allocator_alloc(nullptr, &number, 1, &number), "allocator");
  expect_null_refused(folio_token_allocator_free(nullptr, &number, 1), "allocator");
  const auto allocator = make_allocator(8, 1);
  expect_null_refused(folio_token_allocator_alloc(allocator.get(), &number, 1, nullptr), "allocated");
  expect_null_refused(folio_token_allocator_alloc(allocator.get(), nullptr, 1, &number), "slots");
  expect_refusal(folio_token_allocator_alloc(allocator.get(), &number, -1, &number), FOLIO_INVALID_ARGUMENT,
                 "slots has -1 elements");
  expect_refusal(
      folio_token_allocator_alloc_extend(allocator.get(), nullptr, nullptr, nullptr, -1, nullptr, 0, &number),
      FOLIO_INVALID_ARGUMENT, "has -1 elements");
  expect_null_refused(folio_create_req_to_token_pool(1, 1, nullptr), "pool");
  EXPECT_EQ(folio_create_req_to_token_pool(0, 1, &no_rows), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(no_rows, nullptr);
  expect_null_refused(folio_req_to_token_pool_write(nullptr, 1, 0, nullptr, 0), "pool");
  folio_kv_pool_config config = pool_config();
  config.struct_size = 4;
  expect_refusal(folio_create_kv_pool(&config, &no_pool), FOLIO_INVALID_ARGUMENT, "folio_kv_pool_config_init");
  config = pool_config();
  config.layout = 3;
  expect_refusal(folio_create_kv_pool(&config, &no_pool), FOLIO_INVALID_ARGUMENT, "config.layout is 3");
  config.layout = FOLIO_POOL_HEAD_MAJOR;
  config.reserved = 1;
  expect_refusal(folio_create_kv_pool(&config, &no_pool), FOLIO_INVALID_ARGUMENT, "config.reserved is 1");
  expect_null_refused(folio_create_kv_pool(nullptr, &no_pool), "config");
  expect_null_refused(folio_kv_pool_view(nullptr, 0, 0, nullptr), "pool");
  EXPECT_EQ(no_pool, nullptr);
  EXPECT_EQ(number, -7);
  folio_free_token_allocator(nullptr);
  folio_free_req_to_token_pool(nullptr);
  folio_free_kv_pool(nullptr);
}

}  // namespace
}  // namespace folio_c_test
