#include "token_allocators.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "folio/pools.hpp"
#include "integers.hpp"
#include "views.hpp"

/// Who owns which slot. As pools.cc's, its calls keep the GIL.
namespace folio::python {
namespace {

/// The lists of an allocation; read once.
struct Growth {
  std::vector<int32_t> prefix_lens, seq_lens, last_slots;
};

Growth read_growth(nb::handle prefix_lens, nb::handle seq_lens, nb::handle last_slots) {
  Growth growth;
  if (!prefix_lens.is_none()) growth.prefix_lens = to_int32s(prefix_lens, "prefix_lens");
  growth.seq_lens = to_int32s(seq_lens, "seq_lens");
  growth.last_slots = to_int32s(last_slots, "last_slots");
  if (!prefix_lens.is_none() && growth.prefix_lens.size() != growth.seq_lens.size()) {
    refuse("prefix_lens has " + std::to_string(growth.prefix_lens.size()) + " entries, seq_lens " +
           std::to_string(growth.seq_lens.size()));
  }
  return growth;
}

/// Tokens that an extension adds; shrinking ones are named by the allocator.
int64_t added_by(const Growth& growth) {
  int64_t added = 0;
  for (size_t i = 0; i < growth.seq_lens.size(); ++i) {
    added += std::max<int64_t>(0, int64_t{growth.seq_lens[i]} - growth.prefix_lens[i]);
  }
  return added;
}

template <typename Allocator>
std::optional<Int32s> alloc(Allocator& self, int64_t count) {
  require_count(count);
  if (count > self.available()) return std::nullopt;
  std::vector<int32_t> slots(static_cast<size_t>(count));
  if (!self.alloc(std::span<int32_t>(slots))) return std::nullopt;
  return to_numpy(std::move(slots));
}

template <typename Allocator>
std::optional<Int32s> alloc_extend(Allocator& self, nb::handle prefix_lens, nb::handle seq_lens,
                                   nb::handle last_slots) {
  const Growth growth = read_growth(prefix_lens, seq_lens, last_slots);
  const int64_t added = added_by(growth);
  // More than there can ever be needs no memory to be refused, unless the lengths themselves are wrong.
  const bool fits = added <= self.size();
  std::vector<int32_t> slots(static_cast<size_t>(fits ? added : 0));
  if (!fits) {
    for (size_t i = 0; i < growth.seq_lens.size(); ++i) {
      if (growth.prefix_lens[i] < 0 || growth.seq_lens[i] < growth.prefix_lens[i]) {
        refuse("request " + std::to_string(i) + " grows from " + std::to_string(growth.prefix_lens[i]) + " to " +
               std::to_string(growth.seq_lens[i]) + " tokens");
      }
    }
    return std::nullopt;
  }
  if (!self.alloc_extend(growth.prefix_lens, growth.seq_lens, growth.last_slots, slots)) return std::nullopt;
  return to_numpy(std::move(slots));
}

template <typename Allocator>
std::optional<Int32s> alloc_decode(Allocator& self, nb::handle seq_lens, nb::handle last_slots) {
  const Growth growth = read_growth(nb::none(), seq_lens, last_slots);
  std::vector<int32_t> slots(growth.seq_lens.size());
  if (!self.alloc_decode(growth.seq_lens, growth.last_slots, slots)) return std::nullopt;
  return to_numpy(std::move(slots));
}

/// What the allocators have in common.
template <typename Allocator>
void bind_allocation(nb::class_<Allocator>& type) {
  type.def_prop_ro("size", &Allocator::size, "Slots that it has to hand out.")
      .def_prop_ro("page_size", &Allocator::page_size)
      .def_prop_ro("available", &Allocator::available, "Slots of free pages.")
      .def("is_held", &Allocator::is_held, nb::arg("slot"))
      .def("alloc", &alloc<Allocator>, nb::arg("count"),
           "int32 [count] slots of fresh pages, page by page. All or nothing: None, and nothing changed, if there are "
           "too few.")
      .def("alloc_extend", &alloc_extend<Allocator>, nb::arg("prefix_lens"), nb::arg("seq_lens"), nb::arg("last_slots"),
           "Slots for requests that grow from prefix_lens[r] to seq_lens[r] tokens: int32 [sum(seq_lens - "
           "prefix_lens)], request after request, or None. last_slots[r] is the slot of token prefix_lens[r] - 1, not "
           "read where that is -1. Raises InvalidArgument naming the request.")
      .def("alloc_decode", &alloc_decode<Allocator>, nb::arg("seq_lens"), nb::arg("last_slots"),
           "alloc_extend by one token a request, which seq_lens count: int32 [requests], or None.")
      .def(
          "free", [](Allocator& self, nb::object slots) { self.free(to_int32s(slots, "slots")); }, nb::arg("slots"),
          "Gives back the slots' pages. Raises InvalidArgument naming a slot that is not held; nothing is then "
          "changed.")
      .def("clear", &Allocator::clear, "Everything free.")
      .def("check_invariants", &Allocator::check_invariants, "For tests: raises Error if a count is wrong.");
}

/// TokenAllocator::FreeGroup, with the allocator that must outlive it.
struct FreeGroup {
  std::shared_ptr<TokenAllocator> allocator;
  std::optional<TokenAllocator::FreeGroup> group;
};

void bind_token_allocator(nb::module_& m) {
  nb::class_<TokenAllocator> type(m, "TokenAllocator",
                                  "Hands out the slots of a KvPool: page_size to size + page_size - 1, the lowest free "
                                  "pages first. num_slots is a multiple of page_size.");
  type.def(nb::init<int32_t, int32_t>(), nb::arg("num_slots"), nb::arg("page_size") = 1);
  bind_allocation(type);
  type.def(
          "fresh_pages",
          [](TokenAllocator& self, nb::object prefix_lens, nb::object seq_lens, nb::object last_slots) {
            const Growth growth = read_growth(prefix_lens, seq_lens, last_slots);
            const int64_t added =
                prefix_lens.is_none() ? static_cast<int64_t>(growth.seq_lens.size()) : added_by(growth);
            return self.fresh_pages(growth.prefix_lens, growth.seq_lens, growth.last_slots, static_cast<size_t>(added));
          },
          nb::arg("prefix_lens").none(), nb::arg("seq_lens"), nb::arg("last_slots"),
          "Fresh pages that alloc_extend would take, or, with prefix_lens None, alloc_decode. Changes nothing.")
      .def(
          "free_group",
          [](const std::shared_ptr<TokenAllocator>& self) {
            return FreeGroup{self, self->free_group()};
          },
          "Opens a FreeGroup. Raises InvalidArgument if one is open.")
      .def("__repr__", [](const TokenAllocator& self) {
        return "<folio.TokenAllocator: " + std::to_string(self.available()) + " of " + std::to_string(self.size()) +
               " slots free, pages of " + std::to_string(self.page_size()) + ">";
      });
  nb::class_<FreeGroup>(m, "FreeGroup",
                        "While it is open, pages that are freed are held back; when it closes they can be handed out. "
                        "Made by TokenAllocator.free_group; a context manager.")
      .def(
          "close", [](FreeGroup& self) { self.group.reset(); }, "Ends the group; once more does nothing.")
      .def_prop_ro("is_open", [](const FreeGroup& self) { return self.group.has_value(); })
      .def("__enter__", [](nb::object self) { return self; })
      .def(
          "__exit__", [](FreeGroup& self, nb::args) { self.group.reset(); }, nb::arg("exception"))
      .def("__repr__", [](const FreeGroup& self) {
        return std::string("<folio.FreeGroup: ") + (self.group ? "open" : "closed") + ">";
      });
}

void bind_window_allocator(nb::module_& m) {
  nb::class_<WindowTokenAllocator> type(
      m, "WindowTokenAllocator",
      "Slots of two pools at once, for models that have layers with a sliding window beside others: a slot is one of "
      "the full pool, its window copy the slot where the windowed layers keep that token.");
  type.def(nb::init<int32_t, int32_t, int32_t>(), nb::arg("num_slots"), nb::arg("num_window_slots"),
           nb::arg("page_size") = 1);
  bind_allocation(type);
  type.def_prop_ro("window_size", &WindowTokenAllocator::window_size)
      .def_prop_ro("window_available", &WindowTokenAllocator::window_available)
      .def("has_window_copy", &WindowTokenAllocator::has_window_copy, nb::arg("slot"))
      .def(
          "free_window",
          [](WindowTokenAllocator& self, nb::object slots) { self.free_window(to_int32s(slots, "slots")); },
          nb::arg("slots"), "Gives back the window copies of held slots, which stay held.")
      .def("apply", &WindowTokenAllocator::apply, nb::arg("changes"),
           "Moves and frees what a call of PrefixCache asked for.")
      .def(
          "to_window",
          [](const WindowTokenAllocator& self, nb::object slots) {
            const std::vector<int32_t> full = to_int32s(slots, "slots");
            std::vector<int32_t> window(full.size());
            self.to_window(full, window);
            return to_numpy(std::move(window));
          },
          nb::arg("slots"),
          "int32 [n]: the window copy of each slot; the window pool's dummy page where there is none, -1 for negative "
          "slots.")
      .def("__repr__", [](const WindowTokenAllocator& self) {
        return "<folio.WindowTokenAllocator: " + std::to_string(self.available()) + " of " +
               std::to_string(self.size()) + " slots free, " + std::to_string(self.window_available()) + " of " +
               std::to_string(self.window_size()) + " window copies, pages of " + std::to_string(self.page_size()) +
               ">";
      });
}

/// Pairs [n, 2].
Int32s moves_of(const SlotChanges& changes) {
  std::vector<int32_t> pairs;
  for (const SlotChanges::Move& move : changes.moved) pairs.insert(pairs.end(), {move.from, move.to});
  const size_t count = changes.moved.size();
  return to_numpy(std::move(pairs), {count, 2});
}

void bind_slot_changes(nb::module_& m) {
  nb::class_<SlotChanges>(m, "SlotChanges",
                          "What calls of PrefixCache want done with slots; calls append. Arrays are copies.")
      .def(
          "__init__",
          [](SlotChanges* self, nb::object freed, nb::object window_freed) {
            new (self) SlotChanges{{}, to_int32s(window_freed, "window_freed"), to_int32s(freed, "freed")};
          },
          nb::arg("freed") = nb::tuple(), nb::arg("window_freed") = nb::tuple())
      .def_prop_ro("moved", &moves_of,
                   "int32 [n, 2], windowed caches only: the window copy of the first slot becomes that of the second.",
                   nb::rv_policy::automatic)
      .def_prop_ro(
          "window_freed", [](const SlotChanges& self) { return to_numpy(self.window_freed); },
          "int32 [n]: slots that lose their window copies and stay held.", nb::rv_policy::automatic)
      .def_prop_ro(
          "freed", [](const SlotChanges& self) { return to_numpy(self.freed); },
          "int32 [n]: slots that are nobody's any more: for the allocator's free.", nb::rv_policy::automatic)
      .def_prop_ro("empty", &SlotChanges::empty)
      .def("clear", &SlotChanges::clear)
      .def("__repr__", [](const SlotChanges& self) {
        return "<folio.SlotChanges: " + std::to_string(self.freed.size()) + " freed, " +
               std::to_string(self.window_freed.size()) + " window copies freed, " + std::to_string(self.moved.size()) +
               " moved>";
      });
}

}  // namespace

void require_count(int64_t count) {
  if (count < 0) refuse("count is " + std::to_string(count) + "; it is not negative");
}

void bind_token_allocators(nb::module_& m) {
  bind_slot_changes(m);
  bind_token_allocator(m);
  bind_window_allocator(m);
}

}  // namespace folio::python
