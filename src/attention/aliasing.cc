#include "attention/aliasing.hpp"

#include <array>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/types/nvfp4.hpp"
#include "kvcache/strided_set.hpp"

namespace folio::inline v0::attention {
namespace {

using kvcache::StridedSet;

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kInt = sizeof(int32_t);

/// `count` elements of `element` bytes, one after the other.
StridedSet bytes_set(const void* data, int64_t count, int64_t element) {
  StridedSet set;
  if (data == nullptr || count <= 0) return set;
  set.base = reinterpret_cast<uintptr_t>(data);
  set.row_bytes = set.extent = core::checked_mul(count, element);
  uintptr_t end = 0;
  core::require(!__builtin_add_overflow(set.base, static_cast<uintptr_t>(set.extent), &end), "an array of ", count,
                " elements of ", element, " bytes reaches beyond the address space");
  return set;
}

}  // namespace

StridedSet tensor_set(const char* name, const ConstTensorView& tensor) {
  if (tensor.data == nullptr || tensor.shape[0] == 0) return {};
  ConstTensorView upwards = tensor;  // the same rows, counted from the lowest address
  auto base = reinterpret_cast<uintptr_t>(tensor.data);
  for (size_t i = 0; i < 2; ++i) {
    if (tensor.strides[i] >= 0) continue;
    base += static_cast<uintptr_t>(
        core::checked_mul(tensor.shape[i] - 1, tensor.strides[i], int64_t{size_of(tensor.dtype)}));
    upwards.strides[i] = core::checked_sub(int64_t{0}, tensor.strides[i]);
  }
  upwards.data = reinterpret_cast<const void*>(base);
  return kvcache::rows_set(name, upwards, tensor.shape[0]);
}

StridedSet block_scale_set(const BlockScaleArgs& scales, int64_t tokens, int64_t blocks) {
  if (scales.data == nullptr || tokens == 0) return {};
  const int64_t rows = core::checked_add(scales.first_row, tokens);
  core::checked_mul(core::checked_round_up(rows, int64_t{kNvfp4TileRows}),
                    core::checked_round_up(blocks, int64_t{kNvfp4TileBlocks}));
  return bytes_set(scales.data, nvfp4_scale_bytes(rows, blocks), 1);
}

namespace {

StridedSet lse_set(const AttentionArgs& args) {
  ConstTensorView view(args.lse.data, DType::kFloat32, {args.q.shape[0], args.q.shape[1], 1});
  view.strides[0] = args.lse.token_stride;
  view.strides[1] = args.lse.head_stride;
  return tensor_set("lse", view);
}

StridedSet scale_set(const Scale& scale, int64_t requests, int64_t heads) {
  int64_t count = 1;
  if (scale.granularity == ScaleGranularity::kPerHead) count = heads;
  if (scale.granularity == ScaleGranularity::kPerRequest) count = requests;
  if (scale.granularity == ScaleGranularity::kPerRequestAndHead) {
    count = requests == 0 ? 0 : core::checked_add(core::checked_mul(requests - 1, scale.request_stride), heads);
  }
  return bytes_set(scale.data, count, kFloat);
}

/// The outputs, as far as they are given.
class Outputs {
 public:
  void add(const char* name, const StridedSet& set) {
    apart_from(name, set);
    outputs_[count_++] = {name, set};
  }

  void apart_from(const char* name, const StridedSet& set) const {
    for (size_t i = 0; i < count_; ++i) {
      core::require(kvcache::lie_apart(outputs_[i].set, set), outputs_[i].name, " overlaps ", name);
    }
  }

 private:
  struct Output {
    const char* name;
    StridedSet set;
  };
  std::array<Output, 4> outputs_;
  size_t count_ = 0;
};

void check_segment(const Outputs& outputs, const SegmentArgs& args, const scheduler::SegmentLengths& lengths,
                   int64_t requests, int64_t heads) {
  outputs.apart_from("k_scale.data", scale_set(args.k_scale, requests, heads));
  outputs.apart_from("v_scale.data", scale_set(args.v_scale, requests, heads));
  if (lengths.source == KvSource::kRagged) {
    outputs.apart_from("ragged.k", tensor_set("ragged.k", args.ragged.k));
    outputs.apart_from("ragged.v", tensor_set("ragged.v", args.ragged.v));
    outputs.apart_from("ragged.indptr", bytes_set(args.ragged.indptr, int64_t{lengths.num_rows} + 1, kInt));
    return;
  }
  outputs.apart_from("the K cache", kvcache::k_set(args.cache));
  outputs.apart_from("the V cache", kvcache::v_set(args.cache));
  if (args.cache.dtype == DType::kInt8) {
    outputs.apart_from("k_token_scales",
                       kvcache::token_scale_set("k_token_scales", args.cache, args.cache.k_token_scales));
    outputs.apart_from("v_token_scales",
                       kvcache::token_scale_set("v_token_scales", args.cache, args.cache.v_token_scales));
  }
  outputs.apart_from("table.indices", bytes_set(args.table.indices, args.table.num_indices, kInt));
  outputs.apart_from("table.indptr", bytes_set(args.table.indptr, int64_t{lengths.num_rows} + 1, kInt));
}

}  // namespace

void check_outputs_apart(const detail::PlanBufferState& plan, const AttentionArgs& args, const Workspace& workspace) {
  if (plan.num_tokens == 0) return;  // nothing is written
  const AttentionConfig& config = plan.op->config;
  const scheduler::PlanView& view = plan.view();
  Outputs outputs;
  outputs.add("out", tensor_set("out", args.out));
  outputs.add("lse", lse_set(args));
  const int64_t blocks = args.out.shape[1] * args.out.shape[2] * 2 / kNvfp4BlockSize;
  outputs.add("out_block_scale", block_scale_set(args.out_block_scale, plan.num_tokens, blocks));
  outputs.add("the workspace", bytes_set(workspace.data, core::checked_cast<int64_t>(workspace.bytes), 1));
  outputs.apart_from("q", tensor_set("q", args.q));
  outputs.apart_from("alibi_slopes", bytes_set(args.alibi_slopes, config.num_q_heads, kFloat));
  outputs.apart_from("sinks", bytes_set(args.sinks, config.num_q_heads, kFloat));
  outputs.apart_from("custom_mask", bytes_set(args.custom_mask, args.custom_mask_bytes, 1));
  outputs.apart_from("q_scale.data", scale_set(args.q_scale, view.num_requests, config.num_kv_heads));
  outputs.apart_from("out_scale.data", scale_set(args.out_scale, view.num_requests, config.num_kv_heads));
  for (size_t i = 0; i < args.segments.size(); ++i) {
    try {
      check_segment(outputs, args.segments[i], view.segments[i], view.num_requests, config.num_kv_heads);
    } catch (const Error& error) {
      core::fail(error.code(), "segment ", i, ": ", error.what());
    }
  }
}

}  // namespace folio::inline v0::attention
