#include "folio/attention.hpp"

#include "capi/convert.hpp"

using folio::AttentionPlan;
using folio::Stream;
using folio::Workspace;
using folio::capi::ConvertedArray;
using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::read_struct;

namespace {

AttentionPlan to_plan(const folio_plan* plan) {
  deref(plan, "plan");
  folio::core::require(plan->buffer != nullptr, "plan holds no plan; folio_make_plan fills it");
  return {static_cast<const folio::detail::PlanBufferState*>(plan->buffer), plan->generation};
}

/// Calls body with a layer's arguments in C++; they live for the call.
template <typename Body>
void with_args(const folio_attention_args* args, const Body& body) {
  const folio_attention_args given = read_struct(args, "args");
  const ConvertedArray<folio::SegmentArgs> segments(given.segments, given.num_segments, "args.segments",
                                                    folio::capi::to_segment_args);
  body(folio::capi::to_args(given, segments.view()));
}

}  // namespace

folio_status folio_prepare(const folio_context* context, const folio_attention_config* config,
                           const folio_prepare_options* options, folio_op** op) noexcept {
  return guarded([&] {
    deref(op, "op") = nullptr;
    const folio::Context& device = deref(context, "context").context;
    folio::AttentionOp prepared =
        folio::prepare(device, folio::capi::to_config(config, "config"), folio::capi::to_options(options));
    std::string name = prepared.kernel_name();
    *op = new folio_op{std::move(prepared), std::move(name)};
  });
}

folio_status folio_kernel_name(const folio_op* op, const char** name) noexcept {
  return guarded([&] { deref(name, "name") = deref(op, "op").kernel_name.c_str(); });
}

folio_status folio_fp8_mma(const folio_op* op, int32_t* fp8_mma) noexcept {
  return guarded([&] { deref(fp8_mma, "fp8_mma") = deref(op, "op").op.fp8_mma() ? 1 : 0; });
}

folio_status folio_get_op_info(const folio_op* op, folio_op_info* info) noexcept {
  return guarded([&] {
    deref(op, "op");
    const folio::AttentionConfig& config = op->op.config();
    folio_op_info values = FOLIO_OP_INFO_INIT;
    values.fp8_mma = op->op.fp8_mma() ? 1 : 0;
    values.q = static_cast<folio_dtype>(config.q);
    values.kv = static_cast<folio_dtype>(config.kv);
    values.ragged_kv = static_cast<folio_dtype>(config.ragged_kv);
    values.out = static_cast<folio_dtype>(config.out);
    values.p_dtype = static_cast<folio_dtype>(op->op.p_dtype());
    values.kv_dtype = static_cast<folio_dtype>(op->op.kv_dtype());
    values.kernel_name = op->kernel_name.c_str();
    folio::capi::write_struct(info, values, "info");
  });
}

folio_status folio_explain(const folio_context* context, const folio_attention_config* config,
                           const folio_workload_mix* mix, folio_explanation** explanation) noexcept {
  return guarded([&] {
    deref(explanation, "explanation") = nullptr;
    const folio::Context& device = deref(context, "context").context;
    *explanation =
        new folio_explanation{folio::explain(device, folio::capi::to_config(config, "config"),
                                             mix == nullptr ? folio::WorkloadMix{} : folio::capi::to_mix(*mix))};
  });
}

folio_status folio_explanation_size(const folio_explanation* explanation, int32_t* kernels) noexcept {
  return guarded([&] {
    deref(explanation, "explanation");
    deref(kernels, "kernels") = static_cast<int32_t>(explanation->kernels.size());
  });
}

folio_status folio_explanation_at(const folio_explanation* explanation, int32_t index, const char** name,
                                  int32_t* available, const char** refusal) noexcept {
  return guarded([&] {
    const auto& kernels = deref(explanation, "explanation").kernels;
    folio::core::require(index >= 0 && static_cast<size_t>(index) < kernels.size(), "index is ", index, "; there are ",
                         kernels.size(), " kernels");
    const folio::KernelAnswer& answer = kernels[static_cast<size_t>(index)];
    deref(name, "name");
    deref(available, "available");
    deref(refusal, "refusal") = answer.refusal.c_str();
    *name = answer.name.c_str();
    *available = answer.available ? 1 : 0;
  });
}

void folio_free_explanation(folio_explanation* explanation) noexcept {
  delete explanation;
}

