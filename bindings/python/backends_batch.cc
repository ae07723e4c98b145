#include <limits>
#include <string>
#include <utility>

#include "backends.hpp"
#include "backends_batch.hpp"
#include "backends_names.hpp"
#include "folio/backends/batch_order.hpp"
#include "folio/backends/cascade_heuristic.hpp"
#include "folio/backends/graph_padding.hpp"

namespace folio::python {
namespace {

/// One of two names for the same argument: Folio's, and the one that vLLM's CommonAttentionMetadata has.
nb::object either(nb::handle ours, nb::handle theirs, const char* our_name, const char* their_name) {
  if (ours.is_none()) return nb::borrow(theirs);
  if (!theirs.is_none()) refuse(std::string(our_name) + " and " + their_name + " are the same; give one");
  return nb::borrow(ours);
}

int32_t longest_query(std::span<const int32_t> starts) {
  int32_t longest = 0;
  for (size_t i = 1; i < starts.size(); ++i) longest = std::max(longest, starts[i] - starts[i - 1]);
  return longest;
}

/// The value given, or what the lengths on the host say.
int32_t value_or(std::optional<int32_t> given, bool known, int32_t derived, const char* name) {
  if (given) return *given;
  if (!known) refuse(std::string(name) + " must be given where the lengths lie on a GPU without copies on the host");
  return derived;
}

template <typename Element>
void keep(CommonBatch& batch, const Numbers<Element>& numbers) {
  if (numbers.on_device()) batch.device_arrays.push_back(*numbers.array());
}

void require_together(const CommonBatch& batch, const char* name, bool on_device, bool given) {
  const bool device = batch.view.where == Where::kDevice;
  if (!given || on_device == device) return;
  refuse(std::string(name) + " lies " + (on_device ? "on a GPU" : "on the host") + "; query_start_loc lies " +
         (device ? "on a GPU" : "on the host") + ". A batch's arrays lie in one place");
}

void require_host(const char* name, bool on_device) {
  if (on_device) refuse(std::string(name) + " lies on a GPU; it is read on the host");
}

void place(CommonBatch& batch) {
  batch.view.where = batch.query_start_loc.on_device() ? Where::kDevice : Where::kHost;
  require_together(batch, "seq_lens", batch.seq_lens.on_device(), true);
  require_together(batch, "slot_mapping", batch.slot_mapping.on_device(), !batch.slot_mapping.view().empty());
  require_together(batch, "encoder_seq_lens", batch.encoder_seq_lens.on_device(),
                   !batch.encoder_seq_lens.view().empty());
  if (batch.block_table) require_together(batch, "block_table", !batch.block_table->place.host, true);
  require_host("query_start_loc_host", batch.query_start_loc_host.on_device());
  require_host("seq_lens_host", batch.seq_lens_host.on_device());
  require_host("encoder_seq_lens_host", batch.encoder_seq_lens_host.on_device());
  require_host("seq_lens_host_upper_bound", batch.upper_bound.on_device());
  require_host("is_prefilling", batch.is_prefilling.on_device());
  require_host("dcp_local_seq_lens", batch.dcp_local_seq_lens.on_device());
  if (batch.block_table_host) require_host("block_table_host", !batch.block_table_host->place.host);
  keep(batch, batch.query_start_loc);
  keep(batch, batch.seq_lens);
  keep(batch, batch.slot_mapping);
  keep(batch, batch.positions);
  keep(batch, batch.encoder_seq_lens);
  keep(batch, batch.logits_indices);
  keep(batch, batch.causal_per_request);
  if (batch.block_table && batch.view.where == Where::kDevice) batch.device_arrays.push_back(*batch.block_table);
}

/// Rows that a batch's arrays must have, so that nothing is read behind them.
void require_sizes(const CommonBatch& batch) {
  const auto requests = static_cast<size_t>(batch.view.num_reqs);
  const auto require = [](const char* name, size_t entries, size_t needed) {
    if (entries < needed) {
      refuse(std::string(name) + " has " + std::to_string(entries) + " entries; num_reqs needs " +
             std::to_string(needed));
    }
  };
  require("query_start_loc", batch.query_start_loc.view().size(), requests + 1);
  require("seq_lens", batch.seq_lens.view().size(), requests);
  if (!batch.query_start_loc_host.view().empty()) {
    require("query_start_loc_host", batch.query_start_loc_host.view().size(), requests + 1);
  }
  if (!batch.seq_lens_host.view().empty()) require("seq_lens_host", batch.seq_lens_host.view().size(), requests);
  if (!batch.encoder_seq_lens.view().empty()) {
    require("encoder_seq_lens", batch.encoder_seq_lens.view().size(), requests);
  }
}

std::vector<bk::BidirectionalRange> to_ranges(nb::handle source) {
  std::vector<bk::BidirectionalRange> ranges;
  if (source.is_none()) return ranges;
  for (const nb::handle item : nb::iter(source)) {
    std::vector<int32_t> range;
    if (!nb::try_cast(item, range, true) || range.size() != 3) {
      refuse_kind("mm_req_doc_ranges", "(request, begin, end) each", item);
    }
    ranges.push_back({range[0], range[1], range[2]});
  }
  return ranges;
}

/// A batch whose lengths the host knows, for the functions that divide it.
bk::CommonAttentionMetadata host_view(const CommonBatch& batch) {
  bk::CommonAttentionMetadata view = batch.with_spans();
  if (view.where == Where::kHost) return view;
  if (view.query_start_loc_host.empty() || view.seq_lens_host.empty()) {
    refuse("the batch lies on a GPU; query_start_loc_host and seq_lens_host are needed");
  }
  view.where = Where::kHost;
  view.query_start_loc = view.query_start_loc_host;
  view.seq_lens = view.seq_lens_host;
  return view;
}

void bind_common_metadata(nb::module_& m) {
  nb::class_<CommonBatch>(
      m, "CommonAttentionMetadata",
      "One step's batch as an engine's runner describes it; builders make their metadata of it. Request i has the "
      "query tokens query_start_loc[i] to query_start_loc[i + 1] and, these included, seq_lens[i] tokens of KV.\n\n"
      "query_start_loc [R + 1], seq_lens [R]: int32 or int64 arrays or lists. block_table: int32 page ids [R, pages]. "
      "slot_mapping: int64 [tokens], where each new token's keys go; negative is nowhere. num_reqs, num_actual_tokens, "
      "max_query_len and max_seq_len are taken from the lengths where they are left out. Arrays on the host are read "
      "when this object is made (the block table when it is built); those on a GPU are borrowed, and "
      "query_start_loc_host and seq_lens_host must then say the same, for planning. query_start_loc_cpu, seq_lens_cpu "
      "and block_table_tensor are vLLM's names for query_start_loc_host, seq_lens_host and block_table. Raises "
      "InvalidArgument for arrays of other shapes and types.")
      .def(
          "__init__",
          [](CommonBatch* self, nb::object query_start_loc, nb::object seq_lens, nb::object block_table,
             nb::object slot_mapping, std::optional<int32_t> num_reqs, std::optional<int32_t> num_actual_tokens,
             std::optional<int32_t> max_query_len, std::optional<int32_t> max_seq_len, bool causal,
             nb::object query_start_loc_host, nb::object seq_lens_host, nb::object block_table_host,
             nb::object seq_lens_host_upper_bound, nb::object encoder_seq_lens, nb::object encoder_seq_lens_host,
             nb::object causal_per_request, nb::object logits_indices_padded, int32_t num_logits_indices,
             nb::object positions, nb::object is_prefilling, nb::object mm_req_doc_ranges,
             nb::object dcp_local_seq_lens, nb::object query_start_loc_cpu, nb::object seq_lens_cpu,
             nb::object block_table_tensor) {
            new (self) CommonBatch(make_common_batch(
                {std::move(query_start_loc),
                 std::move(seq_lens),
                 either(block_table, block_table_tensor, "block_table", "block_table_tensor"),
                 std::move(slot_mapping),
                 num_reqs,
                 num_actual_tokens,
                 max_query_len,
                 max_seq_len,
                 causal,
                 either(query_start_loc_host, query_start_loc_cpu, "query_start_loc_host", "query_start_loc_cpu"),
                 either(seq_lens_host, seq_lens_cpu, "seq_lens_host", "seq_lens_cpu"),
                 std::move(block_table_host),
                 std::move(seq_lens_host_upper_bound),
                 std::move(encoder_seq_lens),
                 std::move(encoder_seq_lens_host),
                 std::move(causal_per_request),
                 std::move(logits_indices_padded),
                 num_logits_indices,
                 std::move(positions),
                 std::move(is_prefilling),
                 std::move(mm_req_doc_ranges),
                 std::move(dcp_local_seq_lens)}));
          },
          nb::kw_only(), nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("block_table") = nb::none(),
          nb::arg("slot_mapping") = nb::none(), nb::arg("num_reqs") = nb::none(),
          nb::arg("num_actual_tokens") = nb::none(), nb::arg("max_query_len") = nb::none(),
          nb::arg("max_seq_len") = nb::none(), nb::arg("causal") = true, nb::arg("query_start_loc_host") = nb::none(),
          nb::arg("seq_lens_host") = nb::none(), nb::arg("block_table_host") = nb::none(),
          nb::arg("seq_lens_host_upper_bound") = nb::none(), nb::arg("encoder_seq_lens") = nb::none(),
          nb::arg("encoder_seq_lens_host") = nb::none(), nb::arg("causal_per_request") = nb::none(),
          nb::arg("logits_indices_padded") = nb::none(), nb::arg("num_logits_indices") = 0,
          nb::arg("positions") = nb::none(), nb::arg("is_prefilling") = nb::none(),
          nb::arg("mm_req_doc_ranges") = nb::none(), nb::arg("dcp_local_seq_lens") = nb::none(),
          nb::arg("query_start_loc_cpu") = nb::none(), nb::arg("seq_lens_cpu") = nb::none(),
          nb::arg("block_table_tensor") = nb::none())
      .def_prop_ro("num_reqs", [](const CommonBatch& self) { return self.view.num_reqs; })
      .def_prop_ro("num_actual_tokens", [](const CommonBatch& self) { return self.view.num_actual_tokens; })
      .def_prop_ro("max_query_len", [](const CommonBatch& self) { return self.view.max_query_len; })
      .def_prop_ro("max_seq_len", [](const CommonBatch& self) { return self.view.max_seq_len; })
      .def_prop_ro("causal", [](const CommonBatch& self) { return self.view.causal; })
      .def_prop_ro("where", [](const CommonBatch& self) { return self.view.where; })
      .def_prop_ro("query_start_loc", [](const CommonBatch& self) { return self.query_start_loc_object; })
      .def_prop_ro("seq_lens", [](const CommonBatch& self) { return self.seq_lens_object; })
      .def_prop_ro("block_table", [](const CommonBatch& self) { return self.block_table_object; })
      .def_prop_ro(
          "block_table_tensor", [](const CommonBatch& self) { return self.block_table_object; },
          "vLLM's name for block_table.")
      .def_prop_ro("slot_mapping", [](const CommonBatch& self) { return self.slot_mapping_object; })
      .def(
          "batch_size", [](const CommonBatch& self) { return self.view.num_reqs; },
          "Requests of the batch, padding included.")
      .def("__repr__", [](const CommonBatch& self) {
        return "<folio.backends.CommonAttentionMetadata: " + std::to_string(self.view.num_reqs) + " requests, " +
               std::to_string(self.view.num_actual_tokens) + " tokens, on the " +
               (self.view.where == Where::kHost ? "host" : "device") + ">";
      });
}

void bind_layer_scales(nb::module_& m) {
  nb::class_<LayerScales>(
      m, "AttentionLayerScales",
      "A layer's quantisation scales, numbers or folio.Scale: real value = stored value * scale. `q` "
      "matters where queries are fp8, `k` and `v` where the cache is.")
      .def(
          "__init__",
          [](LayerScales* self, nb::object q, nb::object k, nb::object v) {
            new (self) LayerScales{to_scale(q, "q"), to_scale(k, "k"), to_scale(v, "v"), {}};
          },
          nb::kw_only(), nb::arg("q") = 1.0f, nb::arg("k") = 1.0f, nb::arg("v") = 1.0f)
      .def("__repr__", [](const LayerScales& self) {
        const auto text = [](const ScaleArg& scale) {
          return scale.array ? "<" + shape_text(*scale.array) + ">"
                             : nb::cast<std::string>(nb::repr(nb::cast(scale.scale.value)));
        };
        return "AttentionLayerScales(q=" + text(self.q) + ", k=" + text(self.k) + ", v=" + text(self.v) + ")";
      });
}

void bind_order(nb::module_& m) {
  m.def(
      "split_decodes_and_prefills",
      [](const CommonBatch& batch, int32_t decode_threshold, bool require_uniform) {
        const bk::BatchSplit split =
            bk::split_decodes_and_prefills(host_view(batch), decode_threshold, require_uniform);
        return nb::make_tuple(split.num_decodes, split.num_prefills, split.num_decode_tokens, split.num_prefill_tokens);
      },
      nb::arg("common_attn_metadata"), nb::arg("decode_threshold") = 1, nb::arg("require_uniform") = false,
      nb::sig(
          "def split_decodes_and_prefills(common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1, "
          "require_uniform: bool = False) -> tuple[int, int, int, int]"),
      "(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens) of a batch with its decodes in front.");
  m.def(
      "split_decodes_prefills_and_extends",
      [](const CommonBatch& batch, int32_t decode_threshold) {
        const bk::ExtendSplit split = bk::split_decodes_prefills_and_extends(host_view(batch), decode_threshold);
        return nb::make_tuple(split.num_decodes, split.num_extends, split.num_prefills, split.num_decode_tokens,
                              split.num_extend_tokens, split.num_prefill_tokens);
      },
      nb::arg("common_attn_metadata"), nb::arg("decode_threshold") = 1,
      nb::sig("def split_decodes_prefills_and_extends(common_attn_metadata: CommonAttentionMetadata, decode_threshold: "
              "int = 1) -> tuple[int, int, int, int, int, int]"),
      "(num_decodes, num_extends, num_prefills, and the tokens of each) of a batch in the order decodes, extends, "
      "prefills.");
  m.def(
      "reorder_batch_to_split_decodes_and_prefills",
      [](nb::object num_scheduled_tokens, nb::object num_computed_tokens, const nb::object& swap_states,
         int32_t decode_threshold) {
        const Numbers<int32_t> scheduled = int32_numbers(num_scheduled_tokens, "num_scheduled_tokens");
        const Numbers<int32_t> computed = int32_numbers(num_computed_tokens, "num_computed_tokens");
        require_host("num_scheduled_tokens", scheduled.on_device());
        require_host("num_computed_tokens", computed.on_device());
        return bk::reorder_batch_to_split_decodes_and_prefills(scheduled.view(), computed.view(), decode_threshold,
                                                               to_swap(swap_states));
      },
      nb::arg("num_scheduled_tokens"), nb::arg("num_computed_tokens"), nb::arg("swap_states"),
      nb::arg("decode_threshold") = 1,
      "Brings a batch into the order decodes, extends, prefills by as few calls of swap_states(i, j) as needed. Both "
      "arrays are [R] and describe the batch before the call. True if anything was swapped.");
  m.def(
      "use_cascade_attention",
      [](int32_t common_prefix_len, nb::object query_lens, int32_t num_query_heads, int32_t num_kv_heads,
         bool use_alibi, bool use_sliding_window, bool use_local_attention, int32_t num_sms, int32_t dcp_world_size) {
        const Numbers<int32_t> lens = int32_numbers(query_lens, "query_lens");
        require_host("query_lens", lens.on_device());
        return bk::use_cascade_attention({common_prefix_len, lens.view(), num_query_heads, num_kv_heads, use_alibi,
                                          use_sliding_window, use_local_attention, num_sms, dcp_world_size});
      },
      nb::arg("common_prefix_len"), nb::arg("query_lens"), nb::arg("num_query_heads"), nb::arg("num_kv_heads"),
      nb::arg("use_alibi"), nb::arg("use_sliding_window"), nb::arg("use_local_attention"), nb::arg("num_sms"),
      nb::arg("dcp_world_size") = 1, "vLLM's rule for when reading a shared prefix once pays.");
}

void bind_padding(nb::module_& m) {
  m.def("default_max_capture_size", &bk::default_max_capture_size, nb::arg("max_num_seqs"),
        nb::arg("tokens_per_decode") = 1, nb::arg("limit") = 512, "The largest batch that vLLM captures by default.");
  m.def("default_capture_sizes", &bk::default_capture_sizes, nb::arg("max_capture_size"),
        "The batch sizes that vLLM captures by default, ascending.");
  nb::class_<bk::GraphPadding>(m, "GraphPadding", "Which captured size a batch is padded to.")
      .def(
          "__init__",
          [](bk::GraphPadding* self, nb::object capture_sizes) {
            const Numbers<int32_t> sizes = int32_numbers(capture_sizes, "capture_sizes");
            require_host("capture_sizes", sizes.on_device());
            new (self) bk::GraphPadding(sizes.view());
          },
          nb::arg("capture_sizes"))
      .def("pad_for_cudagraph", &bk::GraphPadding::pad_for_cudagraph, nb::arg("num_tokens"),
           "The smallest captured size that holds num_tokens; 0 for 0.")
      .def_prop_ro("max_capture_size", &bk::GraphPadding::max_capture_size);
}

}  // namespace

CommonBatch make_common_batch(const BatchArguments& given) {
  CommonBatch batch;
  batch.query_start_loc = int32_numbers(given.query_start_loc, "query_start_loc");
  batch.seq_lens = int32_numbers(given.seq_lens, "seq_lens");
  batch.slot_mapping = int64_numbers(given.slot_mapping, "slot_mapping");
  batch.query_start_loc_host = int32_numbers(given.query_start_loc_host, "query_start_loc_host");
  batch.seq_lens_host = int32_numbers(given.seq_lens_host, "seq_lens_host");
  batch.upper_bound = int32_numbers(given.seq_lens_host_upper_bound, "seq_lens_host_upper_bound");
  batch.encoder_seq_lens = int32_numbers(given.encoder_seq_lens, "encoder_seq_lens");
  batch.encoder_seq_lens_host = int32_numbers(given.encoder_seq_lens_host, "encoder_seq_lens_host");
  batch.logits_indices = int32_numbers(given.logits_indices_padded, "logits_indices_padded");
  batch.positions = int64_numbers(given.positions, "positions");
  batch.causal_per_request = flag_numbers(given.causal_per_request, "causal_per_request");
  batch.is_prefilling = flag_numbers(given.is_prefilling, "is_prefilling");
  batch.dcp_local_seq_lens = int32_numbers(given.dcp_local_seq_lens, "dcp_local_seq_lens");
  batch.ranges = to_ranges(given.mm_req_doc_ranges);
  if (!given.block_table.is_none()) batch.block_table = borrow_block_table(given.block_table, "block_table");
  if (!given.block_table_host.is_none()) {
    batch.block_table_host = borrow_block_table(given.block_table_host, "block_table_host");
  }
  place(batch);
  const std::span<const int32_t> starts =
      batch.view.where == Where::kHost ? batch.query_start_loc.view() : batch.query_start_loc_host.view();
  const std::span<const int32_t> lens =
      batch.view.where == Where::kHost ? batch.seq_lens.view() : batch.seq_lens_host.view();
  if (batch.query_start_loc.view().empty()) {
    refuse("query_start_loc is empty; it has one entry more than there are requests");
  }
  const auto requests = static_cast<int64_t>(batch.query_start_loc.view().size()) - 1;
  batch.view.num_reqs = given.num_reqs.value_or(static_cast<int32_t>(requests));
  if (batch.view.num_reqs < 0) refuse("num_reqs is " + std::to_string(batch.view.num_reqs));
  require_sizes(batch);
  const auto num_reqs = static_cast<size_t>(batch.view.num_reqs);
  const bool known = starts.size() > num_reqs;
  batch.view.num_actual_tokens =
      value_or(given.num_actual_tokens, known, known ? starts[num_reqs] : 0, "num_actual_tokens");
  batch.view.max_query_len =
      value_or(given.max_query_len, known, known ? longest_query(starts.first(num_reqs + 1)) : 0, "max_query_len");
  int32_t longest = 0;
  for (const int32_t len : lens) longest = std::max(longest, len);
  for (const int32_t len : batch.encoder_seq_lens_host.view()) longest = std::max(longest, len);
  if (batch.view.where == Where::kHost) {
    for (const int32_t len : batch.encoder_seq_lens.view()) longest = std::max(longest, len);
  }
  batch.view.max_seq_len = value_or(given.max_seq_len, lens.size() >= num_reqs, longest, "max_seq_len");
  batch.view.causal = given.causal;
  batch.view.num_logits_indices = given.num_logits_indices;
  batch.query_start_loc_object = given.query_start_loc;
  batch.seq_lens_object = given.seq_lens;
  batch.block_table_object = given.block_table;
  batch.slot_mapping_object = given.slot_mapping;
  return batch;
}

bk::SwapStates to_swap(nb::handle swap_states) {
  if (!nb::isinstance<nb::callable>(swap_states)) refuse_kind("swap_states", "a function of (i, j)", swap_states);
  return [swap_states](int32_t a, int32_t b) {
    const nb::gil_scoped_acquire gil;
    swap_states(a, b);
  };
}

const CommonBatch* to_common_batch(nb::handle source) {
  const CommonBatch* batch = nullptr;
  if (!nb::try_cast(source, batch, false) || batch == nullptr) {
    refuse_kind("common_attn_metadata", "a folio.backends.CommonAttentionMetadata", source);
  }
  return batch;
}

bk::CommonAttentionMetadata CommonBatch::with_spans() const {
  bk::CommonAttentionMetadata whole = view;
  whole.query_start_loc = query_start_loc.view();
  whole.seq_lens = seq_lens.view();
  whole.slot_mapping = slot_mapping.view();
  whole.query_start_loc_host = query_start_loc_host.view();
  whole.seq_lens_host = seq_lens_host.view();
  whole.seq_lens_host_upper_bound = upper_bound.view();
  whole.encoder_seq_lens = encoder_seq_lens.view();
  whole.encoder_seq_lens_host = encoder_seq_lens_host.view();
  whole.logits_indices_padded = logits_indices.view();
  whole.positions = positions.view();
  whole.causal_per_request = causal_per_request.view();
  whole.is_prefilling = is_prefilling.view();
  whole.dcp_local_seq_lens = dcp_local_seq_lens.view();
  whole.mm_req_doc_ranges = ranges;
  whole.block_table = table_view(block_table);
  whole.block_table_host = table_view(block_table_host);
  return whole;
}

void bind_backends_batch(nb::module_& m) {
  bind_common_metadata(m);
  bind_layer_scales(m);
  bind_order(m);
  bind_padding(m);
}

}  // namespace folio::python
