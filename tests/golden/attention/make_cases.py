#!/usr/bin/env python3
"""Writes cases.txt: small attention problems and their results, for src/testing/.

An independent computation: dense matrices per request, no pages, masks as boolean arrays over explicit position arrays.
Needs numpy. Usage: make_cases.py > cases.txt

One array a line: its name, its number of values, its values, row-major. Inputs are multiples of 1/16, exact in every
float type; results have 12 digits.
"""
import sys

import numpy as np

RNG = np.random.default_rng(20260102)


def softmax_attention(q, k, v, visible, logits_of, sink):
    """q [d], k [n, d], v [n, dv], visible [n]: (output, log-sum-exp in base e)."""
    logits = logits_of(k @ q)[visible]
    everything = logits if sink is None else np.append(logits, sink)
    if everything.size == 0:
        return np.zeros(v.shape[1]), -np.inf
    top = everything.max()
    weights = np.exp(everything - top)
    lse = top + np.log(weights.sum())
    return (weights[: logits.size] / weights.sum()) @ v[visible], lse


def emit(name, value):
    flat = np.asarray(value).reshape(-1)
    print(name, flat.size, *(f"{x:.12g}" for x in flat.tolist()))


def floats(*shape):
    return (RNG.integers(-24, 25, size=shape) / 16).astype(np.float32)


def row_of(segment, request):
    groups = segment.get("groups")
    if groups is None:
        return request
    return next((g for g in range(len(groups) - 1) if groups[g] <= request < groups[g + 1]), None)


def scale_factors(*shape):
    return RNG.integers(8, 33, size=shape) / 16


def rotated(x, position, rope):
    """x [..., d] turned as complex numbers, real parts in the first half and imaginary ones in the second."""
    theta, scale = rope
    half = x.shape[-1] // 2
    speeds = theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * speeds * (position / scale))
    return np.concatenate([turned.real, turned.imag], axis=-1)


