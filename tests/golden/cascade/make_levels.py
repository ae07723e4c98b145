#!/usr/bin/env python3
"""Makes levels.json: which shared prefixes of small batches are read together, found by trying every choice.

Shares no code and no method with the library: prefixes are sets of requests found by comparing lists, and a choice is
weighed by walking every request's keys. Usage: make_levels.py > levels.json
"""

import itertools
import json
import random


def prefixes(rows, full):
    """Ranges of neighbours with the pages that they have in common, where no wider range has them all."""
    found = {}
    for begin in range(len(rows)):
        for end in range(begin + 2, len(rows) + 1):
            common = 0
            while all(common < full[r] and rows[r][common] == rows[begin][common] for r in range(begin, end)):
                common += 1
            if common:
                found[(begin, end)] = common
    return [(b, e, p) for (b, e), p in found.items()
            if found.get((b - 1, e)) != p and found.get((b, e + 1)) != p]


def reads(rows, tile):
    return -(-rows // tile)


def saved(case, chosen):
    """What a choice saves against every request reading alone; None where it has too many levels."""
    costs, q_len, kv_len = case["costs"], case["q_len"], case["kv_len"]
    page, tile = costs["page_size"], costs["tile_tokens"]
    packed = [q * costs["group_size"] for q in q_len]
    groups, total, shared_rows = [], 0, [0] * len(q_len)
    for begin, end, pages in chosen:
        around = [c for c in chosen if c[0] <= begin and c[1] >= end and c != (begin, end, pages)]
        if len(around) >= case["max_levels"]:
            return None, None
        first = max([c[2] for c in around], default=0)
        low, high = first * page, pages * page
        seen = range(low, high)
        if costs["window_left"] >= 0:
            lowest = min(kv_len[r] - q_len[r] - costs["window_left"] for r in range(begin, end) if q_len[r])
            seen = range(max(low, min(high, lowest)), high)
        rows = sum(packed[begin:end])
        total -= reads(rows, costs["tile_rows"]) * -(-len(seen) // tile) * tile * costs["kv_token_bytes"]
        for r in range(begin, end):
            own = [t for t in range(low, high)
                   if costs["window_left"] < 0 or t >= kv_len[r] - 1 - costs["window_left"]]
            total += reads(packed[r], costs["tile_rows"]) * len(own) * costs["kv_token_bytes"]
            shared_rows[r] += 1
        groups.append([len(around), begin, end, first, pages])
    for r, levels in enumerate(shared_rows):
        partials = levels + 1 if levels else 0
        total -= packed[r] * (levels * costs["q_row_bytes"] + 2 * partials * costs["partial_row_bytes"])
    return total, sorted(groups)


def solve(case):
    page = case["costs"]["page_size"]
    full = [max(0, kv - q) // page if q else 0 for q, kv in zip(case["q_len"], case["kv_len"])]
    best, answers = 0, [[]]
    candidates = prefixes(case["pages"], full)
    for n in range(1, len(candidates) + 1):
        for chosen in itertools.combinations(candidates, n):
            total, groups = saved(case, list(chosen))
            if total is None:
                continue
            if total > best:
                best, answers = total, []
            if total == best:
                answers.append(groups)
    return best, answers


def costs(**changes):
    base = {"tile_rows": 16, "tile_tokens": 64, "group_size": 4, "page_size": 16, "window_left": -1,
            "kv_token_bytes": 512, "q_row_bytes": 256, "partial_row_bytes": 520}
    return {**base, **changes}


def by_hand():
    system = list(range(100, 164))
    yield "a system prompt of 64 pages and 8 decodes", {
        "pages": [system + [1000 + r] for r in range(8)], "q_len": [1] * 8, "kv_len": [1030] * 8, "max_levels": 4,
        "costs": costs()}
    yield "one page is not worth two partial results a row", {
        "pages": [[1, 10 + r] for r in range(2)], "q_len": [1, 1], "kv_len": [20, 20], "max_levels": 4,
        "costs": costs(kv_token_bytes=128)}
    yield "two chats with four branches each under one system prompt", {
        "pages": [system + list(range(200 + 100 * (r // 4), 232 + 100 * (r // 4))) + [1000 + r] for r in range(8)],
        "q_len": [1] * 8, "kv_len": [64 * 16 + 32 * 16 + 7] * 8, "max_levels": 4, "costs": costs()}
    yield "the same with one level only", {
        "pages": [system + list(range(200 + 100 * (r // 4), 232 + 100 * (r // 4))) + [1000 + r] for r in range(8)],
        "q_len": [1] * 8, "kv_len": [64 * 16 + 32 * 16 + 7] * 8, "max_levels": 1, "costs": costs()}
    yield "the same in tiles of 64 rows: the system prompt once, each chat once", {
        "pages": [system + list(range(200 + 100 * (r // 4), 232 + 100 * (r // 4))) + [1000 + r] for r in range(8)],
        "q_len": [1] * 8, "kv_len": [64 * 16 + 32 * 16 + 7] * 8, "max_levels": 4, "costs": costs(tile_rows=64)}
    yield "one level of it: the chats' whole prefixes save more", {
        "pages": [system + list(range(200 + 100 * (r // 4), 232 + 100 * (r // 4))) + [1000 + r] for r in range(8)],
        "q_len": [1] * 8, "kv_len": [64 * 16 + 32 * 16 + 7] * 8, "max_levels": 1, "costs": costs(tile_rows=64)}
    yield "a short prefix of all is left for a long one of most", {
        "pages": [system + [1000 + r] for r in range(7)] + [system[:1] + [2000]],
        "q_len": [1] * 8, "kv_len": [1030] * 7 + [20], "max_levels": 4, "costs": costs()}
    yield "prefills whose rows fill whole tiles gain nothing", {
        "pages": [system + [1000 + r] for r in range(2)], "q_len": [8, 8], "kv_len": [1032, 1032], "max_levels": 4,
        "costs": costs()}
    yield "a window that ends after the prefix", {
        "pages": [system + [1000 + r] for r in range(4)], "q_len": [1] * 4, "kv_len": [1030] * 4, "max_levels": 4,
        "costs": costs(window_left=3)}
    yield "a window that sees the prefix's second half", {
        "pages": [system + [1000 + r] for r in range(4)], "q_len": [1] * 4, "kv_len": [1030] * 4, "max_levels": 4,
        "costs": costs(window_left=512)}


def at_random(source):
    rows, q_len, kv_len = [], [], []
    ids = itertools.count(1000)
    for r in range(source.randint(2, 6)):
        start = list(rows[-1][:source.randint(len(rows[-1]) // 2, len(rows[-1]))]) if rows and source.random() < 0.9 else []
        row = start + [next(ids) for _ in range(source.choice([1, 2, 5, 12]))]
        q = source.choice([0, 1, 1, 1, 1, 2, 9])
        rows.append(row)
        q_len.append(q)
        kv_len.append(max(q, len(row) * 16 - source.randint(0, 15)))
    return {"pages": rows, "q_len": q_len, "kv_len": kv_len, "max_levels": source.choice([1, 2, 3, 4]),
            "costs": costs(tile_rows=source.choice([8, 32, 64]), tile_tokens=source.choice([16, 64]),
                           group_size=source.choice([1, 4, 8]), window_left=source.choice([-1, -1, -1, 0, 20, 100]),
                           kv_token_bytes=source.choice([64, 256, 512]), q_row_bytes=source.choice([0, 256]),
                           partial_row_bytes=source.choice([0, 72, 520]))}


def main():
    cases = []
    for name, case in by_hand():
        cases.append({"name": name, **case})
    source = random.Random(7)
    while len(cases) < 60:
        case = at_random(source)
        best, answers = solve(case)
        if len(answers) == 1 and (len(answers[0]) > 1 or source.random() < 0.03):
            cases.append({"name": f"random {len(cases)}", **case})
    for case in cases:
        best, answers = solve(case)
        assert len(answers) == 1, case["name"]
        case["expected"] = {"saved": best, "groups": answers[0]}
    print('{"source": "computed independently: make_levels.py tries every choice",')
    print(' "groups": "[level, first request, end request, first page, end page]",\n "cases": [')
    print(",\n".join("  " + json.dumps(case) for case in cases))
    print("]}")


main()
