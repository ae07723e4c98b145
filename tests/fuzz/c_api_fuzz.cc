// The C API's argument checks. Every call must return a status, say why when it fails, and touch only the memory it was
// given.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "c_api_input.hpp"
#include "folio/c/folio.h"
#include "input.hpp"

namespace {

/// Writes a few tokens into a cache.
void write_cache(FuzzInput& input, const folio_context* context, const folio_attention_config& config) {
  Memory memory;
  Padded<folio_cache_write_args> args{};
  args.value = FOLIO_CACHE_WRITE_ARGS_INIT;
  const int32_t tokens = input.take_between(0, 12);
  args.value.cache = take_cache(input, memory, config);
  args.value.k_token_scales = take_token_scales(input, memory, args.value.cache);
  args.value.v_token_scales = take_token_scales(input, memory, args.value.cache);
  args.value.k = take_tensor<folio_const_tensor_view>(input, memory, take_dtype(input, FOLIO_DTYPE_FLOAT32), tokens,
                                                      config.num_kv_heads, config.head_dim_qk);
  args.value.v = take_tensor<folio_const_tensor_view>(input, memory, args.value.k.dtype, tokens, config.num_kv_heads,
                                                      config.head_dim_v);
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  for (int64_t& slot : slots) slot = input.take_length(64);
  args.value.slot_mapping = slots.data();
  args.value.num_slots = std::min<int64_t>(tokens, input.take_between(-1, 12));
  args.value.k_scale = take_scale(input, memory);
  args.value.v_scale = take_scale(input, memory);
  disturb_pointer(input, args.value.slot_mapping);
  disturb_size(input, args);
  if (!memory.exhausted()) ok(folio_write_kv_cache(context, &args.value, nullptr));
}

/// Validates and, where that succeeds, runs a plan: the ids of pages are only validated.
void run_plan(FuzzInput& input, const folio_op* op, const folio_plan& plan, const folio_attention_config& config,
              const Batch& batch) {
  const folio_batch& view = batch.view.value;
  if (view.num_tokens > kMaxTokens || config.num_q_heads > 64 || config.head_dim_qk > 512 || config.head_dim_v > 512)
    return;
  Memory memory;
  SegmentMemory arrays[kMaxSegments];
  std::vector<folio_segment_args> segments;
  for (size_t i = 0; i < batch.segments.size(); ++i) {
    segments.push_back(take_segment_args(input, memory, arrays[i], config, batch.segments[i], view.num_requests));
  }
  Padded<folio_attention_args> args{};
  args.value = FOLIO_ATTENTION_ARGS_INIT;
  folio_attention_args& value = args.value;
  value.num_segments = static_cast<int32_t>(segments.size());
  value.segments = segments.data();
  value.q = take_tensor<folio_const_tensor_view>(input, memory, config.q, view.num_tokens, config.num_q_heads,
                                                 config.head_dim_qk);
  const folio_dtype out = config.out != FOLIO_DTYPE_UNSET ? config.out : config.q;
  value.out =
      take_tensor<folio_tensor_view>(input, memory, out, view.num_tokens, config.num_q_heads, config.head_dim_v);
  if (input.take<uint8_t>() % 2 == 0) {
    value.lse = {static_cast<float*>(memory.get(int64_t{view.num_tokens} * config.num_q_heads, 4)), config.num_q_heads,
                 1, FOLIO_LSE_BASE_E};
    disturb(input, value.lse.base);
  }
  if (input.take<uint8_t>() % 4 == 0) value.sm_scale = input.take<float>();
  if ((config.features & FOLIO_FEATURE_SOFT_CAP) != 0) value.logits_soft_cap = 30.0f;
  if (input.take<uint8_t>() % 16 == 0) value.logits_soft_cap = input.take<float>();
  const auto* per_head = static_cast<const float*>(memory.get(config.num_q_heads, 4));
  if ((config.features & FOLIO_FEATURE_ALIBI) != 0 || input.take<uint8_t>() % 32 == 0) value.alibi_slopes = per_head;
  if ((config.features & FOLIO_FEATURE_SINKS) != 0 || input.take<uint8_t>() % 32 == 0) value.sinks = per_head;
  value.q_scale = take_scale(input, memory);
  value.out_scale = take_scale(input, memory);
  if (config.mask == FOLIO_MASK_CUSTOM || input.take<uint8_t>() % 32 == 0) {
    value.custom_mask_bytes = input.take<uint16_t>() % 2048;
    value.custom_mask = static_cast<const uint8_t*>(memory.get(value.custom_mask_bytes, 1));
  }
  if (input.take<uint8_t>() % 32 == 0) value.num_segments = std::min(value.num_segments, input.take_length(3));
  disturb_size(input, args);
  if (memory.exhausted()) return;

  size_t bytes = 0;
  if (!ok(folio_plan_workspace_size(&plan, &bytes)) || bytes > static_cast<size_t>(kMaxMemory)) return;
  if (input.take<uint8_t>() % 16 == 0) bytes = input.take<uint16_t>() % (bytes + 1);
  std::vector<unsigned char> workspace(bytes + 256, 0xff);
  unsigned char* aligned = workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256);
  if (input.take<uint8_t>() % 32 == 0) --aligned;
  ok(folio_init_workspace(op, aligned, bytes, nullptr));
  if (ok(folio_validate(&plan, &value))) ok(folio_run(&plan, &value, aligned, bytes, nullptr));
}

