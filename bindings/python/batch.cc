#include <string>

#include "block_scale.hpp"
#include "integers.hpp"
#include "masks.hpp"
#include "repr.hpp"

namespace folio::python {
namespace {

const int32_t* ints(const Array& array) {
  return static_cast<const int32_t*>(array.data);
}

void require_size(const Array& array, int64_t wanted, const std::string& of_what) {
  if (array.size(0) != wanted) {
    refuse(array.name + " has " + std::to_string(array.size(0)) + " entries; " + of_what + " " +
           std::to_string(wanted));
  }
}

Segment make_segment(nb::handle kv_len, KvSource source, nb::handle first_pos, nb::handle group_indptr,
                     SegmentMask mask, const KvShard& shard) {
  Segment segment;
  Array lengths = borrow_int32(kv_len, "kv_len");
  const int64_t rows = lengths.size(0);
  segment.view.source = source;
  segment.view.kv_len = ints(lengths);
  segment.view.mask = mask;
  segment.view.shard = shard;
  segment.arrays.push_back(std::move(lengths));
  if (!first_pos.is_none()) {
    Array positions = borrow_int32(first_pos, "first_pos");
    require_size(positions, rows, "kv_len has");
    segment.view.first_pos = ints(positions);
    segment.arrays.push_back(std::move(positions));
  }
  if (!group_indptr.is_none()) {
    Array groups = borrow_int32(group_indptr, "group_indptr");
    require_size(groups, rows + 1, "one more than kv_len's makes");
    segment.view.group_indptr = ints(groups);
    segment.view.num_groups = static_cast<int32_t>(rows);
    segment.arrays.push_back(std::move(groups));
  }
  return segment;
}

/// Lengths lie all on the host or all on one device.
Where where_of(const std::vector<Array>& arrays) {
  const Array& first = arrays.front();
  const Where where = first.place.host ? Where::kHost : Where::kDevice;
  if (where == Where::kDevice && !first.place.cuda) refuse(first.name + " lies on " + describe(first.place));
  for (const Array& array : arrays) {
    const bool together =
        where == Where::kHost ? array.place.host : array.place.cuda && array.place.cuda_index == first.place.cuda_index;
    if (!together) {
      refuse(array.name + " lies on " + describe(array.place) + ", " + first.name + " on " + describe(first.place) +
             "; a batch's lengths lie in one place");
    }
  }
  return where;
}

struct CustomMaskArg {
  CustomMask view;
  std::optional<Array> tail_len;
};

/// What a batch says of single requests and queries; each may be None.
struct QueryMaskArgs {
  nb::object kv_start, causal, spans;
};

/// By num_tokens, which must be known.
void add_query_masks(const QueryMaskArgs& given, Batch& batch) {
  if (!given.kv_start.is_none()) {
    Array starts = borrow_int32(given.kv_start, "kv_start");
    require_size(starts, batch.view.num_requests, "cu_q has requests:");
    batch.view.kv_start = ints(starts);
    batch.arrays.push_back(std::move(starts));
  }
  if (!given.causal.is_none()) {
    Array flags = borrow_flags(given.causal, "causal");
    require_size(flags, batch.view.num_requests, "cu_q has requests:");
    batch.view.causal = static_cast<const uint8_t*>(flags.data);
    batch.arrays.push_back(std::move(flags));
  }
  if (given.spans.is_none()) return;
  Array spans = borrow_int32(given.spans, "spans", 2);
  // A list without rows does not say that it has two columns.
  if (spans.size(0) != batch.view.num_tokens || (spans.size(0) > 0 && spans.size(1) != 2)) {
    refuse("spans has shape " + shape_text(spans) + "; the batch's tokens need [" +
           std::to_string(batch.view.num_tokens) + ", 2]");
  }
  if (spans.size(0) > 0 && (spans.stride(1) != 1 || (spans.size(0) > 1 && spans.stride(0) != 2))) {
    refuse("spans has strides of [" + std::to_string(spans.stride(0)) + ", " + std::to_string(spans.stride(1)) +
           "] elements; it must be contiguous");
  }
  batch.view.spans = ints(spans);
  batch.arrays.push_back(std::move(spans));
}

Batch make_batch(nb::handle cu_q, const std::vector<Segment>& segments, std::optional<int32_t> num_tokens,
                 int32_t max_q_len, int32_t max_kv_len, nb::handle q_first_pos,
                 const std::optional<CustomMaskArg>& custom_mask, const QueryMaskArgs& query_masks) {
  Batch batch;
  Array offsets = borrow_int32(cu_q, "cu_q");
  if (offsets.size(0) < 1) refuse("cu_q is empty; it has one entry more than there are requests");
  const int64_t requests = offsets.size(0) - 1;
  batch.view.num_requests = static_cast<int32_t>(requests);
  batch.view.cu_q = ints(offsets);
  batch.view.max_q_len = max_q_len;
  batch.view.max_kv_len = max_kv_len;
  batch.arrays.push_back(std::move(offsets));
  if (!q_first_pos.is_none()) {
    Array positions = borrow_int32(q_first_pos, "q_first_pos");
    require_size(positions, requests, "cu_q has requests:");
    batch.view.q_first_pos = ints(positions);
    batch.arrays.push_back(std::move(positions));
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    for (Array array : segments[i].arrays) {
      array.name = "segments[" + std::to_string(i) + "]." + array.name;
      if (segments[i].view.group_indptr == nullptr) require_size(array, requests, "cu_q has requests:");
      batch.arrays.push_back(std::move(array));
    }
    batch.segment_views.push_back(segments[i].view);
  }
  if (custom_mask) {
    batch.view.custom_mask = custom_mask->view;
    if (custom_mask->tail_len) {
      require_size(*custom_mask->tail_len, requests, "cu_q has requests:");
      batch.arrays.push_back(*custom_mask->tail_len);
    }
  }
  batch.view.where = where_of(batch.arrays);
  if (num_tokens) {
    batch.view.num_tokens = *num_tokens;
  } else if (batch.view.where == Where::kHost) {
    batch.view.num_tokens = batch.view.cu_q[requests];
  } else {
    refuse("num_tokens must be given where cu_q lies on a GPU");
  }
  add_query_masks(query_masks, batch);
  batch.view.where = where_of(batch.arrays);
  return batch;
}

SegmentArg make_segment_arg(const Cache* cache, const Table* table, const Ragged* ragged, nb::handle k_scale,
                            nb::handle v_scale) {
  SegmentArg segment;
  const auto keep = [&segment](const std::vector<Array>& arrays, const char* prefix) {
    for (Array array : arrays) {
      array.name = prefix + array.name;
      segment.arrays.push_back(std::move(array));
    }
  };
  if (cache != nullptr) {
    segment.view.cache = cache->view;
    keep(cache->arrays, "cache.");
  }
  if (table != nullptr) {
    segment.view.table = table->view;
    segment.table_columns = table->columns;
    keep(table->arrays, "");
  }
  if (ragged != nullptr) {
    segment.view.ragged = ragged->view;
    segment.ragged_offsets = ragged->arrays.back().size(0);
    keep(ragged->arrays, "");
  }
  segment.k_scale = to_scale(k_scale, "k_scale");
  segment.v_scale = to_scale(v_scale, "v_scale");
  segment.view.k_scale = segment.k_scale.scale;
  segment.view.v_scale = segment.v_scale.scale;
  for (const ScaleArg* scale : {&segment.k_scale, &segment.v_scale}) {
    if (scale->array) segment.arrays.push_back(*scale->array);
  }
  return segment;
}

Args make_args(nb::handle q, nb::handle out, const std::vector<SegmentArg>& segments, nb::handle lse, float sm_scale,
               float logits_soft_cap, nb::handle alibi_slopes, nb::handle sinks, nb::handle q_scale,
               nb::handle out_scale, nb::handle custom_mask, const RopeArgs& rope, const BlockScale* out_block_scale) {
  Args args;
  args.view.rope = rope;
  const auto keep = [&args](Array array) { args.arrays.push_back(std::move(array)); };
  Tensor queries = to_tensor(q, "q", Access::kRead);
  args.view.q = queries.view;
  keep(std::move(queries.array));
  if (!out.is_none()) {
    const bool bare = out_block_scale != nullptr && !nb::isinstance<Tensor>(out);
    Tensor outputs =
        bare ? make_tensor(out, DType::kFloat4E2M1x2, "out", Access::kWrite) : to_tensor(out, "out", Access::kWrite);
    args.view.out = outputs.view;
    keep(std::move(outputs.array));
  }
  if (out_block_scale != nullptr) {
    const BlockScale factors = block_scale_of(*out_block_scale, args.view.out, "out_block_scale", Access::kWrite);
    args.view.out_block_scale = {factors.array.data, factors.first_row};
    keep(factors.array);
  }
  Lse lse_arg = to_lse(lse, "lse");
  args.view.lse = lse_arg.view;
  args.lse = lse_arg.array;
  if (args.lse) keep(*args.lse);
  args.view.sm_scale = sm_scale;
  args.view.logits_soft_cap = logits_soft_cap;
  if (!alibi_slopes.is_none()) {
    args.alibi_slopes = borrow_float32(alibi_slopes, "alibi_slopes");
    args.view.alibi_slopes = static_cast<const float*>(args.alibi_slopes->data);
    keep(*args.alibi_slopes);
  }
  if (!sinks.is_none()) {
    args.sinks = borrow_float32(sinks, "sinks");
    args.view.sinks = static_cast<const float*>(args.sinks->data);
    keep(*args.sinks);
  }
  args.q_scale = to_scale(q_scale, "q_scale");
  args.out_scale = to_scale(out_scale, "out_scale");
  args.view.q_scale = args.q_scale.scale;
  args.view.out_scale = args.out_scale.scale;
  for (const ScaleArg* scale : {&args.q_scale, &args.out_scale}) {
    if (scale->array) keep(*scale->array);
  }
  if (!custom_mask.is_none()) {
    nb::object given = nb::borrow(custom_mask);
    if (is_unpacked_mask(custom_mask)) {
      PackedMask packed = pack_mask(custom_mask, "custom_mask");
      given = std::move(packed.bits);
      args.mask_shapes = std::move(packed.shapes);
    }
    Array bits = borrow_bytes(given, "custom_mask");
    args.view.custom_mask = static_cast<const uint8_t*>(bits.data);
    args.view.custom_mask_bytes = bits.size(0);
    keep(std::move(bits));
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    for (Array array : segments[i].arrays) {
      array.name = "segments[" + std::to_string(i) + "]." + array.name;
      keep(std::move(array));
    }
    args.segments.push_back(segments[i]);
    args.segment_views.push_back(segments[i].view);
  }
  return args;
}

void bind_lengths(nb::module_& m) {
  nb::class_<Segment> segment(
      m, "KvSegment",
      "One part of every request's keys: `kv_len` [rows] tokens, one row a request or, with `group_indptr` [rows + 1], "
      "one a group of neighbouring requests that share it. `first_pos` [rows] is the position of each row's first "
      "token; left out, a row begins where the request's segment before ends. Integers are int32, or int64 or lists, "
      "which are copied once.");
  bind_repr(segment);
  segment.def(
      "__init__",
      [](Segment* self, nb::object kv_len, KvSource source, nb::object first_pos, nb::object group_indptr,
         SegmentMask mask, const KvShard& shard) {
        new (self) Segment(make_segment(kv_len, source, first_pos, group_indptr, mask, shard));
      },
      nb::arg("kv_len"), nb::kw_only(), nb::arg("source") = KvSource::kPaged, nb::arg("first_pos") = nb::none(),
      nb::arg("group_indptr") = nb::none(), nb::arg("mask") = SegmentMask::kAsConfig, nb::arg("shard") = KvShard{});
  nb::class_<CustomMaskArg> mask_class(
      m, "CustomMask",
      "The shape of a batch's custom masks; the bits are AttentionArgs'. A request's columns are all its keys, or with "
      "scope \"tail\" its last tail_len[r] ones; earlier keys are then visible. tail_len is [requests].");
  mask_class.def("__repr__", [](const CustomMaskArg& self) {
    return "<folio.CustomMask: " + lower_name(self.view.scope) +
           (self.tail_len ? ", " + count_of(self.tail_len->size(0), "request") : "") + ">";
  });
  mask_class.def(
      "__init__",
      [](CustomMaskArg* self, CustomMaskScope scope, nb::object tail_len) {
        CustomMaskArg mask;
        mask.view.scope = scope;
        if (!tail_len.is_none()) {
          mask.tail_len = borrow_int32(tail_len, "custom_mask.tail_len");
          mask.view.tail_len = ints(*mask.tail_len);
        }
        new (self) CustomMaskArg(std::move(mask));
      },
      nb::kw_only(), nb::arg("scope") = CustomMaskScope::kAll, nb::arg("tail_len") = nb::none());
  nb::class_<Batch> batch_class(
      m, "BatchView",
      "One step's batch: lengths only, all on the host or all on one GPU. `cu_q` [requests + 1] has the offsets of "
      "each request's queries, `segments` are KvSegments in the order of the keys, `q_first_pos` [requests] the "
      "position of each first query (left out: the last query stands at the last key). `num_tokens`, rows of q, is by "
      "default cu_q's last entry; with lengths on a GPU it must be given, and max_q_len and max_kv_len too. Integers "
      "are int32, which are read when plan runs, or int64 or lists, which are copied once, here.\n\n"
      "Masks as rules, each with its Feature: keys at positions below `kv_start` [requests] are invisible (left "
      "padding; "
      "chunks begin there); a request whose `causal` [requests] is false sees all its keys within the window; `spans` "
      "[num_tokens, 2] are begin and end of the key positions that a query sees besides, as in an image: none where "
      "begin >= end.");
  bind_repr(batch_class);
  batch_class
      .def(
          "__init__",
          [](Batch* self, nb::object cu_q, const std::vector<Segment>& segments, std::optional<int32_t> num_tokens,
             int32_t max_q_len, int32_t max_kv_len, nb::object q_first_pos,
             const std::optional<CustomMaskArg>& custom_mask, nb::object kv_start, nb::object causal,
             nb::object spans) {
            new (self) Batch(make_batch(cu_q, segments, num_tokens, max_q_len, max_kv_len, q_first_pos, custom_mask,
                                        {std::move(kv_start), std::move(causal), std::move(spans)}));
          },
          nb::arg("cu_q"), nb::arg("segments"), nb::kw_only(), nb::arg("num_tokens") = nb::none(),
          nb::arg("max_q_len") = 0, nb::arg("max_kv_len") = 0, nb::arg("q_first_pos") = nb::none(),
          nb::arg("custom_mask") = nb::none(), nb::arg("kv_start") = nb::none(), nb::arg("causal") = nb::none(),
          nb::arg("spans") = nb::none())
      .def_prop_ro(
          "where", [](const Batch& self) { return self.view.where; }, "Where lengths lie, a Where.")
      .def_prop_ro(
          "num_requests", [](const Batch& self) { return self.view.num_requests; }, "Requests.")
      .def_prop_ro(
          "num_tokens", [](const Batch& self) { return self.view.num_tokens; }, "Rows of q and out.");
}

}  // namespace

void bind_batch(nb::module_& m) {
  bind_lengths(m);
  nb::class_<SegmentArg> segment_args(
      m, "SegmentArgs",
      "Where one segment's keys and values lie in this layer: a KvCacheView with its PageTableView, or a RaggedKvView. "
      "Scales are numbers or folio.Scale: real = stored * scale.");
  bind_repr(segment_args);
  segment_args.def(
      "__init__",
      [](SegmentArg* self, const Cache* cache, const Table* table, const Ragged* ragged, nb::object k_scale,
         nb::object v_scale) { new (self) SegmentArg(make_segment_arg(cache, table, ragged, k_scale, v_scale)); },
      nb::arg("cache").none() = nb::none(), nb::arg("table").none() = nb::none(), nb::kw_only(),
      nb::arg("ragged").none() = nb::none(), nb::arg("k_scale") = 1.0f, nb::arg("v_scale") = 1.0f);
  nb::class_<Args> args_class(
      m, "AttentionArgs",
      "One layer's arguments. q is [tokens, q heads, head_dim_qk], out [tokens, q heads, head_dim_v] (None for "
      "reference_attention only), segments are SegmentArgs. Optional: lse, float32 [tokens, q heads] or an LseView; "
      "sm_scale, which multiplies q . k (0: 1 / sqrt(head_dim_qk)); logits_soft_cap (0: off); alibi_slopes and sinks, "
      "float32 [q heads]; q_scale and out_scale, numbers or folio.Scale, for fp8; custom_mask for a mask of kind "
      "CUSTOM: a list of one bool array [queries, columns] a request, which is packed here, or bits, as "
      "pack_custom_mask makes them; rope, RopeArgs, for Feature.ROPE_LLAMA; out_block_scale, BlockScaleArgs, for NVFP4 "
      "outputs: out is uint8 then. Everything else is borrowed and read when "
      "run runs.");
  bind_repr(args_class);
  args_class.def(
      "__init__",
      [](Args* self, nb::object q, nb::object out, const std::vector<SegmentArg>& segments, nb::object lse,
         float sm_scale, float logits_soft_cap, nb::object alibi_slopes, nb::object sinks, nb::object q_scale,
         nb::object out_scale, nb::object custom_mask, const RopeArgs& rope, const BlockScale* out_block_scale) {
        new (self) Args(make_args(q, out, segments, lse, sm_scale, logits_soft_cap, alibi_slopes, sinks, q_scale,
                                  out_scale, custom_mask, rope, out_block_scale));
      },
      nb::arg("q"), nb::arg("out").none(), nb::arg("segments"), nb::kw_only(), nb::arg("lse") = nb::none(),
      nb::arg("sm_scale") = 0.0f, nb::arg("logits_soft_cap") = 0.0f, nb::arg("alibi_slopes") = nb::none(),
      nb::arg("sinks") = nb::none(), nb::arg("q_scale") = 1.0f, nb::arg("out_scale") = 1.0f,
      nb::arg("custom_mask") = nb::none(), nb::arg("rope") = RopeArgs{}, nb::arg("out_block_scale") = nb::none());
}

}  // namespace folio::python
