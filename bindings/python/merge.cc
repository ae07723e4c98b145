#include <string>

#include "device_call.hpp"
#include "gil.hpp"
#include "repr.hpp"

namespace folio::python {
namespace {

/// An LSE array beside its outputs: the same leading dimensions.
Array borrow_lse(nb::handle source, const Array& out, const std::string& name) {
  Array lse = borrow_float32(source, name, static_cast<int32_t>(out.rank()) - 1);
  for (int64_t i = 0; i < lse.rank(); ++i) {
    if (lse.size(i) != out.size(i)) {
      refuse(name + " is " + shape_text(lse) + "; beside outputs of " + shape_text(out) +
             " it must have all but their last dimension");
    }
  }
  return lse;
}

void require_rank(const Array& out, int64_t rank, const char* shape) {
  if (out.rank() != rank) refuse(out.name + " has shape " + shape_text(out) + "; it must be " + shape);
}

State make_state(nb::handle out, nb::handle lse, LseBase base) {
  State state;
  Tensor outputs = to_tensor(out, "out", Access::kRead);
  require_rank(outputs.array, 3, "[tokens, heads, head_dim]");
  Array sums = borrow_lse(lse, outputs.array, "lse");
  state.view = {outputs.view, static_cast<const float*>(sums.data), sums.stride(0), sums.stride(1), base};
  state.arrays = {std::move(outputs.array), std::move(sums)};
  return state;
}

States make_states(nb::handle out, nb::handle lse, LseBase base) {
  States states;
  Tensor outputs = to_tensor(out, "out", Access::kRead);
  require_rank(outputs.array, 4, "[tokens, states, heads, head_dim]");
  Array sums = borrow_lse(lse, outputs.array, "lse");
  states.view = {outputs.view, static_cast<const float*>(sums.data), sums.stride(0), sums.stride(1), sums.stride(2),
                 base};
  states.arrays = {std::move(outputs.array), std::move(sums)};
  return states;
}

/// Where a merge's results go, with the arrays: held until the merge has returned, when the GIL is there again.
struct Target {
  TensorView out;
  LseView lse;
  ScaleArg scale;
  std::vector<Array> arrays;
};

Target make_target(const Device& device, nb::handle out, nb::handle lse, nb::handle out_scale) {
  Target target;
  const Tensor outputs = to_tensor(out, "out", Access::kWrite);
  require_rank(outputs.array, 3, "[tokens, heads, head_dim]");
  target.out = outputs.view;
  target.arrays.push_back(outputs.array);
  const Lse sums = to_lse(lse, "lse");
  if (sums.array) {
    target.arrays.push_back(*sums.array);
    if (sums.array->size(0) != outputs.array.size(0) || sums.array->size(1) != outputs.array.size(1)) {
      refuse("lse is " + shape_text(*sums.array) + ", out " + shape_text(outputs.array));
    }
    target.lse = sums.view;
  }
  target.scale = to_scale(out_scale, "out_scale");
  if (target.scale.array) target.arrays.push_back(*target.scale.array);
  require_on(device, target.arrays);
  return target;
}

/// That the requests' rows lie among so many, one after the other.
void require_rows(std::span<const int32_t> cu_q, int64_t tokens) {
  for (size_t r = 0; r < cu_q.size(); ++r) {
    if (cu_q[r] < (r == 0 ? 0 : cu_q[r - 1]) || cu_q[r] > tokens) {
      refuse("cu_q[" + std::to_string(r) + "] is " + std::to_string(cu_q[r]) + "; offsets ascend from 0 to the " +
             std::to_string(tokens) + " rows of lse");
    }
  }
}

}  // namespace

void bind_merge(nb::module_& m) {
  nb::class_<State> state(
      m, "AttentionStateView",
      "A partial attention result: normalised outputs [tokens, heads, head_dim], float32, float16 or bfloat16, and "
      "their float32 LSE [tokens, heads] in `base`.");
  bind_repr(state);
  state.def(
      "__init__",
      [](State* self, nb::object out, nb::object lse, LseBase base) { new (self) State(make_state(out, lse, base)); },
      nb::arg("out"), nb::arg("lse"), nb::arg("base") = LseBase::kE);
  nb::class_<States> states_class(
      m, "AttentionStatesView",
      "Several states per token: outputs [tokens, states, heads, head_dim], float32 LSE [tokens, states, heads].");
  bind_repr(states_class);
  states_class.def(
      "__init__",
      [](States* self, nb::object out, nb::object lse, LseBase base) {
        new (self) States(make_states(out, lse, base));
      },
      nb::arg("out"), nb::arg("lse"), nb::arg("base") = LseBase::kE);
  m.def(
      "merge_state",
      [](const Context& context, const State& a, const State& b, nb::object out, nb::object lse, nb::object out_scale,
         nb::object stream) {
        require_on(context.device(), a.arrays);
        require_on(context.device(), b.arrays);
        const Target target = make_target(context.device(), out, lse, out_scale);
        const Stream queue = to_stream(stream, context.device(), {&a.arrays, &b.arrays, &target.arrays});
        const ReleasedGil released;
        merge_state(context, a.view, b.view, target.out, target.lse, target.scale.scale, queue);
      },
      nb::arg("context"), nb::arg("a"), nb::arg("b"), nb::arg("out"), nb::arg("lse") = nb::none(),
      nb::arg("out_scale") = 1.0f, nb::arg("stream") = nb::none(),
      "Merges two AttentionStateViews into out [tokens, heads, head_dim] and, if given, lse [tokens, heads]: an array, "
      "or an LseView. They may be a's own arrays. A state whose LSE is infinite is empty. `out_scale` is for an fp8 "
      "out.");
  m.def(
      "merge_states",
      [](const Context& context, const States& states, nb::object out, nb::object lse, nb::object out_scale,
         nb::object stream) {
        require_on(context.device(), states.arrays);
        const Target target = make_target(context.device(), out, lse, out_scale);
        const Stream queue = to_stream(stream, context.device(), {&states.arrays, &target.arrays});
        const ReleasedGil released;
        merge_states(context, states.view, target.out, target.lse, target.scale.scale, queue);
      },
      nb::arg("context"), nb::arg("states"), nb::arg("out"), nb::arg("lse") = nb::none(), nb::arg("out_scale") = 1.0f,
      nb::arg("stream") = nb::none(),
      "Merges all states of every token of an AttentionStatesView, in order, into out and lse as merge_state's.");
  m.def(
      "merge_state_in_place",
      [](const Context& context, nb::object out, nb::object lse, const State& b, nb::object mask, nb::object stream) {
        DeviceCall call(context);
        const Target target = make_target(context.device(), out, lse, nb::float_(1.0));
        if (target.lse.data == nullptr) refuse("lse is None; a state in place has one");
        call.keep(target.arrays);
        call.keep(b.arrays);
        const uint8_t* chosen = nullptr;
        if (!mask.is_none()) {
          const auto bytes = call.bytes(mask, "mask");
          if (static_cast<int64_t>(bytes.size()) != target.out.shape[0]) {
            refuse("mask has " + std::to_string(bytes.size()) + " entries; there are " +
                   std::to_string(target.out.shape[0]) + " tokens");
          }
          chosen = bytes.data();
        }
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        merge_state_in_place(context, target.out, target.lse, b.view, chosen, queue);
      },
      nb::arg("context"), nb::arg("out"), nb::arg("lse"), nb::arg("b"), nb::arg("mask") = nb::none(),
      nb::arg("stream") = nb::none(),
      "out, lse = (out, lse) (+) b for the tokens whose mask byte, uint8 [tokens], is not 0; None: all.");
  m.def(
      "shift_alibi_lse",
      [](const Context& context, nb::object lse, nb::object cu_q, nb::object first_pos, nb::object slopes,
         nb::object stream) {
        DeviceCall call(context);
        const Array sums = borrow(lse, "lse", Access::kWrite);
        if (sums.dtype != DType::kFloat32 || sums.rank() != 2) {
          refuse("lse is " + element_text(sums.element) + " " + shape_text(sums) +
                 "; it must be float32 [tokens, heads]");
        }
        if ((sums.size(1) > 1 && sums.stride(1) != 1) || (sums.size(0) > 1 && sums.stride(0) != sums.size(1))) {
          refuse("lse is not contiguous");
        }
        call.keep({sums});
        const auto offsets = call.int32s(cu_q, "cu_q");
        const auto positions = call.int32s(first_pos, "first_pos");
        const auto factors = call.floats(slopes, "slopes");
        if (static_cast<int64_t>(factors.size()) != sums.size(1)) {
          refuse("slopes has " + std::to_string(factors.size()) + " entries; lse has " + std::to_string(sums.size(1)) +
                 " heads");
        }
        if (offsets.size() != positions.size() + 1) {
          refuse("cu_q has " + std::to_string(offsets.size()) + " entries, first_pos " +
                 std::to_string(positions.size()) + "; the first has one more");
        }
        if (call.on_cpu()) require_rows(offsets, sums.size(0));
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        shift_alibi_lse(context, static_cast<float*>(sums.data), offsets, positions, factors, queue);
      },
      nb::arg("context"), nb::arg("lse"), nb::arg("cu_q"), nb::arg("first_pos"), nb::arg("slopes"),
      nb::arg("stream") = nb::none(),
      "Log-sum-exps of attention with ALiBi as FlashInfer has them: lse [tokens, heads], base 2, contiguous, gets "
      "slopes[head] * first_pos[request] * log2(e) added, in place.");
}

}  // namespace folio::python
