"""Random cases of what an engine keeps beside attention, for fuzz_module.py: right and wrong arguments, by its maker.

A case raises Mismatch where what was taken is not what a few lines of numpy say.
"""

import folio
import ml_dtypes
import numpy as np


class Mismatch(Exception):
    """A result that a second opinion denies."""


def require(holds, what):
    if not holds:
        raise Mismatch(what)


def slots_of_requests(maker, context):
    """Requests that share a prefix cache and an allocator: no slot is ever in two hands."""
    page, some, give = maker.some(1, 1, 2, 4), maker.some, maker.give
    allocator = folio.TokenAllocator(give(page * some(8, 20)), give(page))
    cache = folio.PrefixCache(folio.PrefixCacheOptions(page_size=give(page), whole_leaves=give(some(True, False))))
    rows, changes, running = folio.ReqToTokenPool(give(6), give(64)), folio.SlotChanges(), []
    for _ in range(20):
        kind = some("begin", "begin", "grow", "extend", "finish", "evict")
        if kind == "begin" and len(running) < 5:
            tokens = maker.numpy.integers(0, 2, some(1, 3, 8)).tolist()
            lock, slots = cache.acquire(give(tokens))
            fresh = allocator.alloc(give((len(tokens) - len(slots) + page - 1) // page * page))
            if fresh is None:
                lock.reset()
                continue
            running.append({"lock": lock, "tokens": tokens, "slots": np.concatenate([slots, fresh]).astype(np.int32),
                            "row": rows.alloc()})
        elif kind == "evict":
            cache.evict(give(some(1, 5)), changes)
            allocator.free(changes.freed)
            changes.clear()
        elif running:
            request = maker.random.choice(running)
            held = request["slots"][:len(request["tokens"])].copy()
            if kind == "grow":
                rows.write(give(request["row"]), give(0), give(held))
            elif kind == "extend":
                cache.extend(request["lock"], give(request["tokens"]), give(held), changes)
                request["slots"][:len(held)] = held
            else:
                cache.finish(request["lock"], give(request["tokens"]), give(held), changes)
                running.remove(request)
                allocator.free(give([slot for slot in request["slots"][len(held):]
                                     if slot // page not in held // page]))
            if page == 1:
                allocator.free(changes.freed)
            changes.clear()
        cache.check_invariants()
        allocator.check_invariants()
        require(cache.size == cache.evictable + cache.protected_slots, "slots of the tree are lost")
        if page == 1 and not maker.odds:
            own = [int(slot) for request in running for slot in request["slots"][request["lock"].length:]]
            require(len(own) == len(set(own)), "a slot belongs to two requests")
            require(allocator.size - allocator.available == len(own) + cache.size, "a slot is lost")


def random_table(maker, counts, pages):
    rows = [maker.numpy.integers(0, pages, count).astype(np.int32) for count in counts]
    if maker.some(True, False):
        ids = np.concatenate([*rows, np.zeros(0, np.int32)]).astype(np.int32)
        return rows, folio.csr_table(maker.give(ids), maker.give(maker.indptr(counts)))
    wide = np.full((len(rows), 2 + max([*counts, 0])), -1, np.int32)
    for entries, row in zip(wide, rows):
        entries[1:1 + len(row)] = row
    return rows, folio.dense_table(maker.give(wide), maker.give(1))


def lists(maker, context):
    """Tables in every form, and what is copied and gathered by them."""
    give, page = maker.give, maker.some(1, 3, 16)
    lens = [maker.some(0, 1, 7, 16, 33) for _ in range(maker.some(0, 1, 3))]
    rows, table = random_table(maker, [-(-length // page) for length in lens], 9)
    given = give(np.array(lens, maker.some(np.int32, np.int64))) if maker.some(True, False) else give(lens)
    metadata = folio.to_csr(table, given, give(page))
    dense = folio.to_dense(table, given, give(page), give(maker.some(None, 40)), give(-1))
    indptr, indices = folio.token_indices(table, given, give(page))
    row = np.repeat(np.arange(len(lens)), lens).astype(np.int32)
    place = np.concatenate([*map(np.arange, lens), np.zeros(0)]).astype(np.int32)
    slots = folio.slot_mapping(table, give(row), give(place), give(page))
    folio.validate(table, given, give(page), give(9))
    target = np.full(sum(lens) + 1, -1, np.int32)
    starts = np.zeros(len(lens) + 1, np.int32)
    folio.token_indices(context, table, given, give(page), give(starts), give(target))
    halves = [maker.values(9, page, 2, dim) for dim in (8, 16)]
    out = [np.zeros((sum(lens), 2, dim), np.float32) for dim in (8, 16)]
    cache = folio.make_nhd_view(*map(give, halves))
    folio.gather_kv(context, cache, table, given, *map(give, out), k_scale=give(1.0))
    copied = [np.zeros_like(half) for half in halves]
    folio.copy_pages(context, cache, folio.make_nhd_view(*map(give, copied)), give([0, 8]), give([3, 1]))
    if maker.odds:
        return
    expected = np.array([rows[r][p // page] * page + p % page for r, p in zip(row, place)], np.int64)
    require(metadata.indices.tolist() == [int(one) for own in rows for one in own], "to_csr")
    require([own[own >= 0].tolist() for own in dense] == [own.tolist() for own in rows], "to_dense")
    require(np.array_equal(slots, expected) and np.array_equal(indices, expected), "slots of tokens")
    require(np.array_equal(target[:-1], expected) and target[-1] == -1 and np.array_equal(starts, indptr), "in place")
    for half, made, copy in zip(halves, out, copied):
        require(np.array_equal(made, half.reshape(-1, *half.shape[2:])[expected]), "gather_kv")
        require(np.array_equal(copy[[3, 1]], half[[0, 8]]) and not copy[[0, 2, 4, 5, 6, 7, 8]].any(), "copy_pages")


def quantized(maker, context):
    """A tensor as fp8, and as NVFP4 and back."""
    give, tokens, heads, dim = maker.give, maker.some(0, 1, 5), maker.some(1, 3), maker.some(16, 48)
    given = maker.values(tokens, heads, dim, element=maker.some(np.float32, np.float16, ml_dtypes.bfloat16))
    out = np.zeros((tokens, heads, dim), ml_dtypes.float8_e4m3fn)
    scale = maker.some(1.0, 0.25)
    folio.quantize_fp8(context, give(given), give(out), give(scale))
    folio.nvfp4_scale_bytes(give(tokens + 3), give(heads * dim // 16))
    memory = np.zeros(folio.nvfp4_scale_bytes(tokens + 3, heads * dim // 16), np.uint8)
    factors, packed = folio.BlockScaleArgs(give(memory), give(3)), np.zeros((tokens, heads, dim // 2), np.uint8)
    folio.quantize_nvfp4(context, give(given), give(packed), factors, give(64.0))
    back = np.zeros((tokens, heads, dim), np.float32)
    folio.dequantize_nvfp4(context, give(packed), factors, give(64.0), give(back))
    scales = np.zeros(3, np.float32)
    folio.calculate_kv_scales(context, give(given), give(given), give(given), give(scales))
    if maker.odds:
        return
    wide = given.astype(np.float32)
    expected = np.clip(wide / np.float32(scale), -448, 448).astype(out.dtype)
    require(np.array_equal(out.view(np.uint8), expected.view(np.uint8)), "quantize_fp8")
    # Half a step of e2m1 is at most 1 of a block's 6; its factor is rounded by up to 1/16 of itself.
    most = np.abs(wide).reshape(tokens, -1, 16).max(axis=-1, initial=0) if tokens else np.zeros((0, 1), np.float32)
    error = np.abs(back - wide).reshape(tokens, -1, 16).max(axis=-1, initial=0) if tokens else most
    require(np.all(error <= most / 6 * (1 + 1 / 16) + 2.0**-6), "NVFP4 and back")


def cascades(maker, context):
    """Shared prefixes of a batch, and the keys of its cascade: those of the batch."""
    give, page = maker.give, 16
    shared = maker.some(0, 1, 3)
    counts = [shared + maker.some(1, 2) for _ in range(maker.some(1, 2, 4))]
    rows = [list(range(shared)) + maker.numpy.integers(0, 30, count - shared).tolist() for count in counts]
    table = folio.csr_table(give(np.array(sum(rows, []), np.int32)), give(maker.indptr(counts)))
    lens = [count * page - maker.some(0, 3) for count in counts]
    folio.SharedPrefixFinder().find(table, give(counts))
    order = folio.SharedPrefixFinder().order(table, give(counts), give(np.arange(len(counts))))
    config = folio.AttentionConfig(num_q_heads=8, num_kv_heads=2, head_dim_qk=16, head_dim_v=16, q="float32",
                                   kv="float32", page_size=page)
    planner = folio.CascadePlanner(folio.prepare(context, config), give(maker.some(0, 2, 4)))
    cu_q = maker.indptr([1] * len(counts))
    if maker.some(True, False):
        cascade = planner.discover(give(cu_q), give(lens), table)
    else:
        cascade = planner.share(give(cu_q), give(lens), table, give(shared * page))
    batch = folio.BatchView(cu_q, cascade.segments)
    require(len(cascade.segments) == len(cascade.tables) and repr(batch), "a segment without a table")
    require(maker.odds or sorted(order.tolist()) == list(range(len(counts))), "an order that loses rows")


def ranks(maker, context):
    """A sum over a few threads, some of which get wrong arguments."""
    world, count = maker.some(1, 2, 3), maker.some(1, 4)
    everybody = [maker.values(world, count) for _ in range(world)]
    arguments = [(maker.give(mine.copy()), maker.give(np.zeros(count, np.float32))) for mine in everybody]

    def body(group):
        mine, part = arguments[group.rank % world]
        group.all_reduce_sum(mine)
        group.reduce_scatter_sum(mine, part)
        group.barrier()
        return mine, part

    results = folio.run_ranks(maker.give(world), body, timeout=2.0)
    if maker.odds:
        return
    total = everybody[0]
    for other in everybody[1:]:
        total = total + other
    for rank, (mine, part) in enumerate(results):
        scattered = total[rank]
        for _ in everybody[1:]:
            scattered = scattered + total[rank]
        require(np.array_equal(mine, total) and np.array_equal(part, scattered), "a sum over ranks")


KINDS = [slots_of_requests, lists, quantized, cascades, ranks]
