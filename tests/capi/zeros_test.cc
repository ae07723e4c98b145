// Structures as languages without C's macros make them: memory of zeros, then a call of an init function, or none.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "c_decode.hpp"
#include "folio/c/folio.h"
#include "init_macros.h"

namespace folio_c_test {
namespace {

template <typename Struct>
Struct zeros() {
  Struct value;
  std::memset(&value, 0, sizeof(value));
  return value;
}

/// Memory of zeros with the size set by hand.
template <typename Struct>
Struct sized_zeros() {
  auto value = zeros<Struct>();
  value.struct_size = sizeof(Struct);
  return value;
}

TEST(CInit, Functions_WriteWhatTheMacrosHave) {
  for (const int fill : {0x00, 0xee}) EXPECT_STREQ(init_function_unlike_its_macro(fill), "");
}

TEST(CInit, ALaterCallersLargerStructure_IsZeroBehindTheKnownFields) {
  struct {
    folio_attention_config config;
    unsigned char later[16];
  } larger;
  std::memset(&larger, 0xee, sizeof(larger));
  ASSERT_EQ(folio_attention_config_init(&larger.config, sizeof(larger)), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(larger.config.struct_size, sizeof(larger));
  EXPECT_EQ(larger.config.window_left, -1);
  for (const unsigned char byte : larger.later) EXPECT_EQ(byte, 0);
}

TEST(CInit, WrongSizesAndNull_AreRefused) {
  folio_batch batch = zeros<folio_batch>();
  for (const size_t size : {size_t{0}, sizeof(folio_batch) - 4, size_t{4097}, size_t{1} << 40}) {
    expect_refusal(folio_batch_init(&batch, size), FOLIO_INVALID_ARGUMENT,
                   "batch.struct_size is " + std::to_string(size));
  }
  EXPECT_EQ(batch.struct_size, 0u);
  expect_refusal(folio_batch_init(nullptr, sizeof(folio_batch)), FOLIO_INVALID_ARGUMENT, "batch is null");
  expect_refusal(folio_scale_init(nullptr), FOLIO_INVALID_ARGUMENT, "scale is null");
  expect_refusal(folio_kv_shard_init(nullptr), FOLIO_INVALID_ARGUMENT, "shard is null");
}

TEST(CZeros, GrowingStructures_AreRefusedByTheNameOfTheirInitFunction) {
  Decode d;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  const auto refused = [](folio_status status, const char* function) {
    expect_refusal(status, FOLIO_INVALID_ARGUMENT, "struct_size is 0");
    expect_refusal(status, FOLIO_INVALID_ARGUMENT, function);
  };
  folio_op* op = nullptr;
  folio_context* context = nullptr;
  const auto context_options = zeros<folio_context_options>();
  refused(folio_create_cpu_context(&context_options, &context), "folio_context_options_init");
  const auto config = zeros<folio_attention_config>();
  refused(folio_prepare(d.context.get(), &config, nullptr, &op), "folio_attention_config_init");
  const auto options = zeros<folio_prepare_options>();
  refused(folio_prepare(d.context.get(), &d.config, &options, &op), "folio_prepare_options_init");
  const auto batch = zeros<folio_batch>();
  refused(folio_make_plan(d.op.get(), &batch, d.buffer.get(), nullptr, &d.plan), "folio_batch_init");
  d.segment.struct_size = 0;
  refused(d.plan_batch(), "folio_kv_segment_init");
  d.segment.struct_size = sizeof(d.segment);
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  const auto args = zeros<folio_attention_args>();
  refused(folio_validate(&d.plan, &args), "folio_attention_args_init");
  d.segment_args.struct_size = 0;
  refused(folio_validate(&d.plan, &d.args), "folio_segment_args_init");
  const auto write = zeros<folio_cache_write_args>();
  refused(folio_write_kv_cache(d.context.get(), &write, nullptr), "folio_cache_write_args_init");
}

/// With the size set by hand, all other zeros are defaults, but for the windows of a config.
TEST(CZeros, WithTheirSize_AreDefaultsOrRefused) {
  Decode d;
  auto config = sized_zeros<folio_attention_config>();
  config.num_q_heads = Decode::kHeads;
  config.num_kv_heads = Decode::kKvHeads;
  config.head_dim_qk = config.head_dim_v = Decode::kDim;
  config.page_size = Decode::kPageSize;
  config.q = config.kv = FOLIO_DTYPE_FLOAT32;
  config.mask = FOLIO_MASK_CAUSAL;
  folio_op* raw_op = nullptr;
  expect_refusal(folio_prepare(d.context.get(), &config, nullptr, &raw_op), FOLIO_INVALID_ARGUMENT,
                 "config.window_left and window_right are both 0");
  config.window_left = config.window_right = -1;
  const auto options = sized_zeros<folio_prepare_options>();
  ASSERT_EQ(folio_prepare(d.context.get(), &config, &options, &raw_op), FOLIO_OK) << folio_last_error();
  d.op.reset(raw_op);
  folio_plan_buffer* raw_buffer = nullptr;
  ASSERT_EQ(folio_create_plan_buffer(d.op.get(), &raw_buffer), FOLIO_OK);
  d.buffer.reset(raw_buffer);

  auto segment = sized_zeros<folio_kv_segment>();
  segment.kv_len = d.segment.kv_len;
  auto batch = sized_zeros<folio_batch>();
  batch.num_requests = batch.num_tokens = 2;
  batch.cu_q = d.batch.cu_q;
  batch.segments = &segment;
  batch.num_segments = 1;
  ASSERT_EQ(folio_make_plan(d.op.get(), &batch, d.buffer.get(), nullptr, &d.plan), FOLIO_OK) << folio_last_error();

  auto segment_args = sized_zeros<folio_segment_args>();
  segment_args.cache = d.segment_args.cache;
  segment_args.table = d.segment_args.table;
  auto args = sized_zeros<folio_attention_args>();
  args.segments = &segment_args;
  args.num_segments = 1;
  args.q = d.args.q;
  args.out = d.args.out;
  d.args = args;
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  d.expect_result();

  float scale = 2.0f;  // in memory, value left at 0
  segment_args.v_scale.data = &scale;
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  EXPECT_NEAR(d.out[0], 2.0f * d.expected(0), 1e-3);

  segment.shard.interleave = 1;  // neither the default nor a shard
  expect_refusal(folio_make_plan(d.op.get(), &batch, d.buffer.get(), nullptr, &d.plan), FOLIO_INVALID_ARGUMENT,
                 "shard is rank 0 of 0, interleave 1");
}

/// As ctypes, cgo and bindgen have it: zeros, an init function, then the fields that the caller means.
TEST(CZeros, ThenTheInitFunctions_Decode) {
  Decode d;
  const folio_kv_segment segment = d.segment;
  const folio_batch batch = d.batch;
  const folio_segment_args segment_args = d.segment_args;
  const folio_attention_args args = d.args;
  ASSERT_EQ(folio_kv_segment_init(&d.segment, sizeof(d.segment)), FOLIO_OK);
  ASSERT_EQ(folio_batch_init(&d.batch, sizeof(d.batch)), FOLIO_OK);
  ASSERT_EQ(folio_segment_args_init(&d.segment_args, sizeof(d.segment_args)), FOLIO_OK);
  ASSERT_EQ(folio_attention_args_init(&d.args, sizeof(d.args)), FOLIO_OK);
  d.segment.kv_len = segment.kv_len;
  d.batch.num_requests = d.batch.num_tokens = 2;
  d.batch.cu_q = batch.cu_q;
  d.batch.segments = &d.segment;
  d.batch.num_segments = 1;
  d.segment_args.cache = segment_args.cache;
  d.segment_args.table = segment_args.table;
  d.args.segments = &d.segment_args;
  d.args.num_segments = 1;
  d.args.q = args.q;
  d.args.out = args.out;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  d.expect_result();
}

}  // namespace
}  // namespace folio_c_test
