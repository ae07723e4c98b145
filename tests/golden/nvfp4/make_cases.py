"""Golden vectors of NVFP4 quantisation, independent of Folio: roundings by ml_dtypes, the order of the scale factors by
reshaping the padded matrix into (row tiles, 4, 32, block tiles, 4) and permuting, as cuBLAS documents its layout.

    python make_cases.py > cases.json        (numpy, ml_dtypes)
"""

import json

import ml_dtypes
import numpy as np

E2M1 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn


def to_e4m3(values):
    """Nearest even, saturated; ml_dtypes alone turns what is too large into NaN."""
    return np.clip(values, -448.0, 448.0).astype(np.float32).astype(E4M3)


def to_e2m1(values):
    return np.clip(values, -6.0, 6.0).astype(np.float32).astype(E2M1)


def swizzle(scales):
    rows, blocks = scales.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-blocks // 4) * 4), np.uint8)
    padded[:rows, :blocks] = scales
    tiles = padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def quantize(matrix, global_scale):
    rows, columns = matrix.shape
    blocks = matrix.reshape(rows, columns // 16, 16)
    largest = np.abs(blocks).max(axis=2)
    scales = to_e4m3(np.float32(global_scale) * largest / np.float32(6))
    wide = scales.astype(np.float32)[:, :, None]
    scaled = np.divide(blocks * np.float32(global_scale), wide, out=np.zeros_like(blocks), where=wide != 0)
    codes = to_e2m1(scaled).view(np.uint8).reshape(rows, columns) & 15
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return pairs, scales.view(np.uint8)


def case(name, matrix, global_scale, first_row=0, total_rows=None):
    matrix = np.asarray(matrix, np.float32)
    pairs, scales = quantize(matrix, global_scale)
    whole = np.zeros((total_rows or matrix.shape[0], scales.shape[1]), np.uint8)
    whole[first_row:first_row + matrix.shape[0]] = scales
    swizzled = swizzle(whole)
    return {
        "name": name, "rows": matrix.shape[0], "columns": matrix.shape[1], "first_row": first_row,
        "total_rows": whole.shape[0], "global_scale": float(global_scale),
        "values": [float(x) for x in matrix.reshape(-1)],
        "codes": [int(x) for x in pairs.reshape(-1)],
        "scale_bytes": int(swizzled.size),
        # Padding and rows of others are left out: [byte, value].
        "scales": [[int(i), int(swizzled[i])] for i in owned(whole.shape, first_row, matrix.shape[0])],
    }


def owned(shape, first_row, rows):
    marks = np.zeros(shape, np.uint8)
    marks[first_row:first_row + rows] = 1
    return np.flatnonzero(swizzle(marks))


def main():
    rng = np.random.default_rng(20261121)
    ties = np.array([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]])
    wide = rng.standard_normal((3, 64)).astype(np.float32) * np.exp2(rng.integers(-6, 7, (3, 64))).astype(np.float32)
    wide[1, 16:32] = 0.0
    tall = (np.round(rng.standard_normal((40, 80)) * 64) / 64).astype(np.float32)
    cases = [
        case("ties to even at scale 1", ties, 1.0),
        case("tiny blocks have a scale of 0", ties * 1e-4, 1.0),
        case("a scale beyond 448 saturates", ties * 4000.0, 1.0),
        case("subnormal scales", ties * 0.004, 1.0),
        case("mixed magnitudes, a block of zeros", wide, 3.5),
        case("rows across the 32- and 128-row tiles, 5 blocks", tall, 100.0, first_row=110, total_rows=150),
    ]
    document = {"source": "computed independently: make_cases.py with ml_dtypes " + ml_dtypes.__version__,
                "cases": cases}
    print(json.dumps(document, indent=None, separators=(",", ":")).replace('{"name"', '\n{"name"'))


if __name__ == "__main__":
    main()