/// One thread, so that a target's inputs are replayed alike.
const folio_context* shared_context() {
  static folio_context* const context = [] {
    folio_context_options options = FOLIO_CONTEXT_OPTIONS_INIT;
    options.num_threads = 1;
    folio_context* created = nullptr;
    FUZZ_CHECK(folio_create_cpu_context(&options, &created) == FOLIO_OK);
    return created;
  }();
  return context;
}

void create_context(FuzzInput& input) {
  Padded<folio_context_options> options{};
  options.value = FOLIO_CONTEXT_OPTIONS_INIT;
  options.value.num_threads =
      input.take<uint8_t>() % 4 == 0 ? input.take_between(INT32_MIN, 0) : input.take_between(1, 2);
  options.value.executor.concurrency = input.take_between(-1, 2);
  options.value.pinning = input.take_between(-1, 3);
  disturb_size(input, options);
  folio_context* context = nullptr;
  if (options.value.num_threads != 0 && ok(folio_create_cpu_context(&options.value, &context)))
    folio_free_context(context);
  FUZZ_CHECK(folio_create_cuda_context(input.take<int32_t>(), &options.value, &context) != FOLIO_OK);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  if (input.take<uint8_t>() % 16 == 0) create_context(input);
  const folio_context* context = shared_context();

  Padded<folio_attention_config> config{};
  config.value = take_config(input);
  disturb_size(input, config);
  Padded<folio_prepare_options> options{};
  options.value = take_options(input);
  disturb_size(input, options);
  folio_op* op = nullptr;
  if (!ok(folio_prepare(context, &config.value, &options.value, &op))) {
    FUZZ_CHECK(op == nullptr);
    return 0;
  }
  const char* name = nullptr;
  FUZZ_CHECK(ok(folio_kernel_name(op, &name)) && std::strlen(name) > 0);
  size_t bytes = 0;
  ok(folio_workspace_size(op, &bytes));
  if (input.take<uint8_t>() % 4 == 0) write_cache(input, context, config.value);

  folio_plan_buffer* buffer = nullptr;
  if (ok(folio_create_plan_buffer(op, &buffer))) {
    Batch batch;
    take_batch(input, batch);
    folio_plan plan{};
    if (ok(folio_make_plan(op, &batch.view.value, buffer, nullptr, &plan))) {
      run_plan(input, op, plan, config.value, batch);
    }
  }
  folio_free_plan_buffer(buffer);
  folio_free_op(op);
  return 0;
}
