#include "folio/attention.hpp"

#include "capi/convert.hpp"
#include "capi/guard.hpp"

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
