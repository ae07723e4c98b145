#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "device_call.hpp"
#include "folio/page_table.hpp"
#include "folio/table_ops.hpp"
#include "gil.hpp"

/// Lists that are made of lengths and page tables. Each comes twice: on the host with numpy arrays as results, and on a
/// context's device into arrays of the caller's.
namespace folio::python {
namespace {

/// For what table_ops.hpp alone offers, on the host.
const Context& host() {
  static const Context context = [] {
    ContextOptions one_thread;
    one_thread.num_threads = 1;
    return Context::cpu(one_thread);
  }();
  return context;
}

nb::tuple make_paged_indptr(nb::handle seq_lens, int32_t page_size) {
  const std::vector<int32_t> lens = to_int32s(seq_lens, "seq_lens");
  std::vector<int32_t> indptr(lens.size() + 1), last_page_len(lens.size());
  paged_indptr(lens, page_size, indptr, last_page_len);
  return nb::make_tuple(to_numpy(std::move(indptr)), to_numpy(std::move(last_page_len)));
}

Int32s make_seq_lens(nb::handle indptr, nb::handle last_page_len, int32_t page_size) {
  const std::vector<int32_t> offsets = to_int32s(indptr, "indptr");
  const std::vector<int32_t> last = to_int32s(last_page_len, "last_page_len");
  std::vector<int32_t> lens(last.size());
  seq_lens_from_paged(offsets, last, page_size, lens);
  return to_numpy(std::move(lens));
}

/// A host table in the CSR form, its page ids copied.
PagedMetadata csr_of(const Table& table, const std::vector<int32_t>& lens, int32_t page_size) {
  DeviceCall call(host());
  const PageTableView view = call.table(table);
  const ReleasedGil released;
  return to_csr(view, lens, page_size);
}

Int32s make_dense(const Table& table, nb::handle seq_lens, int32_t page_size, std::optional<int32_t> columns,
                  int32_t fill) {
  const std::vector<int32_t> lens = to_int32s(seq_lens, "seq_lens");
  const PagedMetadata csr = csr_of(table, lens, page_size);
  int32_t width = 0;
  for (size_t r = 0; r < lens.size(); ++r) width = std::max(width, csr.indptr[r + 1] - csr.indptr[r]);
  width = columns.value_or(width);
  std::vector<int32_t> dense = to_dense(csr_table(csr.indices, csr.indptr), lens, page_size, width, fill);
  return to_numpy(std::move(dense), {lens.size(), static_cast<size_t>(width)});
}

/// Where rows begin in a list that is being made. On a CPU, which writes entries by what it finds there, it is the
/// call's own until `publish`: other threads may write to the caller's.
class RowStarts {
 public:
  RowStarts(DeviceCall& call, nb::handle source)
      : target_(call.int32s_out(source, "indptr")), own_(call.on_cpu() ? target_.size() : 0) {}
  std::span<int32_t> span() { return own_.empty() ? target_ : std::span<int32_t>(own_); }
  void publish() const { std::ranges::copy(own_, target_.begin()); }

