#include "folio/kvcache/prefix_cache.hpp"

#include <string>
#include <utility>

#include "fields.hpp"
#include "folio/types/error.hpp"
#include "integers.hpp"
#include "views.hpp"

/// The prefix cache. Its calls keep the GIL, which makes caches and their locks safe to share between Python's threads.
namespace folio::python {
namespace {

/// PrefixKey, with its tokens.
struct Key {
  std::vector<int32_t> tokens;
  std::string extra_key;
  PrefixKey view() const { return {tokens, extra_key}; }
  PrefixKey first(int64_t length) const { return {std::span(tokens).first(static_cast<size_t>(length)), extra_key}; }
};

std::string to_extra_key(nb::handle source) {
  if (nb::isinstance<nb::str>(source)) return nb::cast<std::string>(source);
  if (nb::isinstance<nb::bytes>(source)) {
    const nb::bytes bytes(nb::borrow(source));
    return {static_cast<const char*>(bytes.data()), bytes.size()};
  }
  throw nb::type_error("extra_key: expected str or bytes");
}

/// A PrefixKey, or tokens without an extra key.
Key to_key(nb::handle source) {
  const Key* given = nullptr;
  if (nb::try_cast(source, given, false) && given != nullptr) return *given;
  return {to_int32s(source, "key"), {}};
}

nb::tuple acquire(PrefixCache& self, nb::handle key) {
  std::vector<int32_t> slots;
  PrefixLock lock = self.acquire(to_key(key).view(), slots);
  return nb::make_tuple(nb::cast(std::move(lock)), to_numpy(std::move(slots)));
}

void extend(PrefixCache& self, PrefixLock& lock, nb::handle key, nb::handle slots, SlotChanges& changes,
            int64_t window_begin) {
  IntsInOut list(slots, "slots");
  self.extend(lock, to_key(key).view(), list.values(), changes, window_begin);
  list.write_back();
}

/// Unlike in C++, whatever is refused leaves the lock as it is.
void finish(PrefixCache& self, PrefixLock& lock, nb::handle key, nb::handle slots, SlotChanges& changes,
            int64_t window_begin) {
  const Key tokens = to_key(key);
  const std::vector<int32_t> list = to_int32s(slots, "slots");
  if (list.size() != tokens.tokens.size()) {
    refuse("there are " + std::to_string(list.size()) + " slots for " + std::to_string(tokens.tokens.size()) +
           " tokens");
  }
  const int64_t kept = std::min(lock.length(), static_cast<int64_t>(list.size()));
  // Nothing is handed over of what the lock keeps already; whether it does keep it is checked.
  std::vector<int32_t> own(list.begin(), list.begin() + kept);
  SlotChanges none;
  self.extend(lock, tokens.first(kept), own, none);
  const int64_t length = lock.length();
  try {
    self.finish(std::move(lock), tokens.view(), list, changes, window_begin);
  } catch (const Error&) {
    std::vector<int32_t> again;
    lock = self.acquire(tokens.first(length), again);
    throw;
  }
}

PrefixCache::Amount to_amount(nb::handle wanted) {
  const PrefixCache::Amount* given = nullptr;
  if (nb::try_cast(wanted, given, false) && given != nullptr) return *given;
  int64_t slots = 0;
  if (PyBool_Check(wanted.ptr()) || !nb::try_cast(wanted, slots, false)) {
    throw nb::type_error("wanted: expected a number of slots or a PrefixCache.Amount");
  }
  return {slots, 0};
}

void bind_key_and_lock(nb::module_& m) {
  nb::class_<Key>(m, "PrefixKey",
                  "A request's tokens (a list, int32 or int64), copied. Entries with different extra keys, str or "
                  "bytes, share nothing: an adapter's id, a salt. Where a key is taken, tokens alone are too.")
      .def(
          "__init__",
          [](Key* self, nb::object tokens, nb::object extra_key) {
            new (self) Key{to_int32s(tokens, "tokens"), to_extra_key(extra_key)};
          },
          nb::arg("tokens"), nb::arg("extra_key") = "")
      .def_prop_ro(
          "tokens", [](const Key& self) { return to_numpy(self.tokens); }, "int32 [n], a copy.",
          nb::rv_policy::automatic)
      .def_prop_ro(
          "extra_key", [](const Key& self) { return nb::bytes(self.extra_key.data(), self.extra_key.size()); },
          "As bytes.")
      .def("__len__", [](const Key& self) { return self.tokens.size(); })
      .def("__repr__", [](const Key& self) {
        return "<folio.PrefixKey: " + std::to_string(self.tokens.size()) + " tokens" +
               (self.extra_key.empty() ? "" : ", with an extra key") + ">";
      });
  nb::class_<PrefixLock>(m, "PrefixLock",
                         "Keeps a path of a PrefixCache from being evicted until it is reset or gone. Made by acquire.")
      .def_prop_ro("length", &PrefixLock::length, "Tokens from the beginning on that it keeps.")
      .def("reset", &PrefixLock::reset, "Gives the path up.")
      .def("__repr__",
           [](const PrefixLock& self) { return "<folio.PrefixLock: " + std::to_string(self.length()) + " tokens>"; });
  using O = PrefixCacheOptions;
  fields_of<O>(
      "PrefixCacheOptions", "What a PrefixCache is for. Its fields:",
      field("page_size", &O::page_size, "prefixes are kept and matched in whole pages of so many tokens"),
      field("window_left", &O::window_left, "the window of layers with copies of their own; -1: there are none"),
      field("whole_leaves", &O::whole_leaves,
            "False: of the last leaf that has to go for its slots, only the end goes"))
      .bind(m);
}

void bind_amounts(nb::class_<PrefixCache>& type) {
  using Amount = PrefixCache::Amount;
  using Inserted = PrefixCache::Inserted;
  nb::class_<Amount>(type, "Amount", "Slots, and in windowed caches window copies.")
      .def(
          "__init__",
          [](Amount* self, int64_t slots, int64_t window_copies) {
            new (self) Amount{slots, window_copies};
          },
          nb::arg("slots") = 0, nb::arg("window_copies") = 0)
      .def_ro("slots", &Amount::slots)
      .def_ro("window_copies", &Amount::window_copies)
      .def(
          "__eq__", [](const Amount& a, const Amount& b) { return a == b; }, nb::is_operator())
      .def("__hash__", [](const Amount& self) { return self.slots ^ (self.window_copies << 32); })
      .def("__repr__", [](const Amount& self) {
        return "PrefixCache.Amount(slots=" + std::to_string(self.slots) +
               ", window_copies=" + std::to_string(self.window_copies) + ")";
      });
  nb::class_<Inserted>(type, "Inserted", "What insert did.")
      .def_ro("present", &Inserted::present, "Leading tokens that were there: their slots stay the caller's.")
      .def_ro("inserted", &Inserted::inserted, "Tokens after these whose slots are now the tree's.")
      .def(
          "__eq__", [](const Inserted& a, const Inserted& b) { return a == b; }, nb::is_operator())
      .def("__hash__", [](const Inserted& self) { return self.present ^ (self.inserted << 32); })
      .def("__repr__", [](const Inserted& self) {
        return "PrefixCache.Inserted(present=" + std::to_string(self.present) +
               ", inserted=" + std::to_string(self.inserted) + ")";
      });
}

void bind_counts(nb::class_<PrefixCache>& type) {
  type.def_prop_ro("options", [](const PrefixCache& self) { return PrefixCacheOptions(self.options()); })
      .def_prop_ro("size", &PrefixCache::size, "Slots in the tree: evictable + protected_slots.")
      .def_prop_ro("evictable", &PrefixCache::evictable, "Of these, slots that no lock keeps.")
      .def_prop_ro("protected_slots", &PrefixCache::protected_slots, "Of these, slots that locks keep.")
      .def_prop_ro("window_size", &PrefixCache::window_size, "Slots in the tree with a window copy.")
      .def_prop_ro("window_evictable", &PrefixCache::window_evictable)
      .def_prop_ro("window_protected", &PrefixCache::window_protected)
      .def_prop_ro("num_nodes", &PrefixCache::num_nodes)
      .def("__repr__", [](const PrefixCache& self) {
        return "<folio.PrefixCache: " + std::to_string(self.size()) + " slots, " +
               std::to_string(self.protected_slots()) + " of them kept by locks, pages of " +
               std::to_string(self.options().page_size) + ">";
      });
}

}  // namespace

void bind_prefix_cache(nb::module_& m) {
  bind_key_and_lock(m);
  nb::class_<PrefixCache> type(
      m, "PrefixCache",
      "A radix tree over the token sequences whose keys and values are in the KV pool, so that requests with equal "
      "beginnings share slots. A request's life: acquire what is there, allocate slots for the rest, compute, extend, "
      "decode, finish; after each, hand `changes` to the allocator (allocator.free(changes.freed)) and clear them. "
      "Slots that were handed over belong to the tree until they come back as changes.freed.");
  bind_amounts(type);
  bind_counts(type);
  type.def(nb::init<const PrefixCacheOptions&>(), nb::arg("options") = PrefixCacheOptions{})
      .def(
          "match", [](const PrefixCache& self, nb::object key) { return self.match(to_key(key).view()); },
          nb::arg("key"), "Tokens of the longest prefix of the key that is there. Changes nothing.")
      .def("acquire", &acquire, nb::arg("key"), nb::sig("def acquire(self, key: object) -> tuple[PrefixLock, object]"),
           "(lock, slots): the slots, int32 [n], of the longest prefix that is there, kept by the lock. To have a "
           "token left to compute, pass all but the last.")
      .def(
          "insert",
          [](PrefixCache& self, nb::object key, nb::object slots, SlotChanges& changes, int64_t window_begin) {
            return self.insert(to_key(key).view(), to_int32s(slots, "slots"), changes, window_begin);
          },
          nb::arg("key"), nb::arg("slots"), nb::arg("changes"), nb::arg("window_begin") = 0,
          "Hands over slots[i] of token i, in whole pages, where the tree has none. Raises InvalidArgument, and "
          "changes "
          "nothing, for numbers of tokens and slots that differ, negative slots, and a window_begin out of range.")
      .def(
          "extend", &extend, nb::arg("lock"), nb::arg("key"), nb::arg("slots"), nb::arg("changes"),
          nb::arg("window_begin") = 0,
          "A running request's tokens so far: hands over its whole pages from lock.length on. Where another request "
          "has done so meanwhile, the tree's slots replace the request's in `slots`, a writable int32 or int64 array, "
          "and the request's go to changes.freed. Raises InvalidArgument, and changes nothing, as insert does, and for "
          "tokens or slots that are not the lock's.")
      .def("finish", &finish, nb::arg("lock"), nb::arg("key"), nb::arg("slots"), nb::arg("changes"),
           nb::arg("window_begin") = 0,
           "The end of a request: as extend, then gives up the lock; all slots that are not the tree's go to "
           "changes.freed.")
      .def(
          "evict",
          [](PrefixCache& self, nb::object wanted, SlotChanges& changes) {
            return self.evict(to_amount(wanted), changes);
          },
          nb::arg("wanted"), nb::arg("changes"),
          "Evicts at least so many slots, an int or a PrefixCache.Amount, or all that no lock keeps; the least "
          "recently "
          "used first. Returns the Amount that went.")
      .def("clear", &PrefixCache::clear,
           "Forgets everything; slots are not given back. Raises InvalidArgument while locks live.")
      .def("check_invariants", &PrefixCache::check_invariants,
           "For tests: raises Error if a count or link of the tree is broken.");
}

}  // namespace folio::python
