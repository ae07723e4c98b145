"""The prefix cache beside a dictionary that knows every prefix."""

import gc

import folio
import numpy as np
import pytest


class Prefixes:
    """The slot of every page of tokens, by all the tokens up to its end."""

    def __init__(self, page_size):
        self.page_size, self.slots = page_size, {}

    def match(self, tokens, extra=b""):
        length, found = 0, []
        while length + self.page_size <= len(tokens):
            page = self.slots.get((extra, tuple(tokens[:length + self.page_size])))
            if page is None:
                break
            found += page
            length += self.page_size
        return found

    def insert(self, tokens, slots, extra=b""):
        """Slots that were there already, in the place of the caller's."""
        present = len(self.match(tokens, extra))
        for end in range(present + self.page_size, len(tokens) + 1, self.page_size):
            self.slots[extra, tuple(tokens[:end])] = list(slots[end - self.page_size:end])
        return present


@pytest.mark.parametrize("page_size", [1, 3])
def test_matches_are_those_of_a_dictionary(page_size):
    random = np.random.default_rng(page_size)
    cache = folio.PrefixCache(folio.PrefixCacheOptions(page_size=page_size))
    known, changes, next_slot = Prefixes(page_size), folio.SlotChanges(), 0
    for _ in range(200):
        tokens = random.integers(0, 3, random.integers(0, 14)).tolist()
        extra = [b"", b"lora"][random.integers(2)]
        key = folio.PrefixKey(tokens, extra) if extra else tokens
        expected = known.match(tokens, extra)
        assert cache.match(key) == len(expected)
        lock, slots = cache.acquire(key)
        assert slots.dtype == np.int32 and slots.tolist() == expected and lock.length == len(expected)
        own = np.arange(next_slot, next_slot + len(tokens), dtype=np.int64)
        next_slot += len(tokens)
        done = cache.insert(key, own, changes)
        present = known.insert(tokens, own.tolist(), extra)
        whole = len(tokens) // page_size * page_size
        assert (done.present, done.inserted) == (present, whole - present)
    assert changes.empty  # what was present stays the caller's
    assert cache.size == page_size * len(known.slots) == cache.evictable + cache.protected_slots
    assert cache.protected_slots == lock.length
    cache.check_invariants()


def test_the_life_of_a_request():
    allocator, cache, changes = folio.TokenAllocator(32), folio.PrefixCache(), folio.SlotChanges()
    prompt = [5, 6, 7, 8, 9]
    lock, slots = cache.acquire(prompt[:-1])
    assert lock.length == 0
    slots = np.concatenate([slots, allocator.alloc(5)]).astype(np.int32)
    other = np.asarray(allocator.alloc(5))
    cache.insert(prompt[:3], other[:3], changes)  # another request was faster
    cache.extend(lock, prompt, slots, changes)
    assert slots[:3].tolist() == other[:3].tolist() and lock.length == 5
    assert changes.freed.tolist() == [1, 2, 3] and changes.window_freed.size == 0 and changes.moved.shape == (0, 2)
    allocator.free(changes.freed)
    changes.clear()
    assert changes.empty and cache.protected_slots == 5 and cache.evictable == 0
    assert cache.evict(5, changes) == folio.PrefixCache.Amount() and changes.empty  # it is kept
    full = prompt + [10, 11]
    slots = np.concatenate([slots, allocator.alloc(2)])
    cache.finish(lock, full, slots, changes)
    assert lock.length == 0 and cache.protected_slots == 0 and cache.size == 7 and changes.empty
    gone = cache.evict(folio.PrefixCache.Amount(slots=1), changes)
    assert gone.slots == changes.freed.size >= 1 and gone == folio.PrefixCache.Amount(gone.slots, 0)
    assert set(changes.freed.tolist()) <= set(slots.tolist())
    allocator.free(changes.freed)


def test_the_least_recently_used_goes_first():
    cache, changes = folio.PrefixCache(folio.PrefixCacheOptions(whole_leaves=False)), folio.SlotChanges()
    for i in range(4):
        cache.insert([i, 100], [2 * i, 2 * i + 1], changes)
    cache.acquire([0, 100])
    gc.collect()  # the lock is gone; that it was used is known
    cache.evict(3, changes)
    assert changes.freed.tolist()[:2] in ([2, 3], [3, 2]) and changes.freed.tolist()[2] == 5
    assert [cache.match([i, 100]) for i in range(4)] == [2, 0, 1, 2]


