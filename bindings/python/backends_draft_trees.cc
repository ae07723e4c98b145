#include <string>
#include <utility>

#include "backends.hpp"
#include "backends_names.hpp"
#include "device_call.hpp"
#include "fields.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/backends/token_pool/draft_kv_indices.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"
#include "gil.hpp"
#include "integers.hpp"

/// Lists of slots, and trees of draft tokens: host arrays in, new host arrays out; or arrays of a device.
namespace folio::python {
namespace draft_trees {
namespace {

void require_on_host(std::initializer_list<std::pair<const char*, bool>> on_device) {
  for (const auto& [name, there] : on_device) {
    if (there) refuse(std::string(name) + " lies on a GPU; it is read on the host");
  }
}

/// Numbers of any rank, row-major, from an array [..] or nested lists that numpy understands.
template <typename Element>
std::vector<Element> flat(nb::handle source, const char* name, const char* dtype) {
  const nb::object numpy = nb::module_::import_("numpy");
  const nb::object host = numpy.attr("ascontiguousarray")(source, nb::arg("dtype") = dtype).attr("ravel")();
  const Array array = borrow(host, name);
  const auto* const first = static_cast<const Element*>(array.data);
  return {first, first + array.size(0)};
}

/// What functions on a device's arrays say of themselves.
constexpr const char* kOnDevice =
    "The same on the device of `faults`, into contiguous arrays of the caller's there; captured graphs may hold it. "
    "What only the device knows is told `faults`.";

/// The request table as an int32 array [rows, positions].
PageTableView to_table(const Array& array) {
  if (array.element != nb::dtype<int32_t>() || array.rank() != 2 || (array.size(1) > 1 && array.stride(1) != 1)) {
    refuse("req_to_token is " + element_text(array.element) + " " + shape_text(array) +
           "; it must be int32 [rows, positions], each row contiguous");
  }
  PageTableView view;
  view.kind = PageTableKind::kDense;
  view.indices = static_cast<const int32_t*>(array.data);
  view.num_rows = static_cast<int32_t>(array.size(0));
  view.row_stride = array.size(0) > 1 ? array.stride(0) : array.size(1);
  const bool empty = array.size(0) == 0 || array.size(1) == 0;
  view.num_indices = empty ? 0 : (array.size(0) - 1) * view.row_stride + array.size(1);
  return view;
}

void create_kv_indices(nb::handle req_to_token, nb::handle req_pool_indices, nb::handle page_kernel_lens,
                       nb::handle kv_indptr, nb::handle kv_start_idx, nb::handle kv_indices, int32_t page_size,
                       int64_t num_slots, bk::DeviceFaults* faults, nb::handle stream) {
  const Array table = borrow(req_to_token, "req_to_token");
  const Numbers<int32_t> rows = int32_numbers(req_pool_indices, "req_pool_indices");
  const Numbers<int32_t> lens = int32_numbers(page_kernel_lens, "page_kernel_lens");
  const Numbers<int32_t> indptr = int32_numbers(kv_indptr, "kv_indptr");
  const Numbers<int32_t> starts = int32_numbers(kv_start_idx, "kv_start_idx");
  const Array out = borrow(kv_indices, "kv_indices", Access::kWrite);
  if (out.element != nb::dtype<int32_t>() || out.rank() != 1 || (out.size(0) > 1 && out.stride(0) != 1)) {
    refuse("kv_indices is " + element_text(out.element) + " " + shape_text(out) +
           "; it must be a contiguous vector of int32");
  }
  bk::KvIndicesArgs args;
  args.req_to_token = to_table(table);
  args.req_pool_indices = rows.view();
  args.paged_kernel_lens = lens.view();
  args.kv_indptr = indptr.view();
  args.kv_start_idx = starts.view();
  args.page_size = page_size;
  args.num_slots = num_slots;
  const std::span<int32_t> target(static_cast<int32_t*>(out.data), static_cast<size_t>(out.size(0)));
  const bool on_device = !table.place.host;
  for (const auto& [name, there] : {std::pair("req_pool_indices", rows.on_device()),
                                    {"page_kernel_lens", lens.on_device()},
                                    {"kv_indptr", indptr.on_device()},
                                    {"kv_indices", !out.place.host}}) {
    if (there != on_device) refuse(std::string(name) + " and req_to_token lie in different places");
  }
  if (!starts.view().empty() && starts.on_device() != on_device) {
    refuse("kv_start_idx and req_to_token lie in different places");
  }
  if (on_device && faults == nullptr) refuse("faults is None; it is needed where the arrays lie on a GPU");
  if (faults == nullptr) {
    const ReleasedGil released;
    bk::create_kv_indices(args, target);
    return;
  }
  const std::vector<Array> arrays = {table, out};
  const Device device{on_device ? DeviceType::kCuda : DeviceType::kCpu, table.place.cuda_index};
  const Stream queue = to_stream(stream, device, {&arrays});
  const ReleasedGil released;
  bk::create_kv_indices(args, target, *faults, queue);
}

void bind_lists(nb::module_& m) {
  nb::class_<bk::DeviceFaults>(
      m, "DeviceFaults",
      "What kernels have found wrong with the token pool's arrays on a GPU; for any number of calls. "
      "Functions that take it are enqueued and may be captured into a graph.")
      .def(
          "__init__",
          [](bk::DeviceFaults* self, const std::optional<Context>& context) {
            new (self) bk::DeviceFaults(context_or_default(context));
          },
          nb::arg("context") = nb::none())
      .def("check", &bk::DeviceFaults::check,
           "Raises InvalidArgument naming the request if a kernel has found a fault, once. Waits for nothing.");
  m.def("create_kv_indices", &create_kv_indices, nb::arg("req_to_token"), nb::arg("req_pool_indices"),
        nb::arg("page_kernel_lens"), nb::arg("kv_indptr"), nb::arg("kv_start_idx").none(), nb::arg("kv_indices"),
        nb::arg("page_size") = 1, nb::arg("num_slots") = 0, nb::arg("faults").none() = nb::none(),
        nb::arg("stream") = nb::none(),
        "Fills kv_indices[kv_indptr[i]:kv_indptr[i + 1]] with the slots (page_size above 1: pages) of request i: row "
        "req_pool_indices[i] of req_to_token, positions kv_start_idx[i] on. num_slots above 0: every slot is held "
        "against it. All arrays int32 in one place; on a GPU `faults` is told what only the device knows. Raises "
        "InvalidArgument naming the request; nothing is then written.");
  m.def(
      "kv_indptr_from_lens",
      [](nb::object lens, int32_t page_size) {
        const Numbers<int32_t> given = int32_numbers(lens, "lens");
        require_on_host({{"lens", given.on_device()}});
        std::vector<int32_t> indptr(given.view().size() + 1);
        bk::kv_indptr_from_lens(given.view(), page_size, indptr);
        return to_numpy(std::move(indptr));
      },
      nb::arg("lens"), nb::arg("page_size") = 1, "Offsets [B + 1] of lists of ceil(lens / page_size) entries.");
  m.def(
      "window_kv_ranges",
      [](nb::object seq_lens, nb::object prefix_lens, int32_t window_left, int32_t page_size) {
        const Numbers<int32_t> given = int32_numbers(seq_lens, "seq_lens");
        const Numbers<int32_t> prefixes = int32_numbers(prefix_lens, "prefix_lens");
        require_on_host({{"seq_lens", given.on_device()}, {"prefix_lens", prefixes.on_device()}});
        std::vector<int32_t> lens(given.view().size()), starts(given.view().size());
        bk::window_kv_ranges(given.view(), prefixes.view(), window_left, page_size, lens, starts);
        return std::pair(to_numpy(std::move(lens)), to_numpy(std::move(starts)));
      },
      nb::arg("seq_lens"), nb::arg("prefix_lens").none(), nb::arg("window_left"), nb::arg("page_size") = 1,
      "(lens, starts): the keys that queries at prefix_lens (None: the last) to seq_lens see through a window.");
  m.def(
      "window_prefix_ranges",
      [](nb::object prefix_lens, int32_t window_left, int32_t page_size) {
        const Numbers<int32_t> prefixes = int32_numbers(prefix_lens, "prefix_lens");
        require_on_host({{"prefix_lens", prefixes.on_device()}});
        std::vector<int32_t> lens(prefixes.view().size()), starts(prefixes.view().size());
        bk::window_prefix_ranges(prefixes.view(), window_left, page_size, lens, starts);
        return std::pair(to_numpy(std::move(lens)), to_numpy(std::move(starts)));
      },
      nb::arg("prefix_lens"), nb::arg("window_left"), nb::arg("page_size") = 1,
      "(lens, starts): the part of the cached prefix that the first new token sees through a window.");
}

void bind_branches(nb::module_& m) {
  using Branches = bk::DraftBranches;
  fields_of<Branches>("DraftBranches", "How a request's row goes on behind its tokens: the slots of draft branches.",
                      field("topk", &Branches::topk, "Branches a request."),
                      field("num_steps", &Branches::num_steps, "Draft tokens of a branch that the row has room for."),
                      field("page_size", &Branches::page_size, "Tokens of a page of the allocator."))
      .bind(m);
  m.def("draft_kv_indices_len", &bk::draft_kv_indices_len, nb::arg("sum_lens"), nb::arg("batch_size"),
        nb::arg("branches"), nb::arg("step"), "Entries of all branches at a step.");
  m.def("draft_kv_indices_capacity", &bk::draft_kv_indices_capacity, nb::arg("max_batch_size"), nb::arg("branches"),
        nb::arg("max_context_len"), "Entries that a step's list needs for any batch.");
  m.def("draft_row_columns", &bk::draft_row_columns, nb::arg("len"), nb::arg("branches"),
        "Positions that the row of a request with len tokens needs.");
  m.def(
      "generate_draft_decode_kv_indices",
      [](nb::object req_to_token, nb::object req_pool_indices, nb::object paged_kernel_lens, const Branches& branches,
         int32_t num_iterations, nb::object kv_start_idx, int64_t num_slots) {
        const Array table = borrow(req_to_token, "req_to_token");
        const Numbers<int32_t> rows = int32_numbers(req_pool_indices, "req_pool_indices");
        const Numbers<int32_t> lens = int32_numbers(paged_kernel_lens, "paged_kernel_lens");
        const Numbers<int32_t> starts = int32_numbers(kv_start_idx, "kv_start_idx");
        require_on_host({{"req_to_token", !table.place.host},
                         {"req_pool_indices", rows.on_device()},
                         {"paged_kernel_lens", lens.on_device()},
                         {"kv_start_idx", starts.on_device()}});
        if (num_iterations < 0) refuse("num_iterations is " + std::to_string(num_iterations));
        int64_t sum = 0;
        for (const int32_t len : lens.view()) sum += len;
        const auto batch = static_cast<int32_t>(rows.view().size());
        const auto steps = static_cast<size_t>(num_iterations);
        const auto entries = num_iterations == 0
                                 ? size_t{0}
                                 : static_cast<size_t>(bk::draft_kv_indices_len(sum, batch, branches, num_iterations));
        const size_t offsets = static_cast<size_t>(batch) * static_cast<size_t>(branches.topk) + 1;
        std::vector<int32_t> indptr(steps * offsets), indices(steps * entries);
        bk::generate_draft_decode_kv_indices(
            {to_table(table), rows.view(), lens.view(), starts.view(), branches, num_iterations, num_slots},
            {indptr, static_cast<int64_t>(offsets), indices, static_cast<int64_t>(entries)});
        return std::pair(to_numpy(std::move(indptr), {steps, offsets}), to_numpy(std::move(indices), {steps, entries}));
      },
      nb::arg("req_to_token"), nb::arg("req_pool_indices"), nb::arg("paged_kernel_lens"), nb::arg("branches"),
      nb::arg("num_iterations"), nb::arg("kv_start_idx") = nb::none(), nb::arg("num_slots") = 0,
      "(kv_indptr [steps, B * topk + 1], kv_indices [steps, entries]): for every step t and branch the slots of the "
      "request's tokens and of the branch's first t draft tokens. Raises InvalidArgument naming the request.");
}

void generate_on_device(nb::handle req_to_token, nb::handle req_pool_indices, nb::handle paged_kernel_lens,
                        const bk::DraftBranches& branches, int32_t num_iterations, nb::handle kv_start_idx,
                        int64_t num_slots, nb::handle kv_indptr, nb::handle kv_indices, bk::DeviceFaults& faults,
                        nb::handle stream) {
  DeviceCall call(faults.device());
  const Array table = borrow(req_to_token, "req_to_token");
  call.keep({table});
  bk::DraftKvIndicesArgs args{to_table(table),
                              call.int32s(req_pool_indices, "req_pool_indices"),
                              call.int32s(paged_kernel_lens, "paged_kernel_lens"),
                              {},
                              branches,
                              num_iterations,
                              num_slots};
  if (!kv_start_idx.is_none()) args.kv_start_idx = call.int32s(kv_start_idx, "kv_start_idx");
  bk::DraftKvIndices out;
  out.kv_indptr = call.int32s_out(kv_indptr, "kv_indptr", 2);
  out.kv_indptr_stride = call.arrays().back().size(1);
  out.kv_indices = call.int32s_out(kv_indices, "kv_indices", 2);
  out.kv_indices_stride = call.arrays().back().size(1);
  const Stream queue = call.stream(stream);
  const ReleasedGil released;
  bk::generate_draft_decode_kv_indices(args, out, faults, queue);
}

void bind_trees_on_device(nb::module_& m) {
  using Shape = bk::DraftTreeShape;
  using Faults = bk::DeviceFaults;
  m.def("generate_draft_decode_kv_indices", &generate_on_device, nb::arg("req_to_token"), nb::arg("req_pool_indices"),
        nb::arg("paged_kernel_lens"), nb::arg("branches"), nb::arg("num_iterations"),
        nb::arg("kv_start_idx") = nb::none(), nb::arg("num_slots") = 0, nb::kw_only(), nb::arg("kv_indptr"),
        nb::arg("kv_indices"), nb::arg("faults"), nb::arg("stream") = nb::none(), kOnDevice);
  m.def(
      "select_draft_tokens",
      [](nb::object scores, nb::object tokens, nb::object bonus_tokens, const Shape& shape, nb::object selected_index,
         nb::object draft_tokens, Faults& faults, nb::object stream) {
        DeviceCall call(faults.device());
        const auto given = call.packed<float>(scores, "scores");
        const auto candidates = call.packed<int64_t>(tokens, "tokens");
        const auto roots = call.packed<int64_t>(bonus_tokens, "bonus_tokens");
        const auto selected = call.packed_out<int64_t>(selected_index, "selected_index");
        const auto drafts = call.packed_out<int64_t>(draft_tokens, "draft_tokens");
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        bk::select_draft_tokens(given, candidates, roots, shape, selected, drafts, faults, queue);
      },
      nb::arg("scores"), nb::arg("tokens"), nb::arg("bonus_tokens"), nb::arg("shape"), nb::kw_only(),
      nb::arg("selected_index"), nb::arg("draft_tokens"), nb::arg("faults"), nb::arg("stream") = nb::none(), kOnDevice);
  m.def(
      "draft_tree_parents",
      [](nb::object parent_list, nb::object selected_index, const Shape& shape, nb::object parents, Faults& faults,
         nb::object stream) {
        DeviceCall call(faults.device());
        const auto list = call.packed<int64_t>(parent_list, "parent_list");
        const auto selected = call.packed<int64_t>(selected_index, "selected_index");
        const auto out = call.packed_out<int32_t>(parents, "parents");
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        bk::draft_tree_parents(list, selected, shape, out, faults, queue);
      },
      nb::arg("parent_list"), nb::arg("selected_index"), nb::arg("shape"), nb::kw_only(), nb::arg("parents"),
      nb::arg("faults"), nb::arg("stream") = nb::none(), kOnDevice);
  m.def(
      "draft_tree_positions",
      [](nb::object parents, nb::object seq_lens, nb::object positions, Faults& faults, nb::object stream) {
        DeviceCall call(faults.device());
        const auto given = call.packed<int32_t>(parents, "parents");
        const auto lens = call.packed<int32_t>(seq_lens, "seq_lens");
        const auto out = call.packed_out<int32_t>(positions, "positions");
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        bk::draft_tree_positions(given, lens, out, faults, queue);
      },
      nb::arg("parents"), nb::arg("seq_lens"), nb::kw_only(), nb::arg("positions"), nb::arg("faults"),
      nb::arg("stream") = nb::none(), kOnDevice);
  m.def(
      "draft_tree_links",
      [](nb::object parents, int32_t draft_token_num, nb::object retrieve_index, nb::object next_token,
         nb::object next_sibling, Faults& faults, nb::object stream) {
        DeviceCall call(faults.device());
        const auto given = call.packed<int32_t>(parents, "parents");
        const auto index = call.packed_out<int32_t>(retrieve_index, "retrieve_index");
        const auto child = call.packed_out<int32_t>(next_token, "next_token");
        const auto sibling = call.packed_out<int32_t>(next_sibling, "next_sibling");
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        bk::draft_tree_links(given, draft_token_num, index, child, sibling, faults, queue);
      },
      nb::arg("parents"), nb::arg("draft_token_num"), nb::kw_only(), nb::arg("retrieve_index"), nb::arg("next_token"),
      nb::arg("next_sibling"), nb::arg("faults"), nb::arg("stream") = nb::none(), kOnDevice);
  m.def(
      "fill_tree_mask",
      [](bk::TreeMaskForm form, nb::object parents, nb::object seq_lens, int32_t draft_token_num, int32_t window_left,
         nb::object mask, Faults& faults, nb::object stream) {
        DeviceCall call(faults.device());
        const auto given = call.packed<int32_t>(parents, "parents");
        const auto lens = call.packed<int32_t>(seq_lens, "seq_lens");
        const auto out = call.packed_out<uint8_t>(mask, "mask");
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        bk::fill_tree_mask(form, given, lens, draft_token_num, out, faults, window_left, queue);
      },
      nb::arg("form"), nb::arg("parents"), nb::arg("seq_lens"), nb::arg("draft_token_num"), nb::arg("window_left") = -1,
      nb::kw_only(), nb::arg("mask"), nb::arg("faults"), nb::arg("stream") = nb::none(), kOnDevice);
}

void bind_trees(nb::module_& m) {
  using Shape = bk::DraftTreeShape;
  fields_of<Shape>("DraftTreeShape", "The shape of a draft.",
                   field("topk", &Shape::topk, "Candidates that extend a candidate."),
                   field("spec_steps", &Shape::spec_steps, "Steps of the draft."),
                   field("draft_token_num", &Shape::draft_token_num, "Nodes of a tree, the root included."))
      .bind(m);
  m.def("draft_candidates", &bk::draft_candidates, nb::arg("shape"), "topk + (spec_steps - 1) * topk ** 2.");
  m.def("draft_parent_list_len", &bk::draft_parent_list_len, nb::arg("shape"), "Entries of a request's parent_list.");
  m.def(
      "select_draft_tokens",
      [](nb::object scores, nb::object tokens, nb::object bonus_tokens, const Shape& shape) {
        const auto given = flat<float>(scores, "scores", "float32");
        const auto candidates = flat<int64_t>(tokens, "tokens", "int64");
        const auto roots = flat<int64_t>(bonus_tokens, "bonus_tokens", "int64");
        if (shape.draft_token_num < 1) refuse("draft_token_num is " + std::to_string(shape.draft_token_num));
        const auto nodes = static_cast<size_t>(shape.draft_token_num);
        std::vector<int64_t> selected(roots.size() * (nodes - 1)), drafts(roots.size() * nodes);
        bk::select_draft_tokens(given, candidates, roots, shape, selected, drafts);
        return std::pair(to_numpy(std::move(selected), {roots.size(), nodes - 1}),
                         to_numpy(std::move(drafts), {roots.size(), nodes}));
      },
      nb::arg("scores"), nb::arg("tokens"), nb::arg("bonus_tokens"), nb::arg("shape"),
      "(selected_index [B, n - 1], draft_tokens [B, n]): the candidates with the highest scores of every request. "
      "scores and tokens are [B, draft_candidates], bonus_tokens [B] are the roots.");
  m.def(
      "draft_tree_parents",
      [](nb::object parent_list, nb::object selected_index, const Shape& shape) {
        const auto list = flat<int64_t>(parent_list, "parent_list", "int64");
        const auto selected = flat<int64_t>(selected_index, "selected_index", "int64");
        if (shape.draft_token_num < 2) refuse("draft_token_num is " + std::to_string(shape.draft_token_num));
        const auto nodes = static_cast<size_t>(shape.draft_token_num);
        const size_t requests = selected.size() / (nodes - 1);
        std::vector<int32_t> parents(requests * nodes);
        bk::draft_tree_parents(list, selected, shape, parents);
        return to_numpy(std::move(parents), {requests, nodes});
      },
      nb::arg("parent_list"), nb::arg("selected_index"), nb::arg("shape"),
      "parents [B, n] of the selected candidates, -1 for the root. A candidate whose parent is not selected is "
      "refused.");
  m.def(
      "draft_tree_positions",
      [](nb::object parents, nb::object seq_lens) {
        const auto given = flat<int32_t>(parents, "parents", "int32");
        const auto lens = flat<int32_t>(seq_lens, "seq_lens", "int32");
        std::vector<int32_t> positions(given.size());
        bk::draft_tree_positions(given, lens, positions);
        const size_t requests = lens.size();
        return to_numpy(std::move(positions), {requests, requests == 0 ? 0 : given.size() / requests});
      },
      nb::arg("parents"), nb::arg("seq_lens"), "Positions [B, n]: seq_lens + depth.");
  m.def(
      "draft_tree_links",
      [](nb::object parents, int32_t draft_token_num) {
        const auto given = flat<int32_t>(parents, "parents", "int32");
        if (draft_token_num < 1) refuse("draft_token_num is " + std::to_string(draft_token_num));
        std::vector<int32_t> index(given.size()), child(given.size()), sibling(given.size());
        bk::draft_tree_links(given, draft_token_num, index, child, sibling);
        const auto nodes = static_cast<size_t>(draft_token_num);
        const size_t requests = given.size() / nodes;
        return nb::make_tuple(to_numpy(std::move(index), {requests, nodes}),
                              to_numpy(std::move(child), {requests, nodes}),
                              to_numpy(std::move(sibling), {requests, nodes}));
      },
      nb::arg("parents"), nb::arg("draft_token_num"),
      nb::sig("def draft_tree_links(parents: object, draft_token_num: int) -> tuple[numpy.ndarray, numpy.ndarray, "
              "numpy.ndarray]"),
      "(retrieve_index, next_token, next_sibling), each int32 [B, n], as SGLang's verification walks a tree.");
  m.def(
      "fill_tree_mask",
      [](bk::TreeMaskForm form, nb::object parents, nb::object seq_lens, int32_t draft_token_num, int32_t window_left) {
        const auto given = flat<int32_t>(parents, "parents", "int32");
        const auto lens = flat<int32_t>(seq_lens, "seq_lens", "int32");
        std::vector<uint8_t> mask(static_cast<size_t>(bk::tree_mask_bytes(form, lens, draft_token_num)));
        bk::fill_tree_mask(form, given, lens, draft_token_num, mask, window_left);
        return to_numpy(std::move(mask));
      },
      nb::arg("form"), nb::arg("parents"), nb::arg("seq_lens"), nb::arg("draft_token_num"), nb::arg("window_left") = -1,
      "The mask of a batch of trees: uint8 [tree_mask_bytes].");
}

}  // namespace
}  // namespace draft_trees

void bind_draft_trees(nb::module_& m) {
  bind_enum<bk::TreeMaskForm>(m);
  draft_trees::bind_lists(m);
  draft_trees::bind_branches(m);
  draft_trees::bind_trees(m);
  draft_trees::bind_trees_on_device(m);
}

}  // namespace folio::python