void folio_free_op(folio_op* op) noexcept {
  delete op;
}

folio_status folio_create_plan_buffer(const folio_op* op, folio_plan_buffer** buffer) noexcept {
  return guarded([&] {
    deref(buffer, "buffer") = nullptr;
    *buffer = new folio_plan_buffer{folio::make_plan_buffer(deref(op, "op").op)};
  });
}

void folio_free_plan_buffer(folio_plan_buffer* buffer) noexcept {
  delete buffer;
}

folio_status folio_make_plan(const folio_op* op, const folio_batch* batch, folio_plan_buffer* buffer, void* stream,
                             folio_plan* plan) noexcept {
  return guarded([&] {
    deref(plan, "plan") = folio_plan{nullptr, 0};
    deref(op, "op");
    deref(buffer, "buffer");
    const folio_batch given = read_struct(batch, "batch");
    const ConvertedArray<folio::KvSegment> segments(given.segments, given.num_segments, "batch.segments",
                                                    folio::capi::to_segment);
    const AttentionPlan made =
        folio::plan(op->op, folio::capi::to_batch(given, segments.view()), buffer->buffer, Stream{stream});
    *plan = {&made.buffer(), made.generation()};
  });
}

folio_status folio_check_plans(folio_plan_buffer* buffer) noexcept {
  return guarded([&] { folio::check_plans(deref(buffer, "buffer").buffer); });
}

folio_status folio_get_plan_summary(const folio_plan* plan, folio_plan_summary* summary) noexcept {
  return guarded([&] {
    deref(summary, "summary");
    const folio::PlanSummary made = folio::summary(to_plan(plan));
    const folio_plan_summary values = {
        0, made.num_workers,    made.num_work_tiles, made.num_partial_rows, made.num_combine_tiles,
        0, made.kv_tokens_read, made.qk_pairs};
    folio::capi::write_struct(summary, values, "summary");
  });
}

folio_status folio_workspace_size(const folio_op* op, size_t* bytes) noexcept {
  return guarded([&] {
    deref(bytes, "bytes");
    *bytes = folio::workspace_size(deref(op, "op").op);
  });
}

folio_status folio_plan_workspace_size(const folio_plan* plan, size_t* bytes) noexcept {
  return guarded([&] {
    deref(bytes, "bytes");
    *bytes = folio::workspace_size(to_plan(plan));
  });
}

folio_status folio_init_workspace(const folio_op* op, void* workspace, size_t workspace_bytes, void* stream) noexcept {
  return guarded([&] {
    folio::init_workspace(deref(op, "op").op, Workspace{workspace, workspace_bytes}, Stream{stream});
  });
}

folio_status folio_run(const folio_plan* plan, const folio_attention_args* args, void* workspace,
                       size_t workspace_bytes, void* stream) noexcept {
  return guarded([&] {
    const AttentionPlan planned = to_plan(plan);
    with_args(args, [&](const folio::AttentionArgs& given) {
      folio::run(planned, given, Workspace{workspace, workspace_bytes}, Stream{stream});
    });
  });
}

folio_status folio_validate(const folio_plan* plan, const folio_attention_args* args) noexcept {
  return guarded([&] {
    const AttentionPlan planned = to_plan(plan);
    with_args(args, [&](const folio::AttentionArgs& given) { folio::validate(planned, given); });
  });
}

folio_status folio_recommended_kv_format(const folio_attention_config* config, const folio_context* context,
                                         folio_kv_format* format, int32_t* page_size) noexcept {
  const folio_workload_mix unknown = {0, 0};
  return folio_recommended_kv_format_for_mix(config, context, &unknown, format, page_size);
}

folio_status folio_recommended_kv_format_for_mix(const folio_attention_config* config, const folio_context* context,
                                                 const folio_workload_mix* mix, folio_kv_format* format,
                                                 int32_t* page_size) noexcept {
  return guarded([&] {
    deref(format, "format");
    deref(page_size, "page_size");
    const folio::Context& device = deref(context, "context").context;
    const folio::KvFormatAdvice advice = folio::recommended_kv_format(folio::capi::to_config(config, "config"), device,
                                                                      folio::capi::to_mix(deref(mix, "mix")));
    *format = static_cast<folio_kv_format>(advice.format);
    *page_size = advice.page_size;
  });
}
