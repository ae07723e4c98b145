#!/usr/bin/env python3
"""The Python module uses nothing of Python's C API but the limited API of 3.12, so that one wheel serves 3.12 and later.

nanobind wraps most of it. What the bindings name themselves stands in LIMITED; https://docs.python.org/3.12/c-api/stable.html
says what may be added. (Compilers see the difference only where they build for the stable ABI, which takes a Python 3.12.)
"""

import re
import sys

from sources import code_only, project_files, read, report

LIMITED = set("""
PyAnySet_Check PyBool_Check PyBytes_Check PyCallable_Check PyCapsule_GetPointer PyCapsule_IsValid PyCapsule_New
PyDict_Check PyErr_Clear PyErr_ExceptionMatches PyErr_NewExceptionWithDoc PyErr_Occurred PyErr_SetObject
PyErr_SetString PyEval_RestoreThread PyEval_SaveThread PyExc_RuntimeError PyExc_TypeError PyExc_ValueError
PyFloat_Check PyImport_GetModule PyIndex_Check PyList_Check PyLong_AsLongLongAndOverflow PyLong_Check PyModule_GetName
PyNumber_Index PyObject PyObject_CallMethodObjArgs PyObject_CallNoArgs PyObject_GetAttr PyObject_IsInstance
PyRange_Check PyRange_Type PySequence_Check PySequence_List PyThreadState PyTuple_Check PyTypeObject PyType_Check
PyType_IsSubtype PyUnicode_AsUTF8AndSize PyUnicode_Check PyUnicode_InternFromString Py_DECREF Py_INCREF
Py_IsInitialized Py_NotImplemented Py_TYPE Py_ssize_t
""".split())
NAME = re.compile(r"\b_?Py(?:_|[A-Z])\w*")
FIELD = re.compile(r"->\s*((?:tp|ob|nb|sq|mp|am)_\w+)")


def main():
    problems = []
    for path in project_files():
        if path.parts[:2] != ("bindings", "python") or path.suffix not in (".cc", ".hpp"):
            continue
        for number, line in enumerate(code_only(read(path)).splitlines(), 1):
            problems += [f"{path}:{number}: {name} is not known to be in the limited API of Python 3.12"
                         for name in NAME.findall(line) if name not in LIMITED]
            problems += [f"{path}:{number}: {name} is a field that the limited API hides" for name in FIELD.findall(line)]
    return report("stable ABI", problems)


if __name__ == "__main__":
    sys.exit(main())
