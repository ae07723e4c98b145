"""Random values for fuzz_module.py: what a caller might pass by mistake, and worse."""

import ml_dtypes
import numpy as np

from foreign_array import BFLOAT, CUDA, ForeignArray

NUMBERS = [0, 1, 2, 3, 7, 8, 16, 33, -1, -2, 2**15, 2**31 - 1, -2**31, 2**31, 2**32, 2**63 - 1, -2**63, 2**64, 10**30]
FLOATS = [0.0, -0.0, 1.0, 0.5, -1.0, 1e-30, 1e30, 1e39, float("nan"), float("inf"), -float("inf")]
OTHERS = [None, True, "", "generic", b"", (), [], {}, [1, 2], object(), repr]
DTYPES = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.uint16, np.int8, np.bool_, np.complex64,
          np.dtype(">f4"), np.dtype(">i4"), ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
          ml_dtypes.int4]


FOREIGN = []  # what is borrowed from them does not keep them alive


def scalar(random):
    return random.choice(random.choice([NUMBERS, FLOATS, OTHERS]))


def array(random):
    """An array of any type, of no more than a few thousand elements."""
    shape = [random.choice([0, 1, 1, 2, 3, 8, 16]) for _ in range(random.choice([0, 1, 1, 2, 3, 3, 4, 4, 5, 6]))]
    while np.prod(shape) > 5000:
        shape[random.randrange(len(shape))] = 1
    kind = random.randrange(12)
    if kind == 0:
        return np.full(shape, random.choice(["x", None]), object)
    if kind == 1:
        return np.full(shape, np.datetime64("2020-01-01"))
    values = np.random.default_rng(random.getrandbits(32)).integers(-3, 40, shape)
    return values.astype(random.choice(DTYPES))


def spoil_entries(values, random):
    """Some integers of a list are others: offsets that fall, lengths below 0, ids beyond everything."""
    values = values.copy()
    if values.size:
        low, high = np.iinfo(values.dtype).min, np.iinfo(values.dtype).max
        for _ in range(random.choice([1, 1, 2, values.size])):
            place = np.unravel_index(random.randrange(values.size), values.shape)
            values[place] = random.choice([-1, 0, 1, 2, 5, 17, 100, 2**20, low, high, high - 1, high - 30])
    return values


def spoil_shape(values, random):
    kind = random.randrange(8)
    if kind == 0 or values.ndim == 0:
        return values[None]
    axis = random.randrange(values.ndim)
    if kind == 1 and values.size:
        return values[..., 0]
    if kind == 2:
        return np.take(values, range(values.shape[axis] - 1), axis) if values.shape[axis] else values
    if kind == 3:
        return np.concatenate([values, values], axis)
    if kind == 4:
        return np.take(values, [], axis)
    if kind == 5:
        return np.zeros([0] * values.ndim, values.dtype)
    if kind == 6:
        return values.reshape(-1)
    return values.swapaxes(0, axis)


def spoil_layout(values, random):
    """The same values elsewhere in memory: valid where such strides are."""
    kind = random.randrange(7)
    if kind == 0:
        return np.asfortranarray(values)
    if kind == 1 and values.ndim:
        axis = random.randrange(values.ndim)
        return np.flip(np.flip(values, axis).copy(), axis)
    if kind == 2 and values.ndim:
        axis = random.randrange(values.ndim)
        wide = np.repeat(values, 2, axis)
        return wide[tuple(slice(None, None, 2) if i == axis else slice(None) for i in range(values.ndim))]
    if kind == 3:
        return np.broadcast_to(values[:1], values.shape) if values.ndim and values.shape[0] else values
    if kind == 4:
        memory = np.zeros(values.nbytes + 1, np.uint8)[1:]
        copy = memory.view(values.dtype).reshape(values.shape) if values.nbytes else values.copy()
        copy[...] = values
        return copy
    if kind == 5:
        copy = values.copy()
        copy.flags.writeable = False
        return copy
    return values.copy()


def spoil(value, random):
    """Something else in the place of an argument; now and then something that is as good."""
    if isinstance(value, np.ndarray):
        kind = random.randrange(8)
        if kind <= 1 and value.dtype.kind in "iu" and value.dtype.itemsize >= 4:
            return spoil_entries(value, random)
        if kind <= 3:
            return spoil_shape(value, random)
        if kind == 4:
            return spoil_layout(value, random)
        if kind == 5:
            return value.astype(random.choice(DTYPES))
        if kind == 6:
            return random.choice([np.ma.array(np.zeros(value.shape)), value.tolist(), None, array(random)])
        if value.dtype.kind in "fiu" and value.dtype.itemsize > 1:
            FOREIGN.append(ForeignArray(value, *random.choice([(), (2, CUDA, 1), (BFLOAT,), (77,)])))
            return FOREIGN[-1]
        return value
    if isinstance(value, float):
        return random.choice([*FLOATS, scalar(random)])
    return random.choice([value, scalar(random), scalar(random), array(random)])
