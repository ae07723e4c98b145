#include "folio/merge.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>

#include "attention/merge_output.hpp"
#include "attention/op_state.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "kernels/cpu/generic/combine/combine.hpp"

namespace folio::inline v0 {

namespace {

using core::fail;
using core::message;
using core::require;
using kernels::generic::combine_rows;
using kernels::generic::CombineParams;
using kernels::generic::CombineSource;

/// A name for messages, e.g. {"merge_state", "b.out"}.
struct Argument {
  const char* function;
  const char* name;
};

void append(std::string& text, const Argument& argument) {
  text += argument.function;
  text += ": ";
  text += argument.name;
}

template <typename... Parts>
void check(bool condition, const Argument& argument, const Parts&... parts) {
  if (condition) return;
  std::string text;
  append(text, argument);
  fail(ErrorCode::kInvalidArgument, text, parts...);
}

std::string shape_text(const ConstTensorView& tensor) {
  std::string text = "[";
  for (int32_t i = 0; i < std::min(tensor.rank, kMaxRank); ++i) {
    text += message(i == 0 ? "" : ", ", tensor.shape[static_cast<size_t>(i)]);
  }
  return text + "]";
}

/// Sizes of a merge. `states` counts those of merge_states, and is 1 elsewhere.
struct Sizes {
  int64_t tokens = 0;
  int64_t states = 1;
  int32_t heads = 0;
  int32_t head_dim = 0;
  bool nothing() const { return tokens == 0; }
};

bool is_input_type(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

void check_context(const char* function, const Context& context, Stream stream) {
  require(context.device().type != DeviceType::kCpu || stream.handle == nullptr, function,
          ": a CPU context takes the default stream only");
}

/// Rank, sizes, innermost stride, memory. Strides of inputs may be anything not negative.
void check_tensor(const Argument& argument, const ConstTensorView& tensor, int32_t rank) {
  check(tensor.rank == rank, argument, " has ", tensor.rank, " dimensions; ", rank, " are needed");
  bool empty = false;
  for (int32_t i = 0; i < rank; ++i) {
    const auto k = static_cast<size_t>(i);
    check(tensor.shape[k] >= 0, argument, " has a negative size: ", shape_text(tensor));
    check(tensor.strides[k] >= 0, argument, " has a negative stride in dimension ", i);
    empty = empty || tensor.shape[k] == 0;
  }
  const auto inner = static_cast<size_t>(rank - 1);
  check(tensor.shape[inner] <= 1 || tensor.strides[inner] == 1, argument, " has stride ", tensor.strides[inner],
        " in its last dimension; it must be contiguous");
  const auto bytes = static_cast<uintptr_t>(std::max(size_of(tensor.dtype), 1));
  check(empty || tensor.data != nullptr, argument, " has no memory");
  check(reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0, argument, " is not aligned to its elements of ", bytes,
        " bytes");
}

void check_input(const Argument& argument, const ConstTensorView& tensor, int32_t rank) {
  check(is_input_type(tensor.dtype), argument, " is ", tensor.dtype, "; float32, float16 and bfloat16 are merged");
  check_tensor(argument, tensor, rank);
}

/// Whether rows of `inner` elements at outer * outer_stride + head * head_stride are apart from each other.
bool rows_apart(int64_t outer, int64_t outer_stride, int64_t heads, int64_t head_stride, int64_t inner) {
  struct Dimension {
    int64_t size, stride;
  };
  std::array<Dimension, 2> dims = {{{outer, outer_stride}, {heads, head_stride}}};
  if (dims[0].stride > dims[1].stride) std::swap(dims[0], dims[1]);
  int64_t extent = inner;  // elements that the smaller dimensions span
  for (const Dimension& dim : dims) {
    if (dim.size <= 1) continue;
    if (dim.stride < extent) return false;
    extent = core::checked_add(core::checked_mul(dim.size - 1, dim.stride), extent);
  }
  return true;
}

Sizes sizes_of(const Argument& argument, const ConstTensorView& out) {
  const auto heads = static_cast<size_t>(out.rank - 2);
  Sizes sizes;
  sizes.tokens = out.shape[0];
  check(out.shape[heads] >= 1 && out.shape[heads + 1] >= 1, argument, " has shape ", shape_text(out),
        "; at least one head and one component are needed");
  sizes.heads = core::checked_cast<int32_t>(out.shape[heads]);
  sizes.head_dim = core::checked_cast<int32_t>(out.shape[heads + 1]);
  core::checked_mul(sizes.tokens, out.shape[heads]);  // rows are counted in 64 bits
  return sizes;
}

void check_base(const Argument& argument, LseBase base) {
  check(base == LseBase::kE || base == LseBase::k2, argument, " has base ", static_cast<int32_t>(base),
        "; e (0) and 2 (1) are known");
}

void check_lse_input(const Argument& argument, const float* lse, bool needed, std::initializer_list<int64_t> strides,
                     LseBase base) {
  check(lse != nullptr || !needed, argument, " is null");
  check(reinterpret_cast<uintptr_t>(lse) % alignof(float) == 0, argument, " is not aligned to a float");
  for (const int64_t stride : strides) check(stride >= 0, argument, " has the negative stride ", stride);
  check_base(argument, base);
}

void check_lse_output(const Argument& argument, const LseView& lse, const Sizes& sizes) {
  if (lse.data == nullptr) return;
  check_lse_input(argument, lse.data, false, {lse.token_stride, lse.head_stride}, lse.base);
  check(rows_apart(sizes.tokens, lse.token_stride, sizes.heads, lse.head_stride, 1), argument, " has strides (",
        lse.token_stride, ", ", lse.head_stride, ") with which several rows share an element");
}

void check_output(const Argument& argument, const TensorView& out, const Sizes& sizes) {
  check(is_input_type(out.dtype) || is_fp8(out.dtype), argument, " is ", out.dtype,
        "; float32, float16, bfloat16, fp8_e4m3 and fp8_e5m2 are written");
  check_tensor(argument, out, 3);
  check(out.shape[0] == sizes.tokens && out.shape[1] == sizes.heads && out.shape[2] == sizes.head_dim, argument,
        " has shape ", shape_text(out), "; the states have [", sizes.tokens, ", ", sizes.heads, ", ", sizes.head_dim,
        "]");
  check(rows_apart(sizes.tokens, out.strides[0], sizes.heads, out.strides[1], sizes.head_dim), argument,
        " has strides (", out.strides[0], ", ", out.strides[1], ") with which several rows share an element");
}

/// An output may be an input's memory element for element; over the same memory in another layout it would overwrite
/// what is still to be read.
void check_in_place(const Argument& argument, const TensorView& out, const ConstTensorView& in, size_t token,
                    size_t head) {
  check(out.data != in.data || out.data == nullptr ||
            (out.dtype == in.dtype && out.strides[0] == in.strides[token] && out.strides[1] == in.strides[head]),
        argument, " starts where an input does, but with another dtype or other strides");
}

/// The factor that an fp8 output is divided by; 1 where it lies in a GPU's memory, which reads it itself.
float output_scale(const Context& context, const Argument& argument, const Scale& scale, DType out) {
  check(scale.granularity == ScaleGranularity::kPerTensor && scale.request_stride == 0, argument,
        " is not per tensor; one scale for all is taken");
  check(scale.data == nullptr || scale.value == 1.0f, argument, " has data and the value ", scale.value,
        "; give one of them");
  if (!is_fp8(out)) {
    check(scale.data == nullptr && scale.value == 1.0f, argument, " is given, but only fp8 outputs are scaled; out is ",
          out);
    return 1.0f;
  }
  check(reinterpret_cast<uintptr_t>(scale.data) % alignof(float) == 0, argument, " is not aligned to a float");
  if (scale.data != nullptr && context.state().gpu != nullptr) return 1.0f;
  const float value = scale.data != nullptr ? scale.data[0] : scale.value;
  check(std::isfinite(value) && value > 0.0f, argument, " is ", value, "; positive finite scales are taken");
  return value;
}

CombineSource state_source(const ConstTensorView& out, const float* lse, int64_t token_stride, int64_t head_stride,
                           LseBase base) {
  CombineSource source;
  source.out = out.data;
  source.dtype = out.dtype;
  source.token_stride = out.strides[0];
  source.head_stride = out.strides[1];
  source.lse = lse;
  source.lse_token_stride = token_stride;
  source.lse_head_stride = head_stride;
  source.base = base;
  return source;
}

/// One state of a two-state merge, checked; its shape must be `sizes`.
CombineSource checked_state(const Argument& out_name, const Argument& lse_name, const AttentionStateView& state,
                            const Sizes& sizes) {
  check_input(out_name, state.out, 3);
  check(state.out.shape[0] == sizes.tokens && state.out.shape[1] == sizes.heads && state.out.shape[2] == sizes.head_dim,
        out_name, " has shape ", shape_text(state.out), "; the other state has [", sizes.tokens, ", ", sizes.heads,
        ", ", sizes.head_dim, "]");
  check_lse_input(lse_name, state.lse, !sizes.nothing(), {state.lse_token_stride, state.lse_head_stride}, state.base);
  return state_source(state.out, state.lse, state.lse_token_stride, state.lse_head_stride, state.base);
}

CombineParams make_params(std::span<const CombineSource> sources, const Sizes& sizes, const TensorView& out,
                          float out_scale, const LseView& lse) {
  CombineParams params;
  params.sources = sources;
  params.num_heads = sizes.heads;
  params.head_dim = sizes.head_dim;
  params.out = out.data;
  params.out_dtype = out.dtype;
  params.out_scale = out_scale;
  params.out_token_stride = out.strides[0];
  params.out_head_stride = out.strides[1];
  params.lse = lse;
  return params;
}

kernels::cuda::CombineSource device_source(const CombineSource& source) {
  kernels::cuda::CombineSource device;
  device.out = source.out;
  device.dtype = source.dtype;
  device.num_states = source.num_states;
  device.state_stride = source.state_stride;
  device.token_stride = source.token_stride;
  device.head_stride = source.head_stride;
  device.lse = source.lse;
  device.lse_state_stride = source.lse_state_stride;
  device.lse_token_stride = source.lse_token_stride;
  device.lse_head_stride = source.lse_head_stride;
  device.base = source.base;
  return device;
}

/// Arguments are checked before. `out_scale` stands for the params' own, and is read on the device where it is an
/// array.
void gpu_combine(const attention::GpuBackend& gpu, const CombineParams& params, int64_t num_tokens,
                 const Scale& out_scale, Stream stream) {
  kernels::cuda::CombineParams device;
  for (size_t i = 0; i < params.sources.size(); ++i) device.sources[i] = device_source(params.sources[i]);
  device.num_tokens = num_tokens;
  device.num_heads = params.num_heads;
  device.head_dim = params.head_dim;
  device.out = params.out;
  device.out_dtype = params.out_dtype;
  device.out_scale = out_scale;
  device.out_token_stride = params.out_token_stride;
  device.out_head_stride = params.out_head_stride;
  device.lse = params.lse;
  device.mask = params.mask;
  gpu.enqueue(device, stream);
}

/// Elements below which a region costs more than it saves.
constexpr int64_t kMinElementsPerTask = 16384;

void execute(const Context& context, const CombineParams& params, const Sizes& sizes, const Scale& out_scale,
             Stream stream) {
  if (context.state().gpu != nullptr) {
    gpu_combine(*context.state().gpu, params, sizes.tokens, out_scale, stream);
    return;
  }
  struct Work {
    const CombineParams* params;
    int64_t rows;
    int64_t rows_per_task;
  };
  Work work{&params, sizes.tokens * sizes.heads, 0};
  const int64_t row_elements = core::checked_mul(std::max<int64_t>(1, sizes.states), int64_t{sizes.head_dim});
  // Rows are alike, so a few tasks per thread even out what the machine does besides.
  const int64_t most_tasks = int64_t{4} * context.concurrency();
  work.rows_per_task =
      std::max({int64_t{1}, core::ceil_div(kMinElementsPerTask, row_elements), core::ceil_div(work.rows, most_tasks)});
  context.parallel_for(
      core::ceil_div(work.rows, work.rows_per_task),
      [](void* self, int64_t task) noexcept {
        const Work& w = *static_cast<const Work*>(self);
        const int64_t begin = task * w.rows_per_task;
        combine_rows(*w.params, begin, std::min(w.rows, begin + w.rows_per_task));
      },
      &work);
}

}  // namespace

void attention::check_merge_output(const char* function, const Context& context, const TensorView& out,
                                   const LseView& lse, const Scale& out_scale) {
  const Sizes sizes = sizes_of({function, "out"}, out);
  check_output({function, "out"}, out, sizes);
  check_lse_output({function, "lse"}, lse, sizes);
  output_scale(context, {function, "out_scale"}, out_scale, out.dtype);
}

void merge_state(const Context& context, const AttentionStateView& a, const AttentionStateView& b, TensorView out,
                 LseView lse, const Scale& out_scale, Stream stream) {
  constexpr const char* kName = "merge_state";
  check_context(kName, context, stream);
  check_input({kName, "a.out"}, a.out, 3);
  const Sizes sizes = sizes_of({kName, "a.out"}, a.out);
  const std::array<CombineSource, 2> sources = {checked_state({kName, "a.out"}, {kName, "a.lse"}, a, sizes),
                                                checked_state({kName, "b.out"}, {kName, "b.lse"}, b, sizes)};
  check_output({kName, "out"}, out, sizes);
  check_in_place({kName, "out"}, out, a.out, 0, 1);
  check_in_place({kName, "out"}, out, b.out, 0, 1);
  check_lse_output({kName, "lse"}, lse, sizes);
  const float scale = output_scale(context, {kName, "out_scale"}, out_scale, out.dtype);
  execute(context, make_params(sources, sizes, out, scale, lse), sizes, out_scale, stream);
}

void merge_state_in_place(const Context& context, TensorView a_out, LseView a_lse, const AttentionStateView& b,
                          const uint8_t* mask, Stream stream) {
  constexpr const char* kName = "merge_state_in_place";
  check_context(kName, context, stream);
  check_input({kName, "a_out"}, a_out, 3);
  const Sizes sizes = sizes_of({kName, "a_out"}, a_out);
  const AttentionStateView a{a_out, a_lse.data, a_lse.token_stride, a_lse.head_stride, a_lse.base};
  const std::array<CombineSource, 2> sources = {checked_state({kName, "a_out"}, {kName, "a_lse"}, a, sizes),
                                                checked_state({kName, "b.out"}, {kName, "b.lse"}, b, sizes)};
  check_output({kName, "a_out"}, a_out, sizes);
  check_lse_output({kName, "a_lse"}, a_lse, sizes);
  CombineParams params = make_params(sources, sizes, a_out, 1.0f, a_lse);
  params.mask = mask;
  execute(context, params, sizes, {}, stream);
}

void merge_states(const Context& context, const AttentionStatesView& states, TensorView out, LseView lse,
                  const Scale& out_scale, Stream stream) {
  constexpr const char* kName = "merge_states";
  check_context(kName, context, stream);
  const ConstTensorView& values = states.out;
  check_input({kName, "states.out"}, values, 4);
  Sizes sizes = sizes_of({kName, "states.out"}, values);
  sizes.states = values.shape[1];
  check_lse_input({kName, "states.lse"}, states.lse, sizes.tokens * sizes.states != 0,
                  {states.lse_token_stride, states.lse_state_stride, states.lse_head_stride}, states.base);
  check_output({kName, "out"}, out, sizes);
  check_in_place({kName, "out"}, out, values, 0, 2);
  check_lse_output({kName, "lse"}, lse, sizes);
  const float scale = output_scale(context, {kName, "out_scale"}, out_scale, out.dtype);
  CombineSource source = state_source(values, states.lse, states.lse_token_stride, states.lse_head_stride, states.base);
  source.head_stride = values.strides[2];
  source.num_states = sizes.states;
  source.state_stride = values.strides[1];
  source.lse_state_stride = states.lse_state_stride;
  execute(context, make_params(std::span(&source, 1), sizes, out, scale, lse), sizes, out_scale, stream);
}

void shift_alibi_lse(const Context& context, float* lse, std::span<const int32_t> cu_q,
                     std::span<const int32_t> first_pos, std::span<const float> slopes, Stream stream) {
  require(cu_q.size() == first_pos.size() + 1, "shift_alibi_lse: cu_q has ", cu_q.size(), " entries, first_pos ",
          first_pos.size(), "; the first needs one more than the second");
  if (const attention::GpuBackend* gpu = context.state().gpu.get()) {
    kernels::cuda::ShiftLseParams params;
    params.lse = lse;
    params.cu_q = cu_q.data();
    params.first_pos = first_pos.data();
    params.slopes = slopes.data();
    params.num_requests = core::checked_cast<int32_t>(first_pos.size());
    params.num_heads = core::checked_cast<int32_t>(slopes.size());
    gpu->enqueue(params, stream);
    return;
  }
  const auto num_heads = static_cast<int64_t>(slopes.size());
  for (size_t r = 0; r < first_pos.size(); ++r) {
    const double before = first_pos[r];
    for (int64_t token = cu_q[r]; token < cu_q[r + 1]; ++token) {
      for (size_t head = 0; head < slopes.size(); ++head) {
        float& value = lse[token * num_heads + static_cast<int64_t>(head)];
        value = static_cast<float>(value + static_cast<double>(slopes[head]) * before * std::numbers::log2e);
      }
    }
  }
}

}  // namespace folio::inline v0
