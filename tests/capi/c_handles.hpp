#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "folio/c/folio.h"

namespace folio_c_test {

struct Free {
  void operator()(folio_context* handle) const { folio_free_context(handle); }
  void operator()(folio_op* handle) const { folio_free_op(handle); }
  void operator()(folio_plan_buffer* handle) const { folio_free_plan_buffer(handle); }
  void operator()(folio_explanation* handle) const { folio_free_explanation(handle); }
  void operator()(folio_kv_pool* handle) const { folio_free_kv_pool(handle); }
  void operator()(folio_token_allocator* handle) const { folio_free_token_allocator(handle); }
  void operator()(folio_req_to_token_pool* handle) const { folio_free_req_to_token_pool(handle); }
  void operator()(folio_slot_changes* handle) const { folio_free_slot_changes(handle); }
  void operator()(folio_prefix_cache* handle) const { folio_free_prefix_cache(handle); }
  void operator()(folio_prefix_lock* handle) const { folio_free_prefix_lock(handle); }
  void operator()(folio_window_token_allocator* handle) const { folio_free_window_token_allocator(handle); }
  void operator()(void* memory) const { std::free(memory); }
};
template <typename Handle>
using Owned = std::unique_ptr<Handle, Free>;

/// What a folio_create_... call gives, its status checked.
template <typename Handle, typename Create>
Owned<Handle> make(const Create& create) {
  Handle* handle = nullptr;
  EXPECT_EQ(create(&handle), FOLIO_OK) << folio_last_error();
  return Owned<Handle>(handle);
}

inline Owned<folio_context> make_context(int32_t num_threads = 2) {
  folio_context_options options = FOLIO_CONTEXT_OPTIONS_INIT;
  options.num_threads = num_threads;
  return make<folio_context>([&](folio_context** context) { return folio_create_cpu_context(&options, context); });
}

inline folio_tensor_view packed(void* data, folio_dtype dtype, const std::vector<int64_t>& shape) {
  folio_tensor_view view;
  EXPECT_EQ(folio_make_tensor_view(data, dtype, static_cast<int32_t>(shape.size()), shape.data(), &view), FOLIO_OK);
  return view;
}

inline folio_const_tensor_view const_packed(const void* data, folio_dtype dtype, const std::vector<int64_t>& shape) {
  folio_const_tensor_view view;
  EXPECT_EQ(folio_make_const_tensor_view(data, dtype, static_cast<int32_t>(shape.size()), shape.data(), &view),
            FOLIO_OK);
  return view;
}

inline std::vector<float> random_floats(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(generator() % 2001) / 1000.0f - 1.0f;
  return values;
}

/// Equal bit for bit.
template <typename T>
void expect_same(const std::vector<T>& c, const std::vector<T>& cpp) {
  ASSERT_EQ(c.size(), cpp.size());
  EXPECT_EQ(std::memcmp(c.data(), cpp.data(), c.size() * sizeof(T)), 0);
}

/// `status` with this thread's message holding `text`.
inline void expect_refusal(folio_status status, folio_status expected, const std::string& text) {
  EXPECT_EQ(status, expected) << text << ": " << folio_last_error();
  EXPECT_NE(std::string(folio_last_error()).find(text), std::string::npos)
      << "expected \"" << text << "\" in \"" << folio_last_error() << "\"";
}

/// Null where none may be: the message names it.
inline void expect_null_refused(folio_status status, const std::string& what) {
  expect_refusal(status, FOLIO_INVALID_ARGUMENT, what + " is null");
}

}  // namespace folio_c_test
