#include "folio/cascade.hpp"

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "device_call.hpp"
#include "fields.hpp"
#include "folio/shared_prefix.hpp"
#include "gil.hpp"

/// Shared prefixes, and the cascades that read them once.
namespace folio::python {
namespace {

/// Host rows of a table and what is asked of them: what is checked is what is used.
struct HostRows {
  PageTableView view;
  std::vector<int32_t> indptr;
  std::vector<Array> arrays;
};

/// `lens` [at most rows] in units of `page_size`: of a dense table's row, what lies beyond its columns is not its own.
HostRows host_rows(const Table& table, std::span<const int32_t> lens, int32_t page_size) {
  HostRows rows{table.view, {}, table.arrays};
  require_on(Device{}, table.arrays);
  if (rows.view.kind == PageTableKind::kCsr) {
    rows.indptr.assign(rows.view.indptr, rows.view.indptr + rows.view.num_rows + 1);
    rows.view.indptr = rows.indptr.data();
    return rows;
  }
  for (size_t r = 0; r < lens.size(); ++r) {
    const int64_t pages = lens[r] <= 0 ? 0 : (int64_t{lens[r]} + page_size - 1) / page_size;
    if (pages > 0 && rows.view.first_column + pages > table.columns) {
      refuse("table.entries has " + std::to_string(table.columns) + " columns; row " + std::to_string(r) + " needs " +
             std::to_string(pages) + " pages from column " + std::to_string(rows.view.first_column));
    }
  }
  return rows;
}

/// SharedPrefixFinder, for one thread at a time.
struct Finder {
  std::mutex mutex;
  SharedPrefixFinder finder;
};

std::vector<SharedPrefix> find(Finder& self, const Table& table, nb::handle full_pages) {
  const std::vector<int32_t> pages = to_int32s(full_pages, "full_pages");
  const HostRows rows = host_rows(table, pages, 1);
  const ReleasedGil released;
  const std::lock_guard lock(self.mutex);
  const auto found = self.finder.find(rows.view, pages);
  return {found.begin(), found.end()};
}

Int32s order(Finder& self, const Table& table, nb::handle full_pages, nb::handle rows) {
  const std::vector<int32_t> pages = to_int32s(full_pages, "full_pages");
  std::vector<int32_t> numbers = to_int32s(rows, "rows");
  const HostRows own = host_rows(table, pages, 1);
  {
    const ReleasedGil released;
    const std::lock_guard lock(self.mutex);
    self.finder.order(own.view, pages, numbers);
  }
  return to_numpy(std::move(numbers));
}

void bind_shared_prefixes(nb::module_& m) {
  fields_of<SharedPrefix>(
      "SharedPrefix", "Neighbouring rows of a page table whose first entries are the same page ids. Its fields:",
      field("begin", &SharedPrefix::begin, "the first row"), field("end", &SharedPrefix::end, "behind the last row"),
      field("pages", &SharedPrefix::pages, "how many entries they have in common"),
      field("parent", &SharedPrefix::parent, "number of the smallest shared prefix around it; -1: none"))
      .bind_answer(m);
  nb::class_<Finder>(m, "SharedPrefixFinder", "Finds what the requests of a batch share, from their host tables alone.")
      .def(nb::init<>())
      .def("find", &find, nb::arg("table"), nb::arg("full_pages"),
           "All shared prefixes of neighbouring rows among the first full_pages[r] pages of each row r, a SharedPrefix "
           "each; those inside another stand before it. Raises InvalidArgument naming a row whose pages do not lie in "
           "the table.")
      .def(
          "order", &order, nb::arg("table"), nb::arg("full_pages"), nb::arg("rows"),
          "The row numbers, int32 [n], reordered so that rows with common prefixes become neighbours. full_pages[r] is "
          "row r's, not that of rows[r].");
}

/// Cascade, with arrays of its own: it outlives the planner's next call. On a GPU where rows begin stays the planner's.
struct OwnCascade {
  std::vector<Segment> segments;
  std::vector<Table> tables;
  int64_t bytes_saved = 0;
  int32_t levels_shared = 0;
};

/// CascadePlanner, for one thread at a time.
struct Planner {
  explicit Planner(const AttentionOp& op, int32_t max_levels)
      : device(op.context().device()), planner(op, max_levels) {}
  explicit Planner(const CascadeCosts& costs, int32_t max_levels) : planner(costs, max_levels) {}
  Device device;
  std::mutex mutex;
  CascadePlanner planner;
};

Array copy_of(const int32_t* values, int64_t count, const std::string& name) {
  return own_ints(std::vector<int32_t>(values, values + count), name);
}

Segment own_segment(const KvSegment& made, int32_t num_requests) {
  Segment segment{made, {}};
  const int64_t rows = made.group_indptr != nullptr ? made.num_groups : num_requests;
  const auto own = [&](const int32_t*& values, int64_t count, const char* name) {
    if (values == nullptr) return;
    segment.arrays.push_back(copy_of(values, count, name));
    values = static_cast<const int32_t*>(segment.arrays.back().data);
  };
  own(segment.view.kv_len, rows, "kv_len");
  own(segment.view.first_pos, rows, "first_pos");
  own(segment.view.group_indptr, rows + 1, "group_indptr");
  return segment;
}

/// A segment's table: the batch's entries, and on a CPU a copy of where its rows begin. `entries` has the batch's.
Table own_table(const PageTableView& made, const Table& given, const std::vector<Array>& entries, nb::handle planner,
                bool on_cpu) {
  Table table;
  table.view = made;
  table.columns = made.kind == PageTableKind::kDense ? given.columns : 0;
  table.arrays = {entries.front()};
  if (made.kind == PageTableKind::kDense) return table;
  if (on_cpu) {
    Array starts = copy_of(made.indptr, int64_t{made.num_rows} + 1, "table.indptr");
    table.view.indptr = static_cast<const int32_t*>(starts.data);
    table.arrays.push_back(std::move(starts));
    return table;
  }
  Array starts = entries.front();  // lies where the entries do
  starts.name = "table.indptr";
  starts.data = const_cast<int32_t*>(made.indptr);
  starts.memory = nb::ndarray<nb::ro>(made.indptr, {static_cast<size_t>(made.num_rows) + 1}, planner, {},
                                      nb::dtype<int32_t>(), starts.place.dlpack_type, starts.place.cuda_index);
  table.arrays.push_back(std::move(starts));
  return table;
}

/// A batch of one call, on the host; its entries in the GPU's memory as well where kernels read them there.
struct CascadeInput {
  std::vector<int32_t> cu_q, kv_len;
  HostRows rows;
  std::vector<Array> device_indices;
  CascadeBatch view;
};

CascadeInput read_batch(const Planner& planner, nb::handle cu_q, nb::handle kv_len, const Table& table,
                        nb::handle device_indices) {
  CascadeInput input;
  input.cu_q = to_int32s(cu_q, "cu_q");
  input.kv_len = to_int32s(kv_len, "kv_len");
  if (input.cu_q.size() != input.kv_len.size() + 1) {
    refuse("cu_q has " + std::to_string(input.cu_q.size()) + " entries, kv_len " + std::to_string(input.kv_len.size()) +
           "; the first has one more than requests, the second one each");
  }
  input.rows = host_rows(table, input.kv_len, planner.planner.costs().page_size);
  if (!device_indices.is_none()) {
    Array array = borrow(device_indices, "device_indices");
    if (array.element != nb::dtype<int32_t>()) {
      refuse("device_indices is " + element_text(array.element) + "; it must be int32");
    }
    require_on(planner.device, array);
    const Array& entries = table.arrays.front();
    bool same = array.rank() == entries.rank();
    for (int64_t i = 0; same && i < array.rank(); ++i) {
      same = array.size(i) == entries.size(i) && (array.size(i) < 2 || array.stride(i) == entries.stride(i));
    }
    if (!same) {
      refuse("device_indices has shape " + shape_text(array) + "; it must be the table's entries once more, " +
             shape_text(entries) + " with the same strides");
    }
    input.view.device_indices = static_cast<const int32_t*>(array.data);
    input.device_indices = {std::move(array)};
  }
  input.view.num_requests = static_cast<int32_t>(input.kv_len.size());
  input.view.cu_q = input.cu_q.data();
  input.view.kv_len = input.kv_len.data();
  input.view.table = input.rows.view;
  return input;
}

template <typename Call>
OwnCascade make_cascade(Planner& self, nb::handle planner, const CascadeInput& input, const Table& table,
                        nb::handle stream, const Call& call) {
  const Stream queue = to_stream(stream, self.device, {&input.device_indices});
  const bool on_cpu = self.device.type == DeviceType::kCpu;
  // Until its arrays are copied, nobody else may call the planner.
  std::unique_lock lock(self.mutex, std::defer_lock);
  const Cascade* made = nullptr;
  {
    const ReleasedGil released;
    lock.lock();
    made = &call(self.planner, input.view, queue);
  }
  OwnCascade cascade;
  cascade.bytes_saved = made->bytes_saved;
  cascade.levels_shared = made->levels_shared;
  const std::vector<Array>& entries = on_cpu ? input.rows.arrays : input.device_indices;
  for (const KvSegment& segment : made->segments) {
    cascade.segments.push_back(own_segment(segment, input.view.num_requests));
  }
  for (const PageTableView& view : made->tables) {
    if (entries.empty()) refuse("device_indices is None; the op's kernels read the table in the GPU's memory");
    cascade.tables.push_back(own_table(view, table, entries, planner, on_cpu));
  }
  return cascade;
}

OwnCascade discover(nb::object planner, nb::object cu_q, nb::object kv_len, const Table& table,
                    nb::object device_indices, nb::object stream) {
  Planner& self = nb::cast<Planner&>(planner);
  const CascadeInput input = read_batch(self, cu_q, kv_len, table, device_indices);
  return make_cascade(
      self, planner, input, table, stream, [](CascadePlanner & made, const CascadeBatch& batch, Stream queue) -> auto& {
        return made.discover(batch, queue);
      });
}

OwnCascade share(nb::object planner, nb::object cu_q, nb::object kv_len, const Table& table, int32_t prefix_tokens,
                 nb::object device_indices, nb::object stream) {
  Planner& self = nb::cast<Planner&>(planner);
  const CascadeInput input = read_batch(self, cu_q, kv_len, table, device_indices);
  return make_cascade(
      self, planner, input, table,
      stream, [prefix_tokens](CascadePlanner & made, const CascadeBatch& batch, Stream queue) -> auto& {
        return made.share(batch, prefix_tokens, queue);
      });
}

void bind_costs(nb::module_& m) {
  using C = CascadeCosts;
  fields_of<C>(
      "CascadeCosts",
      "What the choice of shared prefixes is weighed with, for one KV head; cascade_costs gives an op's. Its "
      "fields:",
      required("tile_rows", &C::tile_rows, "most packed rows (query token, head of a group) that read keys together"),
      required("tile_tokens", &C::tile_tokens, "keys that are visited at a time"),
      required("group_size", &C::group_size, "q heads of a KV head"),
      required("page_size", &C::page_size, "tokens a page"),
      field("window_left", &C::window_left, "keys further left of a query are not read; -1: all are"),
      required("kv_token_bytes", &C::kv_token_bytes, "bytes of K and V of one token"),
      field("q_row_bytes", &C::q_row_bytes, "bytes of a packed row's query"),
      field("partial_row_bytes", &C::partial_row_bytes, "bytes of a packed row's partial result"),
      field("determinism", &C::determinism, "from BATCH_INVARIANT on nothing is shared"))
      .bind(m);
  m.def("cascade_costs", &cascade_costs, nb::arg("op"), "The costs of an op's kernel.");
}

}  // namespace

void bind_cascade(nb::module_& m) {
  bind_shared_prefixes(m);
  bind_costs(m);
  m.attr("MAX_CASCADE_LEVELS") = kMaxCascadeLevels;
  nb::class_<OwnCascade>(m, "Cascade",
                         "A batch's keys as segments: shared ones, outermost first, then the rest of each request's "
                         "own. Segment s of a plan reads by tables[s].")
      .def_prop_ro(
          "segments", [](const OwnCascade& self) { return self.segments; }, nb::rv_policy::automatic,
          "A KvSegment each, for BatchView.")
      .def_prop_ro(
          "tables", [](const OwnCascade& self) { return self.tables; }, nb::rv_policy::automatic,
          "A PageTableView each, for SegmentArgs. On a GPU they are good until the planner's next call.")
      .def_ro("bytes_saved", &OwnCascade::bytes_saved, "What discover expects, over one KV head; 0 of share.")
      .def_ro("levels_shared", &OwnCascade::levels_shared, "Segments that share something, the first ones.")
      .def_prop_ro(
          "num_levels", [](const OwnCascade& self) { return self.levels_shared; }, "levels_shared.")
      .def("__repr__", [](const OwnCascade& self) {
        return "<folio.Cascade: " + std::to_string(self.segments.size()) + " segments, " +
               std::to_string(self.levels_shared) + " of them shared>";
      });
  nb::class_<Planner>(m, "CascadePlanner",
                      "Turns one batch's host page tables into a cascade. For an op on a GPU the table's entries are "
                      "given once more in its memory, as device_indices. Calls run one at a time.")
      .def(nb::init<const AttentionOp&, int32_t>(), nb::arg("op"), nb::arg("max_levels") = 4)
      .def(nb::init<const CascadeCosts&, int32_t>(), nb::arg("costs"), nb::arg("max_levels") = 4)
      .def("discover", &discover, nb::arg("cu_q"), nb::arg("kv_len"), nb::arg("table"),
           nb::arg("device_indices") = nb::none(), nb::arg("stream") = nb::none(),
           "Finds the prefixes that neighbouring requests share and takes those that save more bytes than they cost. "
           "cu_q [requests + 1] and kv_len [requests], the new tokens included, on the host; the table has each "
           "request's pages. Raises InvalidArgument naming the request.")
      .def("share", &share, nb::arg("cu_q"), nb::arg("kv_len"), nb::arg("table"), nb::arg("prefix_tokens"),
           nb::arg("device_indices") = nb::none(), nb::arg("stream") = nb::none(),
           "One level, shared by all requests: the first prefix_tokens tokens, cut to full pages that all had computed "
           "before this step. Raises InvalidArgument where a request's pages are not those of the others.")
      .def_prop_ro("costs", [](const Planner& self) { return CascadeCosts(self.planner.costs()); })
      .def_prop_ro("max_levels", [](const Planner& self) { return self.planner.max_levels(); })
      .def("__repr__", [](const Planner& self) {
        return "<folio.CascadePlanner: at most " + std::to_string(self.planner.max_levels()) + " levels, on " +
               describe(self.device) + ">";
      });
}

}  // namespace folio::python
