// Every pointer, structure size and enumeration is checked before it is used.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "c_decode.hpp"
#include "folio/c/folio.h"

namespace folio_c_test {
namespace {

TEST(CRefusals, NullPointers) {
  Decode d;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  const folio_context* context = d.context.get();
  folio_op* op = d.op.get();
  folio_plan_buffer* buffer = d.buffer.get();
  folio_op* new_op = nullptr;
  folio_plan_buffer* new_buffer = nullptr;
  size_t bytes = 0;
  const char* name = nullptr;
  int64_t elements = 0;
  folio_kv_cache_view view;
  folio_kv_format format = 0;
  int32_t page_size = 0;
  folio_cache_write_args write = FOLIO_CACHE_WRITE_ARGS_INIT;
  const auto refused = [](folio_status status, const char* what) {
    expect_refusal(status, FOLIO_INVALID_ARGUMENT, std::string(what) + " is null");
  };
  refused(folio_create_cpu_context(nullptr, nullptr), "context");
  refused(folio_create_cuda_context(0, nullptr, nullptr), "context");
  refused(folio_prepare(nullptr, &d.config, nullptr, &new_op), "context");
  refused(folio_prepare(context, nullptr, nullptr, &new_op), "config");
  refused(folio_prepare(context, &d.config, nullptr, nullptr), "op");
  refused(folio_kernel_name(nullptr, &name), "op");
  refused(folio_kernel_name(op, nullptr), "name");
  refused(folio_fp8_mma(nullptr, &page_size), "op");
  refused(folio_fp8_mma(op, nullptr), "fp8_mma");
  refused(folio_create_plan_buffer(nullptr, &new_buffer), "op");
  refused(folio_create_plan_buffer(op, nullptr), "buffer");
  refused(folio_make_plan(nullptr, &d.batch, buffer, nullptr, &d.plan), "op");
  refused(folio_make_plan(op, nullptr, buffer, nullptr, &d.plan), "batch");
  refused(folio_make_plan(op, &d.batch, nullptr, nullptr, &d.plan), "buffer");
  refused(folio_make_plan(op, &d.batch, buffer, nullptr, nullptr), "plan");
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  refused(folio_check_plans(nullptr), "buffer");
  refused(folio_workspace_size(nullptr, &bytes), "op");
  refused(folio_workspace_size(op, nullptr), "bytes");
  refused(folio_plan_workspace_size(nullptr, &bytes), "plan");
  refused(folio_plan_workspace_size(&d.plan, nullptr), "bytes");
  refused(folio_init_workspace(nullptr, nullptr, 0, nullptr), "op");
  refused(folio_run(nullptr, &d.args, nullptr, 0, nullptr), "plan");
  refused(folio_run(&d.plan, nullptr, nullptr, 0, nullptr), "args");
  refused(folio_validate(nullptr, &d.args), "plan");
  refused(folio_validate(&d.plan, nullptr), "args");
  refused(folio_kv_cache_elements(nullptr, &elements, &elements), "shape");
  refused(folio_kv_cache_elements(&d.shape, nullptr, &elements), "k_elements");
  refused(folio_kv_cache_elements(&d.shape, &elements, nullptr), "v_elements");
  for (const auto make : {folio_make_nhd_view, folio_make_hnd_view, folio_make_cpu_packed_view}) {
    refused(make(nullptr, d.k.data(), d.v.data(), &view), "shape");
    refused(make(&d.shape, d.k.data(), d.v.data(), nullptr), "view");
  }
  refused(folio_recommended_kv_format(nullptr, context, &format, &page_size), "config");
  refused(folio_recommended_kv_format(&d.config, nullptr, &format, &page_size), "context");
  refused(folio_recommended_kv_format(&d.config, context, nullptr, &page_size), "format");
  refused(folio_recommended_kv_format(&d.config, context, &format, nullptr), "page_size");
  const folio_workload_mix mix = {1, 0};
  refused(folio_recommended_kv_format_for_mix(nullptr, context, &mix, &format, &page_size), "config");
  refused(folio_recommended_kv_format_for_mix(&d.config, nullptr, &mix, &format, &page_size), "context");
  refused(folio_recommended_kv_format_for_mix(&d.config, context, nullptr, &format, &page_size), "mix");
  refused(folio_recommended_kv_format_for_mix(&d.config, context, &mix, nullptr, &page_size), "format");
  refused(folio_recommended_kv_format_for_mix(&d.config, context, &mix, &format, nullptr), "page_size");
  refused(folio_write_kv_cache(nullptr, &write, nullptr), "context");
  refused(folio_write_kv_cache(context, nullptr, nullptr), "args");
  EXPECT_EQ(new_op, nullptr);
  EXPECT_EQ(new_buffer, nullptr);
}

TEST(CRefusals, NoPlanInAPlan) {
  Decode d;
  size_t bytes = 0;
  expect_refusal(folio_plan_workspace_size(&d.plan, &bytes), FOLIO_INVALID_ARGUMENT, "plan holds no plan");
  expect_refusal(folio_run(&d.plan, &d.args, nullptr, 0, nullptr), FOLIO_INVALID_ARGUMENT, "plan holds no plan");
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  d.batch.cu_q = nullptr;
  EXPECT_EQ(d.plan_batch(), FOLIO_INVALID_ARGUMENT);
  expect_refusal(folio_run(&d.plan, &d.args, nullptr, 0, nullptr), FOLIO_INVALID_ARGUMENT, "plan holds no plan");
}

TEST(CRefusals, StructSizes) {
  Decode d;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  folio_prepare_options options = FOLIO_PREPARE_OPTIONS_INIT;
  folio_cache_write_args write = FOLIO_CACHE_WRITE_ARGS_INIT;
  folio_op* op = nullptr;
  struct Case {
    const char* name;
    uint32_t* size;
    std::function<folio_status()> call;
  };
  const std::vector<Case> cases = {
      {"config", &d.config.struct_size, [&] { return folio_prepare(d.context.get(), &d.config, nullptr, &op); }},
      {"options", &options.struct_size, [&] { return folio_prepare(d.context.get(), &d.config, &options, &op); }},
      {"batch", &d.batch.struct_size, [&] { return d.plan_batch(); }},
      {"batch.segments", &d.segment.struct_size, [&] { return d.plan_batch(); }},
      {"args", &d.args.struct_size, [&] { return folio_validate(&d.plan, &d.args); }},
      {"args.segments", &d.segment_args.struct_size, [&] { return folio_validate(&d.plan, &d.args); }},
      {"args", &write.struct_size, [&] { return folio_write_kv_cache(d.context.get(), &write, nullptr); }},
  };
  for (const Case& c : cases) {
    const uint32_t right = *c.size;
    for (const uint32_t wrong : {uint32_t{0}, uint32_t{4}, right - 4, uint32_t{4104}, uint32_t{0xcdcdcdc8}}) {
      *c.size = wrong;
      const folio_status status = c.call();
      *c.size = right;
      EXPECT_EQ(status, FOLIO_INVALID_ARGUMENT) << c.name << " " << wrong;
      const std::string message = folio_last_error();
      EXPECT_NE(message.find(std::string(c.name)), std::string::npos) << message;
      EXPECT_NE(message.find("struct_size is " + std::to_string(wrong)), std::string::npos) << message;
      ASSERT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
    }
  }
}

TEST(CRefusals, FieldsOfALaterVersion) {
  struct {
    folio_attention_config config;
    uint32_t later[4];
  } larger = {FOLIO_ATTENTION_CONFIG_INIT, {0, 0, 0, 0}};
  Decode d;
  larger.config = d.config;
  larger.config.struct_size = sizeof(larger);
  folio_op* op = nullptr;
  ASSERT_EQ(folio_prepare(d.context.get(), &larger.config, nullptr, &op), FOLIO_OK) << folio_last_error();
  folio_free_op(op);
  larger.later[3] = 1;
  expect_refusal(folio_prepare(d.context.get(), &larger.config, nullptr, &op), FOLIO_UNSUPPORTED,
                 "config has fields beyond byte 72 that are not 0");
}

// Programs that were compiled with the first version's structures go on.
TEST(CRefusals, StructuresOfTheFirstVersion) {
  Decode d;
  d.config.struct_size = 64;
  d.config.attention_chunk = -1;  // beyond what was given: not read
  folio_op* op = nullptr;
  ASSERT_EQ(folio_prepare(d.context.get(), &d.config, nullptr, &op), FOLIO_OK) << folio_last_error();
  folio_free_op(op);
  folio_prepare_options prepare_options = FOLIO_PREPARE_OPTIONS_INIT;
  prepare_options.struct_size = 48;
  prepare_options.mix.decode_tokens = -1;  // likewise
  ASSERT_EQ(folio_prepare(d.context.get(), &d.config, &prepare_options, &op), FOLIO_OK) << folio_last_error();
  folio_free_op(op);
  folio_context_options options = FOLIO_CONTEXT_OPTIONS_INIT;
  options.struct_size = 48;
  options.pinning = -1;  // likewise
  folio_context* context = nullptr;
  ASSERT_EQ(folio_create_cpu_context(&options, &context), FOLIO_OK) << folio_last_error();
  folio_free_context(context);
  const int32_t start = 0;
  d.batch.struct_size = 64;
  d.batch.kv_start = &start;  // likewise: it would be refused
  EXPECT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
  folio_batch batch;
  std::memset(&batch, 0xee, sizeof(batch));
  ASSERT_EQ(folio_batch_init(&batch, 64), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(batch.struct_size, 64u);
  EXPECT_NE(batch.spans, nullptr);  // not written

  d.batch = FOLIO_BATCH_INIT;
  d.batch.num_requests = d.batch.num_tokens = 2;
  d.batch.cu_q = d.cu_q.data();
  d.batch.segments = &d.segment;
  d.batch.num_segments = 1;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
  float scale = 1.0f;
  d.segment_args.struct_size = 416;
  d.segment_args.k_token_scales.data = &scale;  // likewise
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  d.expect_result();
  folio_cache_write_args write = FOLIO_CACHE_WRITE_ARGS_INIT;
  write.struct_size = 376;
  write.v_token_scales.data = &scale;  // likewise
  write.k = write.v = rows(d.k.data(), 0, Decode::kKvHeads, Decode::kDim);
  write.cache = d.segment_args.cache;
  EXPECT_EQ(folio_write_kv_cache(d.context.get(), &write, nullptr), FOLIO_OK) << folio_last_error();
  write.struct_size = 440;  // a version between
  EXPECT_EQ(folio_write_kv_cache(d.context.get(), &write, nullptr), FOLIO_INVALID_ARGUMENT) << "token scales are read";
  write.v_token_scales.data = nullptr;
  EXPECT_EQ(folio_write_kv_cache(d.context.get(), &write, nullptr), FOLIO_OK) << folio_last_error();
  d.args.struct_size = 352;
  d.args.out_block_scale = &scale;  // likewise
  EXPECT_EQ(d.run(), FOLIO_OK) << folio_last_error();
}

TEST(CRefusals, MasksAsRules) {
  Decode d;
  folio_op* op = nullptr;
  d.config.attention_chunk = -1;
  expect_refusal(folio_prepare(d.context.get(), &d.config, nullptr, &op), FOLIO_INVALID_ARGUMENT,
                 "attention_chunk is -1");
  d.config.attention_chunk = 0;
  d.config.span_window_left = 5;
  expect_refusal(folio_prepare(d.context.get(), &d.config, nullptr, &op), FOLIO_INVALID_ARGUMENT, "lacks kSpans");
  const int32_t numbers[64] = {};
  d.batch.kv_start = numbers;
  expect_refusal(d.plan_batch(), FOLIO_INVALID_ARGUMENT, "kv_start is given");
  d.batch.kv_start = nullptr;
  d.batch.spans = numbers;
  expect_refusal(d.plan_batch(), FOLIO_INVALID_ARGUMENT, "spans is given");
  d.batch.spans = nullptr;
  d.batch.causal = reinterpret_cast<const uint8_t*>(numbers);
  expect_refusal(d.plan_batch(), FOLIO_INVALID_ARGUMENT, "causal is given");
}

TEST(CRefusals, Enumerations) {
  Decode d;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  folio_cache_write_args write = FOLIO_CACHE_WRITE_ARGS_INIT;
  folio_op* op = nullptr;
  folio_kv_cache_view view;
  const auto prepare = [&] { return folio_prepare(d.context.get(), &d.config, nullptr, &op); };
  const auto plan = [&] { return d.plan_batch(); };
  const auto run = [&] { return folio_run(&d.plan, &d.args, nullptr, 0, nullptr); };
  const auto put = [&] { return folio_write_kv_cache(d.context.get(), &write, nullptr); };
  const auto make = [&] { return folio_make_nhd_view(&d.shape, nullptr, nullptr, &view); };
  struct Case {
    const char* name;
    int32_t* field;
    std::function<folio_status()> call;
  };
  const std::vector<Case> cases = {
      {"config.q is", &d.config.q, prepare},
      {"config.kv is", &d.config.kv, prepare},
      {"config.ragged_kv is", &d.config.ragged_kv, prepare},
      {"config.out is", &d.config.out, prepare},
      {"config.kv_format is", &d.config.kv_format, prepare},
      {"config.mask is", &d.config.mask, prepare},
      {"config.determinism is", &d.config.determinism, prepare},
      {"batch.where is", &d.batch.where, plan},
      {"batch.custom_mask_scope is", &d.batch.custom_mask_scope, plan},
      {"segment.source is", &d.segment.source, plan},
      {"segment.mask is", &d.segment.mask, plan},
      {"q.dtype is", &d.args.q.dtype, run},
      {"out.dtype is", &d.args.out.dtype, run},
      {"lse.base is", &d.args.lse.base, run},
      {"q_scale.granularity is", &d.args.q_scale.granularity, run},
      {"out_scale.granularity is", &d.args.out_scale.granularity, run},
      {"cache.format is", &d.segment_args.cache.format, run},
      {"cache.dtype is", &d.segment_args.cache.dtype, run},
      {"table.kind is", &d.segment_args.table.kind, run},
      {"ragged.k.dtype is", &d.segment_args.ragged.k.dtype, run},
      {"ragged.v.dtype is", &d.segment_args.ragged.v.dtype, run},
      {"k_scale.granularity is", &d.segment_args.k_scale.granularity, run},
      {"v_scale.granularity is", &d.segment_args.v_scale.granularity, run},
      {"k.dtype is", &write.k.dtype, put},
      {"v.dtype is", &write.v.dtype, put},
      {"cache.format is", &write.cache.format, put},
      {"k_scale.granularity is", &write.k_scale.granularity, put},
      {"v_scale.granularity is", &write.v_scale.granularity, put},
      {"shape.dtype is", &d.shape.dtype, make},
  };
  for (const Case& c : cases) {
    const int32_t right = *c.field;
    for (const int32_t wrong : {-1, 8, INT32_MIN, INT32_MAX}) {
      *c.field = wrong;
      expect_refusal(c.call(), FOLIO_INVALID_ARGUMENT, std::string(c.name).append(" ").append(std::to_string(wrong)));
      *c.field = right;
    }
    ASSERT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
  }
  d.config.features = 1u << 31;
  expect_refusal(prepare(), FOLIO_INVALID_ARGUMENT, "config.features is 2147483648");
}

TEST(CRefusals, CountsAndArrays) {
  Decode d;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  d.args.num_segments = -1;
  expect_refusal(folio_validate(&d.plan, &d.args), FOLIO_INVALID_ARGUMENT, "the number of args.segments is -1");
  d.args.num_segments = 1;
  d.args.segments = nullptr;
  expect_refusal(folio_validate(&d.plan, &d.args), FOLIO_INVALID_ARGUMENT, "args.segments is null");
  d.batch.segments = nullptr;
  expect_refusal(d.plan_batch(), FOLIO_INVALID_ARGUMENT, "batch.segments is null");
  d.batch.segments = &d.segment;
  d.batch.num_segments = -1;
  expect_refusal(d.plan_batch(), FOLIO_INVALID_ARGUMENT, "the number of batch.segments is -1");
}

TEST(CRefusals, BoundsWithoutHasBounds) {
  Decode d;
  folio_prepare_options options = FOLIO_PREPARE_OPTIONS_INIT;
  options.max_tokens = 5;
  folio_op* op = nullptr;
  expect_refusal(folio_prepare(d.context.get(), &d.config, &options, &op), FOLIO_INVALID_ARGUMENT, "has_bounds is 0");
}

TEST(CRefusals, MixesThatAreNone) {
  Decode d;
  for (const double wrong : {-1.0, std::nan(""), HUGE_VAL}) {
    for (const folio_workload_mix mix : {folio_workload_mix{wrong, 1}, folio_workload_mix{1, wrong}}) {
      const char* message = mix.prefill_tokens == 1 ? "mix.decode_tokens is " : "mix.prefill_tokens is ";
      folio_prepare_options options = FOLIO_PREPARE_OPTIONS_INIT;
      options.mix = mix;
      folio_op* op = nullptr;
      expect_refusal(folio_prepare(d.context.get(), &d.config, &options, &op), FOLIO_INVALID_ARGUMENT, message);
      folio_kv_format format = -1;
      int32_t page_size = -1;
      expect_refusal(folio_recommended_kv_format_for_mix(&d.config, d.context.get(), &mix, &format, &page_size),
                     FOLIO_INVALID_ARGUMENT, message);
      EXPECT_EQ(format, -1);
      EXPECT_EQ(page_size, -1);
    }
  }
}

TEST(CRefusals, BadPageIdsAreFoundByValidate) {
  Decode d;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  d.pages[2] = Decode::kPages;
  EXPECT_EQ(folio_validate(&d.plan, &d.args), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(d.out[0], -7.0f);
}

}  // namespace
}  // namespace folio_c_test
