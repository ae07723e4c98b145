#include <string>
#include <utility>

#include "backends.hpp"
#include "folio/backends/merge_attn_states.hpp"
#include "gil.hpp"

namespace folio::python {
namespace {

/// LSEs as FlashAttention returns them: packed float32 [heads, tokens].
float* head_major_lse(nb::handle source, const std::string& name, const TensorView& suffix, Access access,
                      std::vector<Array>& arrays) {
  Array lse = borrow(source, name, access);
  const int64_t tokens = suffix.shape[0];
  const int64_t heads = suffix.shape[1];
  const bool packed = lse.rank() == 2 && lse.size(0) == heads && lse.size(1) == tokens &&
                      (tokens <= 1 || lse.stride(1) == 1) && (heads <= 1 || lse.stride(0) == tokens);
  if (lse.dtype != DType::kFloat32 || !packed) {
    refuse(name + " is " + element_text(lse.element) + " " + shape_text(lse) + "; it must be packed float32 [" +
           std::to_string(heads) + ", " + std::to_string(tokens) + "]");
  }
  arrays.push_back(std::move(lse));
  return static_cast<float*>(arrays.back().data);
}

void merge(nb::handle output, nb::handle prefix_output, nb::handle prefix_lse, nb::handle suffix_output,
           nb::handle suffix_lse, nb::handle output_lse, std::optional<int64_t> prefill_tokens_with_context,
           nb::handle output_scale, const std::optional<Context>& given_context, nb::handle stream) {
  const Context context = context_or_default(given_context);
  std::vector<Array> arrays;
  const auto keep = [&arrays](Tensor tensor) {
    if (tensor.view.rank != 3) refuse(tensor.array.name + " must be [num_tokens, num_heads, head_size]");
    arrays.push_back(std::move(tensor.array));
    return tensor.view;
  };
  const TensorView suffix = keep(to_tensor(suffix_output, "suffix_output", Access::kRead));
  const TensorView prefix = keep(to_tensor(prefix_output, "prefix_output", Access::kRead));
  const bool quantised = !output_scale.is_none();
  const TensorView out =
      keep(to_stored_tensor(output, quantised ? DType::kFloat8E4M3 : suffix.dtype, "output", Access::kWrite));
  const float* const prefix_sums = head_major_lse(prefix_lse, "prefix_lse", suffix, Access::kRead, arrays);
  const float* const suffix_sums = head_major_lse(suffix_lse, "suffix_lse", suffix, Access::kRead, arrays);
  float* const sums =
      output_lse.is_none() ? nullptr : head_major_lse(output_lse, "output_lse", suffix, Access::kWrite, arrays);
  const ScaleArg scale = quantised ? to_scale(output_scale, "output_scale") : ScaleArg();
  require_extent(scale, "output_scale", suffix.shape[1], -1);
  if (scale.array) arrays.push_back(*scale.array);
  python::require_on(context.device(), arrays);
  const Stream queue = to_stream(stream, context.device(), {&arrays});
  const ReleasedGil released;
  bk::merge_attn_states(context, out, prefix, prefix_sums, suffix, suffix_sums, sums, prefill_tokens_with_context,
                        scale.scale, queue);
}

}  // namespace

void bind_merge_attn_states(nb::module_& m) {
  m.def("merge_attn_states", &merge, nb::arg("output"), nb::arg("prefix_output"), nb::arg("prefix_lse"),
        nb::arg("suffix_output"), nb::arg("suffix_lse"), nb::arg("output_lse") = nb::none(),
        nb::arg("prefill_tokens_with_context") = nb::none(), nb::arg("output_scale") = nb::none(), nb::kw_only(),
        nb::arg("context") = nb::none(), nb::arg("stream") = nb::none(),
        "vLLM's merge of the attention to a prefix and to what follows it. Outputs are [num_tokens, num_heads, "
        "head_size], LSEs natural, packed float32 [num_heads, num_tokens]. Tokens from prefill_tokens_with_context on "
        "have no prefix. With output_scale the output is fp8. Raises InvalidArgument for other shapes.");
}

}  // namespace folio::python