 private:
  std::span<int32_t> target_;
  std::vector<int32_t> own_;
};

/// One entry a token, as `list(table, lens, indptr, out)` makes them.
template <typename T, typename List>
nb::tuple list_tokens(const Table& table, nb::handle seq_lens, int32_t page_size, const List& list) {
  const std::vector<int32_t> lens = to_int32s(seq_lens, "seq_lens");
  const PagedMetadata csr = csr_of(table, lens, page_size);  // refuses lengths that the table has no pages for
  int64_t tokens = 0;
  for (const int32_t len : lens) tokens += len;
  if (tokens > std::numeric_limits<int32_t>::max()) {
    refuse("there are " + std::to_string(tokens) + " tokens; a 32-bit indptr counts up to 2147483647");
  }
  std::vector<int32_t> indptr(lens.size() + 1);
  std::vector<T> out(static_cast<size_t>(tokens));
  {
    const ReleasedGil released;
    list(csr_table(csr.indices, csr.indptr), lens, indptr, out);
  }
  return nb::make_tuple(to_numpy(std::move(indptr)), to_numpy(std::move(out)));
}

Int64s make_slot_mapping(const Table& table, nb::handle token_row, nb::handle positions, int32_t page_size,
                         const KvShard& shard) {
  const std::vector<int32_t> rows = to_int32s(token_row, "token_row");
  const std::vector<int32_t> places = to_int32s(positions, "positions");
  DeviceCall call(host());
  const PageTableView view = call.table(table);
  std::vector<int64_t> slots(places.size());
  {
    const ReleasedGil released;
    slot_mapping(view, rows, places, page_size, slots, shard.world, shard.rank, shard.interleave);
  }
  return to_numpy(std::move(slots));
}

constexpr const char* kOnDevice =
    "The same on a context's device, into arrays of the caller's there. A GPU reads values when the kernel runs: what "
    "is "
    "wrong leaves a harmless entry and makes `status`, an int32 [1] on the GPU, 1, which nothing sets back.";

void bind_lengths(nb::module_& m) {
  m.def("pages_for", &pages_for, nb::arg("tokens"), nb::arg("page_size"), "ceil(tokens / page_size).");
  m.def("paged_indptr", &make_paged_indptr, nb::arg("seq_lens"), nb::arg("page_size"),
        "(indptr [requests + 1], last_page_len [requests]) of lengths, as FlashInfer's planners take them: int32.");
  m.def(
      "paged_indptr",
      [](const Context& context, nb::object seq_lens, int32_t page_size, nb::object indptr, nb::object last_page_len,
         nb::object stream, nb::object status) {
        DeviceCall call(context);
        const auto lens = call.int32s(seq_lens, "seq_lens");
        const auto offsets = call.int32s_out(indptr, "indptr");
        const auto last = call.int32s_out(last_page_len, "last_page_len");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        paged_indptr(context, lens, page_size, offsets, last, queue, flag);
      },
      nb::arg("context"), nb::arg("seq_lens"), nb::arg("page_size"), nb::arg("indptr"), nb::arg("last_page_len"),
      nb::arg("stream") = nb::none(), nb::arg("status") = nb::none(), kOnDevice);
  m.def("seq_lens_from_paged", &make_seq_lens, nb::arg("indptr"), nb::arg("last_page_len"), nb::arg("page_size"),
        "The inverse of paged_indptr: int32 [requests].");
  m.def(
      "seq_lens_from_paged",
      [](const Context& context, nb::object indptr, nb::object last_page_len, int32_t page_size, nb::object seq_lens,
         nb::object stream, nb::object status) {
        DeviceCall call(context);
        const auto offsets = call.int32s(indptr, "indptr");
        const auto last = call.int32s(last_page_len, "last_page_len");
        const auto lens = call.int32s_out(seq_lens, "seq_lens");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        seq_lens_from_paged(context, offsets, last, page_size, lens, queue, flag);
      },
      nb::arg("context"), nb::arg("indptr"), nb::arg("last_page_len"), nb::arg("page_size"), nb::arg("seq_lens"),
      nb::arg("stream") = nb::none(), nb::arg("status") = nb::none(), kOnDevice);
  m.def("shard_len", &shard_len, nb::arg("length"), nb::arg("world"), nb::arg("rank"), nb::arg("interleave"),
        "Tokens of a length that lie on a rank: p < length with (p / interleave) % world == rank.");
  m.def(
      "shard_lens",
      [](nb::object lens, const KvShard& shard) {
        std::vector<int32_t> local = to_int32s(lens, "lens");
        for (int32_t& length : local) length = shard_len(length, shard.world, shard.rank, shard.interleave);
        return to_numpy(std::move(local));
      },
      nb::arg("lens"), nb::arg("shard"), "shard_len of every length: int32 [n].");
  m.def(
      "shard_lens",
      [](const Context& context, nb::object lens, const KvShard& shard, nb::object local, nb::object stream,
         nb::object status) {
        DeviceCall call(context);
        const auto lengths = call.int32s(lens, "lens");
        const auto out = call.int32s_out(local, "local");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        shard_lens(context, lengths, shard, out, queue, flag);
      },
      nb::arg("context"), nb::arg("lens"), nb::arg("shard"), nb::arg("local"), nb::arg("stream") = nb::none(),
      nb::arg("status") = nb::none(), kOnDevice);
}

void bind_forms(nb::module_& m) {
  nb::class_<PagedMetadata>(m, "PagedMetadata", "The CSR form of a batch's page tables; int32 numpy arrays, copies.")
      .def_prop_ro(
          "indptr", [](const PagedMetadata& self) { return to_numpy(self.indptr); }, "[requests + 1], in pages.",
          nb::rv_policy::automatic)
      .def_prop_ro(
          "indices", [](const PagedMetadata& self) { return to_numpy(self.indices); }, "[indptr[-1]] page ids.",
          nb::rv_policy::automatic)
      .def_prop_ro(
          "last_page_len", [](const PagedMetadata& self) { return to_numpy(self.last_page_len); },
          "[requests]: 1 to page_size, 0 where the length is 0.", nb::rv_policy::automatic)
      .def("__repr__", [](const PagedMetadata& self) {
        return "<folio.PagedMetadata: " + std::to_string(self.last_page_len.size()) + " requests, " +
               std::to_string(self.indices.size()) + " pages>";
      });
  m.def(
      "to_csr",
      [](const Table& table, nb::object seq_lens, int32_t page_size) {
        return csr_of(table, to_int32s(seq_lens, "seq_lens"), page_size);
      },
      nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"),
      "A host table's first rows, one for each length, as PagedMetadata. Page ids are copied, not checked.");
  m.def(
      "to_csr",
      [](const Context& context, const Table& table, nb::object seq_lens, int32_t page_size, nb::object indptr,
         nb::object indices, nb::object last_page_len, nb::object stream, nb::object status) {
        DeviceCall call(context);
        const PageTableView view = call.table(table);
        const auto lens = call.int32s(seq_lens, "seq_lens");
        const auto offsets = call.int32s_out(indptr, "indptr");
        const auto ids = call.int32s_out(indices, "indices");
        const auto last = call.int32s_out(last_page_len, "last_page_len");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        to_csr(context, view, lens, page_size, offsets, ids, last, queue, flag);
      },
      nb::arg("context"), nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"), nb::arg("indptr"),
      nb::arg("indices"), nb::arg("last_page_len"), nb::arg("stream") = nb::none(), nb::arg("status") = nb::none(),
      kOnDevice);
  m.def("to_dense", &make_dense, nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"),
        nb::arg("columns") = nb::none(), nb::arg("fill") = 0,
        "A host table as int32 [requests, columns], `fill` beyond a row's pages. columns: the longest row's pages, "
        "unless given.");
  m.def(
      "to_dense",
      [](const Context& context, const Table& table, nb::object seq_lens, int32_t page_size, nb::object dense,
         int32_t fill, nb::object stream, nb::object status) {
        DeviceCall call(context);
        const PageTableView view = call.table(table);
        const auto lens = call.int32s(seq_lens, "seq_lens");
        const auto out = call.int32s_out(dense, "dense", 2);
        const int64_t columns = call.arrays().back().size(1);
        if (columns > std::numeric_limits<int32_t>::max()) refuse("dense has too many columns");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        to_dense(context, view, lens, page_size, static_cast<int32_t>(columns), fill, out, queue, flag);
      },
      nb::arg("context"), nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"), nb::arg("dense"),
      nb::arg("fill") = 0, nb::arg("stream") = nb::none(), nb::arg("status") = nb::none(), kOnDevice);
}

void bind_token_lists(nb::module_& m) {
  m.def(
      "token_indices",
      [](const Table& table, nb::object seq_lens, int32_t page_size) {
        return list_tokens<int32_t>(
            table, seq_lens, page_size,
            [&](const PageTableView& view, const std::vector<int32_t>& lens, std::vector<int32_t>& indptr,
                std::vector<int32_t>& out) { token_indices(host(), view, lens, page_size, indptr, out); });
      },
      nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"),
      "(indptr [requests + 1] in tokens, indices [tokens]): page * page_size + place in the page, int32: the table for "
      "a cache seen as pages of one token.");
  m.def(
      "token_indices",
      [](const Context& context, const Table& table, nb::object seq_lens, int32_t page_size, nb::object indptr,
         nb::object indices, nb::object stream, nb::object status) {
        DeviceCall call(context);
        const PageTableView view = call.table(table);
        const auto lens = call.int32s(seq_lens, "seq_lens");
        RowStarts offsets(call, indptr);
        const auto ids = call.int32s_out(indices, "indices");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        token_indices(context, view, lens, page_size, offsets.span(), ids, queue, flag);
        offsets.publish();
      },
      nb::arg("context"), nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"), nb::arg("indptr"),
      nb::arg("indices"), nb::arg("stream") = nb::none(), nb::arg("status") = nb::none(), kOnDevice);
  m.def(
      "token_offsets",
      [](const Table& table, nb::object seq_lens, int32_t page_size, int64_t page_stride, int64_t token_stride) {
        return list_tokens<int64_t>(table, seq_lens, page_size,
                                    [&](const PageTableView& view, const std::vector<int32_t>& lens,
                                        std::vector<int32_t>& indptr, std::vector<int64_t>& out) {
                                      token_offsets(host(), view, lens, page_size, page_stride, token_stride, indptr,
                                                    out);
                                    });
      },
      nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"), nb::arg("page_stride"), nb::arg("token_stride"),
      "(indptr [requests + 1] in tokens, offsets [tokens] int64): page * page_stride + place in the page * "
      "token_stride.");
  m.def(
      "token_offsets",
      [](const Context& context, const Table& table, nb::object seq_lens, int32_t page_size, int64_t page_stride,
         int64_t token_stride, nb::object indptr, nb::object offsets, nb::object stream, nb::object status) {
        DeviceCall call(context);
        const PageTableView view = call.table(table);
        const auto lens = call.int32s(seq_lens, "seq_lens");
        RowStarts starts(call, indptr);
        const auto out = call.int64s_out(offsets, "offsets");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        token_offsets(context, view, lens, page_size, page_stride, token_stride, starts.span(), out, queue, flag);
        starts.publish();
      },
      nb::arg("context"), nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"), nb::arg("page_stride"),
      nb::arg("token_stride"), nb::arg("indptr"), nb::arg("offsets"), nb::arg("stream") = nb::none(),
      nb::arg("status") = nb::none(), kOnDevice);
  m.def("slot_mapping", &make_slot_mapping, nb::arg("table"), nb::arg("token_row"), nb::arg("positions"),
        nb::arg("page_size"), nb::arg("shard") = KvShard{},
        "int64 [tokens]: the slot that token t, of row token_row[t] at position positions[t], is written to; -1 for "
        "negative positions (padding) and, in a sharded cache, for tokens of other ranks.");
  m.def(
      "slot_mapping",
      [](const Context& context, const Table& table, nb::object token_row, nb::object positions, int32_t page_size,
         nb::object slots, const KvShard& shard, nb::object stream, nb::object status) {
        DeviceCall call(context);
        const PageTableView view = call.table(table);
        const auto rows = call.int32s(token_row, "token_row");
        const auto places = call.int32s(positions, "positions");
        const auto out = call.int64s_out(slots, "slots");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        slot_mapping(context, view, rows, places, page_size, out, shard, queue, flag);
      },
      nb::arg("context"), nb::arg("table"), nb::arg("token_row"), nb::arg("positions"), nb::arg("page_size"),
      nb::arg("slots"), nb::arg("shard") = KvShard{}, nb::arg("stream") = nb::none(), nb::arg("status") = nb::none(),
      kOnDevice);
}

void bind_page_ids(nb::module_& m) {
  m.def(
      "expand_pages",
      [](nb::object pages, int32_t ratio) { return to_numpy(expand_pages(to_int32s(pages, "pages"), ratio)); },
      nb::arg("pages"), nb::arg("ratio"),
      "A manager's pages as kernel pages `ratio` times smaller: int32 [pages * ratio].");
  m.def(
      "expand_pages",
      [](const Context& context, nb::object pages, int32_t ratio, nb::object expanded, nb::object stream,
         nb::object status) {
        DeviceCall call(context);
        const auto ids = call.int32s(pages, "pages");
        const auto out = call.int32s_out(expanded, "expanded");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        expand_pages(context, ids, ratio, out, queue, flag);
      },
      nb::arg("context"), nb::arg("pages"), nb::arg("ratio"), nb::arg("expanded"), nb::arg("stream") = nb::none(),
      nb::arg("status") = nb::none(), kOnDevice);
  m.def(
      "validate",
      [](const Table& table, nb::object seq_lens, int32_t page_size, int64_t num_pages) {
        const std::vector<int32_t> lens = to_int32s(seq_lens, "seq_lens");
        DeviceCall call(host());
        const PageTableView view = call.table(table);
        const ReleasedGil released;
        validate(view, lens, page_size, num_pages);
      },
      nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"), nb::arg("num_pages"),
      "Raises InvalidArgument naming the first row and column of a host table whose page id is outside [0, num_pages), "
      "among the pages that the lengths need.");
  m.def(
      "validate",
      [](const Context& context, const Table& table, nb::object seq_lens, int32_t page_size, int64_t num_pages,
         nb::object stream, nb::object status) {
        DeviceCall call(context);
        const PageTableView view = call.table(table);
        const auto lens = call.int32s(seq_lens, "seq_lens");
        int32_t* const flag = call.status(status);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        validate(context, view, lens, page_size, num_pages, queue, flag);
      },
      nb::arg("context"), nb::arg("table"), nb::arg("seq_lens"), nb::arg("page_size"), nb::arg("num_pages"),
      nb::arg("stream") = nb::none(), nb::arg("status") = nb::none(),
      "Likewise on a context's device. A GPU says only that something is wrong, in `status`, which must be given "
      "there.");
}

}  // namespace

void bind_tables(nb::module_& m) {
  bind_lengths(m);
  bind_forms(m);
  bind_token_lists(m);
  bind_page_ids(m);
}

}  // namespace folio::python
