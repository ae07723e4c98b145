// The main path of the C interface: one decode, its numbers, and what plans and workspaces promise.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "c_decode.hpp"
#include "core/snippet_test_util.hpp"
#include "folio/attention.hpp"
#include "folio/c/folio.h"
#include "folio/version.hpp"

namespace folio_c_test {
namespace {

TEST(CApi, VersionIsTheHeaders) {
  EXPECT_STREQ(folio_version(), FOLIO_VERSION_STRING);
}

TEST(CApi, TheDocumentShowsTheExampleThatRuns) {
  using folio::testing::lines_between;
  EXPECT_EQ(lines_between(FOLIO_SOURCE_DIR "/docs/c_api.md", "```c", "```", 0),
            lines_between(FOLIO_SOURCE_DIR "/examples/decode.c", "/* [snippet] */", "/* [/snippet] */", 2));
}

TEST(CApi, DecodesCorrectly) {
  Decode d;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(folio_validate(&d.plan, &d.args), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  d.expect_result();
}

TEST(CApi, TellsTheKernelAndTakesItByName) {
  Decode d;
  const char* name = nullptr;
  ASSERT_EQ(folio_kernel_name(d.op.get(), &name), FOLIO_OK);
  ASSERT_NE(name, nullptr);
  EXPECT_NE(std::string(name), "");
  folio_prepare_options options = FOLIO_PREPARE_OPTIONS_INIT;
  options.force_kernel = name;
  folio_op* forced = nullptr;
  ASSERT_EQ(folio_prepare(d.context.get(), &d.config, &options, &forced), FOLIO_OK) << folio_last_error();
  const char* forced_name = nullptr;
  EXPECT_EQ(folio_kernel_name(forced, &forced_name), FOLIO_OK);
  EXPECT_STREQ(forced_name, name);
  folio_free_op(forced);
  options.force_kernel = "no such kernel";
  expect_refusal(folio_prepare(d.context.get(), &d.config, &options, &forced), FOLIO_INVALID_ARGUMENT,
                 "no such kernel");
  EXPECT_EQ(forced, nullptr);
}

TEST(CApi, ProductsOfFp8ArePermittedAndToldOf) {
  Decode d;
  folio_prepare_options options = FOLIO_PREPARE_OPTIONS_INIT;
  options.allow_fp8_mma = 1;
  folio_op* op = nullptr;
  ASSERT_EQ(folio_prepare(d.context.get(), &d.config, &options, &op), FOLIO_OK) << folio_last_error();
  int32_t fp8_mma = -1;
  EXPECT_EQ(folio_fp8_mma(op, &fp8_mma), FOLIO_OK);
  EXPECT_EQ(fp8_mma, 0);  // no kernel of a CPU has them
  folio_free_op(op);
}

TEST(CApi, TellsAboutTheOpAndItsPlan) {
  Decode d;
  folio_op_info info = FOLIO_OP_INFO_INIT;
  ASSERT_EQ(folio_get_op_info(d.op.get(), &info), FOLIO_OK) << folio_last_error();
  const char* name = nullptr;
  ASSERT_EQ(folio_kernel_name(d.op.get(), &name), FOLIO_OK);
  EXPECT_STREQ(info.kernel_name, name);
  EXPECT_EQ(info.struct_size, sizeof(info));
  EXPECT_EQ(info.out, FOLIO_DTYPE_FLOAT32);  // resolved
  EXPECT_EQ(info.p_dtype, FOLIO_DTYPE_FLOAT32);
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  folio_plan_summary summary = FOLIO_PLAN_SUMMARY_INIT;
  ASSERT_EQ(folio_get_plan_summary(&d.plan, &summary), FOLIO_OK) << folio_last_error();
  EXPECT_GT(summary.num_work_tiles, 0);
  EXPECT_EQ(summary.kv_tokens_read % 25, 0);
  const folio_plan old = d.plan;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  EXPECT_EQ(folio_get_plan_summary(&old, &summary), FOLIO_STALE_PLAN);
  info.struct_size = 4;
  expect_refusal(folio_get_op_info(d.op.get(), &info), FOLIO_INVALID_ARGUMENT, "folio_op_info_init");
  expect_refusal(folio_get_op_info(d.op.get(), nullptr), FOLIO_INVALID_ARGUMENT, "info is null");
  expect_refusal(folio_get_plan_summary(&d.plan, nullptr), FOLIO_INVALID_ARGUMENT, "summary is null");
}

TEST(CApi, ExplainsWhatKernelsSay) {
  Decode d;
  d.config.features = FOLIO_FEATURE_ROPE_LLAMA;  // the generic kernels alone
  const auto explanation = make<folio_explanation>(
      [&](folio_explanation** made) { return folio_explain(d.context.get(), &d.config, nullptr, made); });
  const std::vector<folio::KernelAnswer> expected = [&] {
    folio::AttentionConfig config;
    config.num_q_heads = Decode::kHeads;
    config.num_kv_heads = Decode::kKvHeads;
    config.head_dim_qk = config.head_dim_v = Decode::kDim;
    config.q = config.kv = folio::DType::kFloat32;
    config.page_size = Decode::kPageSize;
    config.features = folio::Feature::kRopeLlama;
    return folio::explain(folio::Context::cpu(), config);
  }();
  int32_t size = 0;
  ASSERT_EQ(folio_explanation_size(explanation.get(), &size), FOLIO_OK);
  ASSERT_EQ(static_cast<size_t>(size), expected.size());
  [[maybe_unused]] int32_t refusals = 0;
  for (int32_t i = 0; i < size; ++i) {
    const char *name = nullptr, *refusal = nullptr;
    int32_t available = -1;
    ASSERT_EQ(folio_explanation_at(explanation.get(), i, &name, &available, &refusal), FOLIO_OK);
    EXPECT_EQ(name, expected[static_cast<size_t>(i)].name);
    EXPECT_EQ(refusal, expected[static_cast<size_t>(i)].refusal);
    EXPECT_EQ(available != 0, expected[static_cast<size_t>(i)].available);
    refusals += refusal[0] != 0;
  }
#if defined(__x86_64__)  // Arm has the generic kernels alone
  EXPECT_GT(refusals, 0);
#endif
  const char* text = nullptr;
  int32_t available = 0;
  expect_refusal(folio_explanation_at(explanation.get(), size, &text, &available, &text), FOLIO_INVALID_ARGUMENT,
                 "index is");
  expect_refusal(folio_explanation_at(explanation.get(), -1, &text, &available, &text), FOLIO_INVALID_ARGUMENT,
                 "index is -1");
  folio_explanation* none = nullptr;
  d.config.page_size = -1;
  EXPECT_EQ(folio_explain(d.context.get(), &d.config, nullptr, &none), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
}

TEST(CApi, MostSplitsOfAQuery) {
  Decode d;
  folio_prepare_options options = FOLIO_PREPARE_OPTIONS_INIT;
  options.max_kv_splits = -1;
  folio_op* op = nullptr;
  expect_refusal(folio_prepare(d.context.get(), &d.config, &options, &op), FOLIO_INVALID_ARGUMENT, "max_kv_splits");
  options.max_kv_splits = 0;
  options.reserved = 1;
  expect_refusal(folio_prepare(d.context.get(), &d.config, &options, &op), FOLIO_INVALID_ARGUMENT,
                 "options.reserved is 1");
}

TEST(CApi, Nvfp4OutputsHaveTheirFactors) {
  Decode d;
  d.config.out = FOLIO_DTYPE_FLOAT4_E2M1X2;
  folio_op* raw = nullptr;
  ASSERT_EQ(folio_prepare(d.context.get(), &d.config, nullptr, &raw), FOLIO_OK) << folio_last_error();
  d.buffer.reset();
  d.op.reset(raw);
  d.buffer = make<folio_plan_buffer>([&](folio_plan_buffer** buffer) { return folio_create_plan_buffer(raw, buffer); });
  ASSERT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
  std::vector<uint8_t> out(2 * Decode::kHeads * Decode::kDim / 2), factors(512);
  d.args.out = packed(out.data(), FOLIO_DTYPE_FLOAT4_E2M1X2, {2, Decode::kHeads, Decode::kDim / 2});
  EXPECT_EQ(d.run(), FOLIO_INVALID_ARGUMENT) << "without factors";
  d.args.out_block_scale = factors.data();
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  // Values alike are 6 times their factor: 0b0111 in both halves of a byte.
  EXPECT_EQ(out[0], 0x77);
  EXPECT_NE(factors[0], 0);
}

TEST(CApi, ValidateTables_PageBeyondTheCache_IsRefused) {
  Decode d(1);
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  d.expect_result();
  d.pages[2] = 1000000000;
  expect_refusal(d.run(), FOLIO_INVALID_ARGUMENT, "column 1 of row 1 of the table is page 1000000000");
}

TEST(CApi, WorkspaceSizesSuffice) {
  Decode d;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  size_t of_op = 0;
  size_t of_plan = 0;
  ASSERT_EQ(folio_workspace_size(d.op.get(), &of_op), FOLIO_OK);
  ASSERT_EQ(folio_plan_workspace_size(&d.plan, &of_plan), FOLIO_OK);
  EXPECT_LE(of_plan, of_op);
  EXPECT_EQ(of_op % 256, 0u);
  EXPECT_EQ(of_plan % 256, 0u);
  ASSERT_EQ(folio_init_workspace(d.op.get(), d.allocate(of_op), of_op, nullptr), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(folio_run(&d.plan, &d.args, d.allocate(of_plan), of_plan, nullptr), FOLIO_OK) << folio_last_error();
  d.expect_result();
  if (of_plan > 0) {
    expect_refusal(folio_run(&d.plan, &d.args, d.workspace.get(), of_plan - 1, nullptr), FOLIO_WORKSPACE_TOO_SMALL,
                   std::to_string(of_plan));
  }
}

TEST(CApi, ReplannedPlansAreStale) {
  Decode d;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  const folio_plan first = d.plan;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  size_t bytes = 0;
  EXPECT_EQ(folio_run(&first, &d.args, d.workspace.get(), d.workspace_bytes, nullptr), FOLIO_STALE_PLAN);
  EXPECT_EQ(folio_plan_workspace_size(&first, &bytes), FOLIO_STALE_PLAN);
}

TEST(CApi, BoundsAreKept) {
  Decode d;
  folio_prepare_options options = FOLIO_PREPARE_OPTIONS_INIT;
  options.has_bounds = 1;
  options.max_requests = 1;
  options.max_tokens = 8;
  options.max_q_len = 1;
  options.max_kv_len = 64;
  folio_op* op = nullptr;
  ASSERT_EQ(folio_prepare(d.context.get(), &d.config, &options, &op), FOLIO_OK) << folio_last_error();
  d.op.reset(op);
  folio_plan_buffer* buffer = nullptr;
  ASSERT_EQ(folio_create_plan_buffer(op, &buffer), FOLIO_OK);
  d.buffer.reset(buffer);
  EXPECT_EQ(d.plan_batch(), FOLIO_INVALID_ARGUMENT) << "two requests";
  EXPECT_EQ(d.plan.buffer, nullptr);
  d.batch.num_requests = 1;
  EXPECT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
}

TEST(CApi, ManySegmentsAndTheirStride) {
  // Nine segments (more than are converted on the stack) over the same pages, in a structure larger than this
  // version's.
  struct LargerSegment {
    folio_kv_segment segment;
    uint64_t later_field;
  };
  struct LargerArgs {
    folio_segment_args args;
    uint64_t later_field;
  };
  Decode d;
  std::vector<LargerSegment> segments(9, LargerSegment{d.segment, 0});
  std::vector<LargerArgs> segment_args(9, LargerArgs{d.segment_args, 0});
  for (auto& s : segments) {
    s.segment.struct_size = sizeof(LargerSegment);
    s.segment.mask = FOLIO_SEGMENT_ALL_VISIBLE;
  }
  for (auto& a : segment_args) a.args.struct_size = sizeof(LargerArgs);
  d.batch.segments = &segments[0].segment;
  d.batch.num_segments = 9;
  d.args.segments = &segment_args[0].args;
  d.args.num_segments = 9;
  ASSERT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
  size_t bytes = 0;
  ASSERT_EQ(folio_plan_workspace_size(&d.plan, &bytes), FOLIO_OK);
  ASSERT_EQ(folio_run(&d.plan, &d.args, d.allocate(bytes), bytes, nullptr), FOLIO_OK) << folio_last_error();
  d.expect_result();
  segments[4].later_field = 1;
  expect_refusal(d.plan_batch(), FOLIO_UNSUPPORTED, "batch.segments has fields beyond byte");
  segments[4].later_field = 0;
  segments[4].segment.struct_size = sizeof(folio_kv_segment);
  expect_refusal(d.plan_batch(), FOLIO_INVALID_ARGUMENT, "batch.segments[4].struct_size is");
}

TEST(CApi, WritesTheCache) {
  Decode d;
  std::array<float, Decode::kKvHeads * Decode::kDim * 2> k_new{}, v_new{};
  k_new.fill(2.0f);
  v_new.fill(100.0f);
  const std::array<int64_t, 2> slots = {9, -1};
  folio_cache_write_args write = FOLIO_CACHE_WRITE_ARGS_INIT;
  write.k = rows(k_new.data(), 2, Decode::kKvHeads, Decode::kDim);
  write.v = rows(v_new.data(), 2, Decode::kKvHeads, Decode::kDim);
  write.slot_mapping = slots.data();
  write.num_slots = 2;
  write.cache = d.segment_args.cache;
  ASSERT_EQ(folio_write_kv_cache(d.context.get(), &write, nullptr), FOLIO_OK) << folio_last_error();
  constexpr size_t kToken = static_cast<size_t>(Decode::kKvHeads) * Decode::kDim;
  for (size_t i = 0; i < d.v.size(); ++i) {
    const size_t slot = i / kToken;
    EXPECT_EQ(d.v[i], slot == 9 ? 100.0f : static_cast<float>(slot));
    EXPECT_EQ(d.k[i], slot == 9 ? 2.0f : 0.0f);
  }
  const int64_t beyond = Decode::kPages * Decode::kPageSize;
  write.slot_mapping = &beyond;
  write.num_slots = 1;
  EXPECT_EQ(folio_write_kv_cache(d.context.get(), &write, nullptr), FOLIO_INVALID_ARGUMENT);
  write.slot_mapping = nullptr;
  write.num_slots = 0;
  EXPECT_EQ(folio_write_kv_cache(d.context.get(), &write, nullptr), FOLIO_OK) << folio_last_error();
}

/// Written and read with scales a token and head, which stand beside the view.
TEST(CApi, Int8Caches) {
  Decode d;
  d.config.kv = d.shape.dtype = FOLIO_DTYPE_INT8;
  folio_op* raw_op = nullptr;
  ASSERT_EQ(folio_prepare(d.context.get(), &d.config, nullptr, &raw_op), FOLIO_OK) << folio_last_error();
  d.op.reset(raw_op);
  folio_plan_buffer* raw_buffer = nullptr;
  ASSERT_EQ(folio_create_plan_buffer(d.op.get(), &raw_buffer), FOLIO_OK) << folio_last_error();
  d.buffer.reset(raw_buffer);
  ASSERT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
  constexpr size_t kSlots = static_cast<size_t>(Decode::kPages) * Decode::kPageSize;
  std::vector<int8_t> k(d.k.size()), v(d.v.size());
  std::vector<float> k_scales(kSlots * Decode::kKvHeads), v_scales(k_scales.size());
  folio_cache_write_args write = FOLIO_CACHE_WRITE_ARGS_INIT;
  ASSERT_EQ(folio_make_nhd_view(&d.shape, k.data(), v.data(), &write.cache), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(write.cache.dtype, FOLIO_DTYPE_INT8);
  EXPECT_EQ(write.cache.k_strides.token, Decode::kKvHeads * Decode::kDim);
  std::vector<int64_t> slots(kSlots);
  std::iota(slots.begin(), slots.end(), int64_t{0});
  write.k = rows(d.k.data(), kSlots, Decode::kKvHeads, Decode::kDim);
  write.v = rows(d.v.data(), kSlots, Decode::kKvHeads, Decode::kDim);
  write.slot_mapping = slots.data();
  write.num_slots = kSlots;
  expect_refusal(folio_write_kv_cache(d.context.get(), &write, nullptr), FOLIO_INVALID_ARGUMENT,
                 "k_token_scales.data is null");
  const folio_kv_strides strides = {Decode::kPageSize * Decode::kKvHeads, Decode::kKvHeads, 1};
  write.k_token_scales = {k_scales.data(), strides};
  write.v_token_scales = {v_scales.data(), strides};
  ASSERT_EQ(folio_write_kv_cache(d.context.get(), &write, nullptr), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(v[0], 0);
  EXPECT_EQ(v.back(), 127);
  EXPECT_EQ(v_scales[0], 0.0f);
  EXPECT_EQ(v_scales.back(), static_cast<float>(kSlots - 1) / 127.0f);
  d.segment_args.cache = write.cache;
  expect_refusal(d.run(), FOLIO_INVALID_ARGUMENT, "k_token_scales.data is null");
  d.segment_args.k_token_scales = write.k_token_scales;
  d.segment_args.v_token_scales = write.v_token_scales;
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  d.expect_result();  // 127 times a scale is the value but for a float32 rounding
}

TEST(CApi, RecommendsAFormatThatItsMakersMake) {
  Decode d;
  folio_kv_format format = -1;
  int32_t page_size = 0;
  ASSERT_EQ(folio_recommended_kv_format(&d.config, d.context.get(), &format, &page_size), FOLIO_OK);
  EXPECT_TRUE(format == FOLIO_KV_STRIDED || format == FOLIO_KV_CPU_PACKED);
  EXPECT_GE(page_size, 1);
  const folio_workload_mix unknown = {0, 0};
  folio_kv_format of_zeros = -1;
  int32_t page_size_of_zeros = 0;
  ASSERT_EQ(folio_recommended_kv_format_for_mix(&d.config, d.context.get(), &unknown, &of_zeros, &page_size_of_zeros),
            FOLIO_OK);
  EXPECT_EQ(of_zeros, format);
  EXPECT_EQ(page_size_of_zeros, page_size);
  folio_kv_cache_shape shape = {3, 32, 2, 64, 128, FOLIO_DTYPE_BFLOAT16};
  int64_t k_elements = 0;
  int64_t v_elements = 0;
  ASSERT_EQ(folio_kv_cache_elements(&shape, &k_elements, &v_elements), FOLIO_OK);
  EXPECT_EQ(k_elements, 3 * 32 * 2 * 64);
  EXPECT_EQ(v_elements, 3 * 32 * 2 * 128);
  std::vector<uint16_t> k(static_cast<size_t>(k_elements)), v(static_cast<size_t>(v_elements));
  folio_kv_cache_view view;
  ASSERT_EQ(folio_make_hnd_view(&shape, k.data(), v.data(), &view), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(view.format, FOLIO_KV_STRIDED);
  EXPECT_EQ(view.k_strides.head, 32 * 64);
  EXPECT_EQ(view.v_strides.token, 128);
  ASSERT_EQ(folio_make_cpu_packed_view(&shape, k.data(), v.data(), &view), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(view.format, FOLIO_KV_CPU_PACKED);
  EXPECT_EQ(view.v_strides.token, 2 * 128);
  alignas(16) static unsigned char rows[2 * 3 * 656];
  ASSERT_EQ(folio_make_fp8_ds_mla_view(2, 3, rows, &view), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(view.format, FOLIO_KV_FP8_DS_MLA);
  EXPECT_EQ(view.k_strides.token, 656);
  EXPECT_EQ(view.v, view.k);
  EXPECT_EQ(folio_make_fp8_ds_mla_view(2, 3, rows + 1, &view), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(folio_make_fp8_ds_mla_view(2, 3, rows, nullptr), FOLIO_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace folio_c_test
