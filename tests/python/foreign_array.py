"""Arrays of a library that speaks DLPack alone, on whatever device they claim to be: made by hand, over a numpy array's
memory. For what numpy cannot express (bfloat16, fp8, GPUs) without needing a framework or a GPU."""

import ctypes

CPU, CUDA = 1, 2
FLOAT, BFLOAT, FLOAT8_E4M3FN, FLOAT8_E5M2 = 2, 4, 10, 12


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Element(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _Element),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", _Deleter)]

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class ForeignArray:
    """`array`'s memory under another name: its code and device are what the caller says. Releases are counted where
    asked for: a deleter in Python may not run while an exception is on its way, which only C can promise."""

    def __init__(self, array, code=FLOAT, device=CPU, index=0, count_releases=False):
        self.array = array
        self.exports = 0
        self.releases = 0
        integers = ctypes.c_int64 * array.ndim
        self._shape = integers(*array.shape)
        self._strides = integers(*(stride // array.itemsize for stride in array.strides))
        self._deleter = _Deleter(self._release) if count_releases else _Deleter()
        kind = {"i": 0, "u": 1}.get(array.dtype.kind, code) if code == FLOAT else code
        self._managed = _Managed(
            _Tensor(array.ctypes.data, _Device(device, index), array.ndim, _Element(kind, 8 * array.itemsize, 1),
                    self._shape, self._strides, 0), None, self._deleter)

    def _release(self, _):
        self.releases += 1

    def __dlpack_device__(self):
        return self._managed.tensor.device.type, self._managed.tensor.device.id

    def __dlpack__(self, stream=None):
        self.exports += 1
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)
