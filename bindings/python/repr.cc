#include "repr.hpp"

#include <cstdio>

namespace folio::python {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

std::string shape(const ConstTensorView& view) {
  std::string text(to_string(view.dtype));
  for (int32_t i = 0; i < view.rank; ++i) {
    text += (i == 0 ? " [" : ", ") + std::to_string(view.shape[static_cast<size_t>(i)]);
  }
  return text + (view.rank == 0 ? " []" : "]");
}

std::string place_of(const std::vector<Array>& arrays) {
  return arrays.empty() ? "" : ", on " + describe(arrays.front().place);
}

std::string scale_text(const char* name, const ScaleArg& scale) {
  const bool plain = !scale.array && scale.scale.value == 1.0f;
  return plain ? "" : std::string(", ") + name + " " + text_of(scale);
}

}  // namespace

std::string count_of(int64_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string text_of(const Array& array) {
  return element_text(array.element) + " " + shape_text(array);
}

std::string text_of(const Tensor& tensor) {
  return shape(tensor.view) + (tensor.array.writable ? "" : ", read-only") + ", on " + describe(tensor.array.place);
}

std::string text_of(const Lse& lse) {
  return text_of(*lse.array) + ", base " + lower_name(lse.view.base) + ", on " + describe(lse.array->place);
}

std::string text_of(const ScaleArg& scale) {
  if (!scale.array) return number(scale.scale.value);
  return lower_name(scale.scale.granularity) + " " + text_of(*scale.array);
}

std::string text_of(const Cache& cache) {
  const KvCacheView& view = cache.view;
  return count_of(view.num_pages, "page") + " of " + count_of(view.page_size, "token") + ", " +
         count_of(view.num_kv_heads, "KV head") + ", head_dim " + std::to_string(view.head_dim_qk) + "/" +
         std::to_string(view.head_dim_v) + ", " + std::string(to_string(view.dtype)) + ", " + lower_name(view.format) +
         place_of(cache.arrays);
}

std::string text_of(const Table& table) {
  if (table.view.kind == PageTableKind::kDense) {
    return "dense [" + std::to_string(table.view.num_rows) + ", " + std::to_string(table.columns) + "]" +
           (table.view.first_column == 0 ? "" : " from column " + std::to_string(table.view.first_column)) +
           place_of(table.arrays);
  }
  return "csr, " + count_of(table.view.num_rows, "row") + ", " + count_of(table.view.num_indices, "page id") +
         place_of(table.arrays);
}

std::string text_of(const Ragged& ragged) {
  return "k " + shape(ragged.view.k) + ", v " + shape(ragged.view.v) + ", " +
         count_of(ragged.arrays.back().size(0) - 1, "row") + place_of(ragged.arrays);
}

std::string text_of(const Segment& segment) {
  const KvSegment& view = segment.view;
  const int64_t rows = segment.arrays.front().size(0);
  std::string text = lower_name(view.source) + ", " + count_of(rows, "row");
  if (view.group_indptr != nullptr) text += " of shared keys";
  if (view.first_pos != nullptr) text += ", first_pos given";
  if (view.mask != SegmentMask::kAsConfig) text += ", " + lower_name(view.mask);
  if (view.shard.world != 1) {
    text += ", shard " + std::to_string(view.shard.rank) + " of " + std::to_string(view.shard.world);
  }
  return text + place_of(segment.arrays);
}

std::string text_of(const Batch& batch) {
  return count_of(batch.view.num_requests, "request") + ", " + count_of(batch.view.num_tokens, "token") + ", " +
         count_of(static_cast<int64_t>(batch.segment_views.size()), "segment") + place_of(batch.arrays);
}

std::string text_of(const SegmentArg& segment) {
  std::string text;
  const KvCacheView& cache = segment.view.cache;
  if (cache.k != nullptr || cache.num_pages != 0) {
    text = count_of(cache.num_pages, "page") + " of " + count_of(cache.page_size, "token") + ", " +
           std::string(to_string(cache.dtype)) + ", table of " + count_of(segment.view.table.num_rows, "row");
  } else {
    text = "ragged k " + shape(segment.view.ragged.k) + ", v " + shape(segment.view.ragged.v);
  }
  return text + scale_text("k_scale", segment.k_scale) + scale_text("v_scale", segment.v_scale) +
         place_of(segment.arrays);
}

std::string text_of(const Args& args) {
  std::string text = "q " + shape(args.view.q) + ", ";
  text += args.view.out.rank == 0 ? "no out" : "out " + shape(args.view.out);
  if (args.lse) text += ", lse base " + lower_name(args.view.lse.base);
  text += ", " + count_of(static_cast<int64_t>(args.segments.size()), "segment");
  if (args.view.sm_scale != 0) text += ", sm_scale " + number(args.view.sm_scale);
  if (args.view.logits_soft_cap != 0) text += ", logits_soft_cap " + number(args.view.logits_soft_cap);
  if (args.alibi_slopes) text += ", alibi_slopes";
  if (args.sinks) text += ", sinks";
  if (args.view.custom_mask != nullptr) text += ", custom_mask of " + count_of(args.view.custom_mask_bytes, "byte");
  return text + scale_text("q_scale", args.q_scale) + scale_text("out_scale", args.out_scale) + place_of(args.arrays);
}

std::string text_of(const WriteArgs& args) {
  const KvCacheView& cache = args.view.cache;
  return count_of(args.view.num_slots, "slot") + ", k " + shape(args.view.k) +
         (args.view.v.rank == 0 ? "" : ", v " + shape(args.view.v)) + ", into " + count_of(cache.num_pages, "page") +
         " of " + count_of(cache.page_size, "token") + " " + std::string(to_string(cache.dtype)) +
         scale_text("k_scale", args.k_scale) + scale_text("v_scale", args.v_scale) + place_of(args.arrays);
}

std::string text_of(const State& state) {
  return "out " + shape(state.view.out) + ", lse base " + lower_name(state.view.base) + place_of(state.arrays);
}

std::string text_of(const States& states) {
  return "out " + shape(states.view.out) + ", lse base " + lower_name(states.view.base) + place_of(states.arrays);
}

std::string text_of(const Context& context) {
  const bool cpu = context.device().type == DeviceType::kCpu;
  return describe(context.device()) + ", " + count_of(context.concurrency(), cpu ? "thread" : "SM");
}

std::string text_of(const AttentionOp& op) {
  const AttentionConfig& config = op.config();
  return std::string(op.kernel_name()) + " on " + describe(op.context().device()) + ", " +
         count_of(config.num_q_heads, "q head") + ", " + count_of(config.num_kv_heads, "KV head") + ", head_dim " +
         std::to_string(config.head_dim_qk) + "/" + std::to_string(config.head_dim_v) + ", q " +
         std::string(to_string(config.q)) + ", kv " + std::string(to_string(config.kv)) + ", pages of " +
         std::to_string(config.page_size) + ", mask " + lower_name(config.mask);
}

}  // namespace folio::python