def make_case(name, heads, kv_heads, dim, dim_v, q_lens, segments, mask="causal", left=-1, right=-1, cap=0.0,
              alibi=False, sinks=False, q_first=None, tail=None, scales=False, rope=None):
    """segments: dicts with lens, and optionally first, groups, all_visible, shard = (world, rank, interleave); rope:
    (theta, scale)."""
    requests = len(q_lens)
    sm_scale = np.float32(0.375)
    slopes = (0.0625 * np.arange(1, heads + 1)).astype(np.float32) if alibi else None
    sink_logits = floats(heads) if sinks else None
    q = floats(sum(q_lens), heads, dim)
    print("case", name)
    emit("sizes", [heads, kv_heads, dim, dim_v, {"none": 0, "causal": 1, "custom": 2}[mask], left, right, requests,
                   len(segments), int(tail is not None)])
    emit("q_lens", q_lens)
    emit("q_first", [] if q_first is None else q_first)
    emit("tail", [] if tail is None else tail)
    emit("logit", np.array([sm_scale, cap], dtype=np.float32))
    emit("slopes", [] if slopes is None else slopes)
    emit("sinks", [] if sink_logits is None else sink_logits)
    emit("rope", [] if rope is None else rope)
    emit("q", q)

    keys = [[] for _ in range(requests)]  # per request, in order: (position, k, v, visible whatever the mask)
    for segment in segments:
        lens = segment["lens"]
        groups = segment.get("groups")
        first = segment.get("first", [0] * len(lens))
        world, rank, interleave = segment.get("shard", (1, 0, 1))
        k_scale = scale_factors(requests, kv_heads) if scales else np.ones((requests, kv_heads))
        v_scale = scale_factors(requests, kv_heads) if scales else np.ones((requests, kv_heads))
        k = floats(sum(lens), kv_heads, dim)
        v = floats(sum(lens), kv_heads, dim_v)
        emit("segment", [world, rank, interleave, int(segment.get("all_visible", False)), int(scales)])
        emit("lens", lens)
        emit("first", first)
        emit("groups", [] if groups is None else groups)
        emit("k", k)
        emit("v", v)
        emit("k_scale", k_scale)
        emit("v_scale", v_scale)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(int)
        for r in range(requests):
            row = row_of(segment, r)
            if row is None:
                continue
            # The shard's tokens, by listing the whole sequence's and keeping this rank's.
            owned = [g for g in range(10000) if (g // interleave) % world == rank][: lens[row]]
            for j, offset in enumerate(owned):
                t = starts[row] + j
                keys[r].append((first[row] + offset, k[t] * k_scale[r][:, None], v[t] * v_scale[r][:, None],
                                segment.get("all_visible", False)))

    bits = []
    outs, lses = [], []
    start = 0
    for r in range(requests):
        positions = np.array([key[0] for key in keys[r]], dtype=int)
        free = np.array([key[3] for key in keys[r]], dtype=bool)
        count = len(positions)
        columns = count if tail is None else tail[r]
        block = RNG.integers(0, 2, size=(q_lens[r], columns)).astype(bool)
        if mask == "custom":
            bits.append(np.packbits(block.reshape(-1), bitorder="little"))
        ends = 0
        for segment in segments:
            row = row_of(segment, r)
            if row is not None:
                ends = segment.get("first", [0] * len(segment["lens"]))[row] + segment["lens"][row]
        for i in range(q_lens[r]):
            p = (ends - q_lens[r] if q_first is None else q_first[r]) + i
            visible = np.ones(count, dtype=bool)
            if mask == "causal":
                visible &= positions <= p
            if mask == "custom":
                visible[count - columns:] &= block[i]
            if left >= 0:
                visible &= positions >= p - left
            if right >= 0:
                visible &= positions <= p + right
            visible |= free
            for h in range(heads):
                kv = h // (heads // kv_heads)
                k = np.array([key[1][kv] for key in keys[r]], dtype=np.float64).reshape(count, dim)
                v = np.array([key[2][kv] for key in keys[r]], dtype=np.float64).reshape(count, dim_v)
                query = q[start + i, h].astype(np.float64)
                if rope is not None:
                    query = rotated(query, p, rope)
                    k = np.array([rotated(key, place, rope) for key, place in zip(k, positions)]).reshape(count, dim)

                def logits_of(dots):
                    x = dots * np.float64(sm_scale)
                    if cap > 0:
                        x = np.float64(cap) * np.tanh(x / np.float64(cap))
                    if slopes is not None:
                        x = x - np.float64(slopes[h]) * np.abs(p - positions)
                    return x

                out, lse = softmax_attention(query, k, v, visible, logits_of,
                                             None if sink_logits is None else np.float64(sink_logits[h]))
                outs.append(out)
                lses.append(lse)
        start += q_lens[r]
    emit("mask", np.concatenate(bits) if bits else [])
    emit("out", np.array(outs))
    emit("lse", np.array(lses))


def main():
    make_case("decode", 4, 2, 8, 8, [1, 1, 1], [{"lens": [5, 1, 9]}])
    make_case("prefill_causal_window", 2, 1, 8, 16, [4, 6], [{"lens": [4, 9]}], left=2)
    make_case("no_mask_two_sided_window", 2, 2, 8, 8, [3], [{"lens": [12], "first": [4]}], mask="none", left=3, right=2,
              q_first=[7])
    make_case("cap_alibi_sinks", 6, 2, 8, 8, [3, 1], [{"lens": [7, 4]}], cap=1.5, alibi=True, sinks=True)
    make_case("custom_all", 2, 1, 8, 8, [3, 0, 2], [{"lens": [5, 2, 7]}], mask="custom")
    make_case("custom_tail_window", 2, 2, 8, 8, [3, 2], [{"lens": [9, 6]}, {"lens": [3, 2], "first": [9, 6]}],
              mask="custom", tail=[4, 2], left=5)
    make_case("shared_prefix", 4, 2, 8, 8, [1, 2, 1, 1],
              [{"lens": [6, 3], "groups": [0, 2, 3]}, {"lens": [4, 2, 3, 5], "first": [6, 6, 3, 0]}])
    make_case("shard_of_a_context", 2, 1, 8, 8, [3, 2],
              [{"lens": [5, 3], "shard": (3, 1, 2)}, {"lens": [3, 2], "first": [14, 9]}], q_first=[14, 9])
    make_case("cross_attention", 2, 1, 8, 8, [2, 1], [{"lens": [5, 0], "all_visible": True}], left=0)
    make_case("empty_rows_with_sinks", 2, 1, 8, 8, [2, 2], [{"lens": [0, 1]}], sinks=True)
    make_case("empty_rows", 2, 1, 8, 8, [2, 2], [{"lens": [0, 1]}])
    make_case("scales", 4, 2, 8, 8, [2, 1], [{"lens": [5, 3]}, {"lens": [2, 1], "first": [5, 3]}], scales=True)
    make_case("rope", 4, 2, 16, 8, [3, 1], [{"lens": [7, 4]}], rope=(10000.0, 1.0))
    make_case("rope_far_scaled_shard", 2, 1, 8, 8, [3, 2],
              [{"lens": [5, 3], "first": [100000, 7], "shard": (3, 1, 2)}, {"lens": [3, 2], "first": [100014, 16]}],
              q_first=[100014, 16], rope=(100.0, 2.5), scales=True, left=12)


if __name__ == "__main__":
    sys.exit(main())
