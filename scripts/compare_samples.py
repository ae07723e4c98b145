#!/usr/bin/env python3
"""Compares two files of `folio replay --dump-samples`: the same trace, seed and checks on two devices or backends.

Both runs round outputs and, in some kernels, probabilities p to bfloat16 by themselves, so that bits differ. What may
lie between them is derived: each output is off by at most u |x| for its own rounding and u (|x| <= 2: all synthetic values
lie in (-2, 2), and an output is their mean) for its weights', u = 2^-8, besides float32 sums. Exit code 1 beyond that, or
where rows are missing.
"""

import argparse
import struct
import sys

UNIT = 2.0**-8
FLOAT32_WORK = 2.0**-24 * 64
LARGEST_VALUE = 2.0


def rows_of(path):
    rows = {}
    with open(path, encoding="ascii") as lines:
        for line in lines:
            request, position, layer, bits = line.split()
            rows[int(request), int(position), int(layer)] = bytes.fromhex(bits)
    return rows


def values_of(bits):
    return [struct.unpack("<f", b"\0\0" + bits[i : i + 2])[0] for i in range(0, len(bits), 2)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first")
    parser.add_argument("second")
    arguments = parser.parse_args()
    first, second = rows_of(arguments.first), rows_of(arguments.second)
    if first.keys() != second.keys() or not first:
        sys.exit(f"{len(first)} and {len(second)} rows, {len(first.keys() ^ second.keys())} of them in one file only")
    equal, worst, worst_share = 0, 0.0, 0.0
    for key, bits in first.items():
        if bits == second[key]:
            equal += 1
            continue
        for a, b in zip(values_of(bits), values_of(second[key]), strict=True):
            difference = abs(a - b)
            if not difference <= worst:  # a NaN stays
                worst = difference
            allowed = UNIT * (abs(a) + abs(b)) + 2 * (UNIT + FLOAT32_WORK) * LARGEST_VALUE
            if not difference / allowed <= worst_share:
                worst_share = difference / allowed
    print(f"{len(first)} rows, {equal} of equal bits; largest difference {worst:.3g}, at most {worst_share:.2f} of what is allowed")
    sys.exit(0 if worst_share <= 1.0 else 1)


if __name__ == "__main__":
    main()
