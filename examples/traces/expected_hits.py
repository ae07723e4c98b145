#!/usr/bin/env python3
"""Counts a Mooncake trace's prefix hits: requests one after the other, in order of arrival, nothing ever evicted.

Shares no code with Folio: its tests compare the page manager with this. Prints JSON with, for each scale (lengths divided by it,
rounded up) and page size: the input tokens, and the tokens found in full pages of earlier requests, where at least one token of
every request is computed. "blocks" counts whole hash blocks at scale 1, without and with partly filled last blocks.
"""
import json
import sys

BLOCK = 512


def ceil_div(a, b):
    return -(-a // b)


def page_hits(rows, scale, page):
    """Tokens are (hash, offset) pairs; a page's identity is all tokens up to its end."""
    per_hash = BLOCK // scale
    seen = set()
    total = hits = 0
    for row in rows:
        length = max(1, ceil_div(row["input_length"], scale))
        ids = row["hash_ids"]
        total += length
        found = 0
        searching = True
        prefix = []
        for end in range(page, length + 1, page):
            # The prefix up to `end` is given by its whole hashes and how far it reaches into the last one.
            blocks = ceil_div(end, per_hash)
            key = (tuple(ids[:blocks]), end)
            if searching and key in seen and end <= length - 1:
                found = end
            else:
                searching = False
            prefix.append(key)
        seen.update(prefix)
        hits += found
    return {"scale": scale, "page_size": page, "input_tokens": total, "hit_tokens": hits}


def block_hits(rows):
    seen = set()
    full = partial = 0
    for row in rows:
        matched = 0
        for block in row["hash_ids"]:
            if block not in seen:
                break
            matched += 1
        seen.update(row["hash_ids"])
        length = row["input_length"]
        full += min(length // BLOCK, matched) * BLOCK
        partial += min(length, matched * BLOCK)
    return {"full_blocks": full, "with_partial": partial}


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    rows.sort(key=lambda row: row["timestamp"])
    pages = [page_hits(rows, scale, page) for scale, page in ((1, 512), (32, 16), (32, 8), (64, 16))]
    print(json.dumps({"requests": len(rows), "blocks": block_hits(rows), "pages": pages}, indent=1))


if __name__ == "__main__":
    main()