def test_slots_are_written_back_into_what_was_given():
    cache, changes = folio.PrefixCache(), folio.SlotChanges()
    cache.insert([1, 2], [30, 31], changes)
    lock, _ = cache.acquire([])
    wide = np.zeros((4, 2), np.int64)
    wide[:, 1] = [3, 4, 5, 6]
    cache.extend(lock, [1, 2, 3, 4], wide[:, 1], changes)
    assert wide[:, 1].tolist() == [30, 31, 5, 6] and not wide[:, 0].any() and changes.freed.tolist() == [3, 4]
    read_only = wide[:, 1].copy()
    read_only.flags.writeable = False
    for bad, message in [(read_only, "slots is read-only"), (wide.astype(np.float32)[:, 1], "slots is float32")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            cache.extend(lock, [1, 2, 3, 4], bad, changes)


def test_refusals_change_nothing():
    cache, changes = folio.PrefixCache(folio.PrefixCacheOptions(page_size=2)), folio.SlotChanges()
    cache.insert([1, 2, 3, 4], [2, 3, 4, 5], changes)
    lock, slots = cache.acquire([1, 2])
    stranger, _ = folio.PrefixCache().acquire([1])
    elsewhere = folio.PrefixCache(folio.PrefixCacheOptions(page_size=2))
    elsewhere.insert([1, 2], [2, 3], changes)
    foreign, _ = elsewhere.acquire([1, 2])
    good = np.array([2, 3, 6, 7], np.int32)
    for call in (cache.extend, cache.finish):
        for arguments, message in [((lock, [1, 2, 3, 4], good[:3].copy(), changes), "3 slots for 4 tokens"),
                                   ((lock, [1, 2, 3, 4], np.array([2, 3, -1, 7]), changes), "token 2 is -1"),
                                   ((lock, [1, 9, 3, 4], good.copy(), changes), "tokens are not those"),
                                   ((lock, [1, 2, 3, 4], np.array([2, 9, 6, 7]), changes), "are not the tree's"),
                                   ((lock, folio.PrefixKey([1, 2, 3, 4], "x"), good.copy(), changes), "extra key"),
                                   ((lock, [1], np.array([2]), changes), "keeps 2 tokens"),
                                   ((foreign, [1, 2], good[:2].copy(), changes), "another prefix cache"),
                                   ((lock, [1, 2, 3, 4], good.copy(), changes, 2), "window_begin is 2")]:
            with pytest.raises(folio.InvalidArgument, match=message):
                call(*arguments)
    assert lock.length == 2 and foreign.length == 2 and changes.empty and cache.size == 4 and cache.protected_slots == 2
    with pytest.raises(folio.InvalidArgument, match="1 locks live"):
        cache.clear()
    for call, message in [(lambda: cache.evict(-1, changes), "not negative"),
                          (lambda: cache.evict(folio.PrefixCache.Amount(window_copies=1), changes), "without a window"),
                          (lambda: cache.match(np.zeros((2, 2), np.int32)), "key has shape"),
                          (lambda: folio.PrefixCache(folio.PrefixCacheOptions(page_size=0)), "page_size is 0"),
                          (lambda: cache.match([2**31]), r"key\[0\] is 2147483648")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            call()
    for call, message in [(lambda: cache.evict("x", changes), "wanted: expected a number"),
                          (lambda: folio.PrefixKey([1], 5), "extra_key: expected str or bytes"),
                          (lambda: cache.match(["a"]), r"key\[0\]: expected an integer, got 'a'")]:
        with pytest.raises(TypeError, match=message):
            call()
    cache.finish(lock, [1, 2, 3, 4], good, changes)
    assert changes.freed.tolist() == [6, 7] and cache.protected_slots == 0
    lock.reset()
    cache.clear()
    assert cache.size == 0 and stranger.length == 0


def test_a_lock_outlives_its_cache():
    cache, changes = folio.PrefixCache(), folio.SlotChanges()
    cache.insert([1, 2, 3], [4, 5, 6], changes)
    lock, _ = cache.acquire([1, 2])
    assert "2 tokens" in repr(lock) and "3 slots" in repr(cache)
    del cache
    gc.collect()
    assert lock.length == 2
    lock.reset()
    assert lock.length == 0


def test_windows():
    """A prefix whose window copies are gone matches only so far as its last window_left tokens have them."""
    allocator = folio.WindowTokenAllocator(32, 32)
    cache = folio.PrefixCache(folio.PrefixCacheOptions(window_left=2))
    changes = folio.SlotChanges()
    tokens = list(range(8))
    slots = allocator.alloc(8)
    cache.insert(tokens[:6], slots[:6], changes)
    cache.insert(tokens, slots, changes)
    assert (cache.size, cache.window_size, cache.match(tokens)) == (8, 8, 8)
    gone = cache.evict(folio.PrefixCache.Amount(window_copies=1), changes)
    assert gone.slots == 0 and gone.window_copies == changes.window_freed.size == 6
    allocator.apply(changes)
    assert [allocator.has_window_copy(int(slot)) for slot in slots] == [False] * 6 + [True] * 2
    changes.clear()
    assert cache.match(tokens[:6]) == 0 and cache.match(tokens) == 8
    fresh = allocator.alloc(6)  # a request computes them again, and its copies become the tree's
    lock, _ = cache.acquire([])
    own = fresh.copy()
    cache.extend(lock, tokens[:6], own, changes)
    assert changes.moved.tolist() == [[int(a), int(b)] for a, b in zip(fresh, slots[:6])]
    assert own.tolist() == slots[:6].tolist()
    allocator.apply(changes)
    assert all(allocator.has_window_copy(int(slot)) for slot in slots) and cache.match(tokens[:6]) == 6
    lock.reset()
    cache.check_invariants()
    allocator.check_invariants()
