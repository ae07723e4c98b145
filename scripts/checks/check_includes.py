#!/usr/bin/env python3
"""Includes follow the order of docs/architecture.md: a directory includes only what stands below it.

src/testing and src/backends are libraries of their own, which see public headers of the others only; all see src/core and
src/platform/cuda, which each compiles in. src/capi/backends belongs to the library of the backends, and sees of the other C functions
src/capi/common. Public headers include public headers only; tools, examples and bindings see public headers only; the library uses the
standard library and the operating system, nothing else.
"""

import pathlib
import re
import sys

from sources import ROOT, cpp_files, is_test, read, report

# From the bottom up.
LAYERS = ["core", "platform", "simd", "ptx", "kvcache", "scheduler", "kernels", "attention", "testing", "distributed", "backends", "capi", "capi_backends"]

# The layer that implements a public header: lower layers may not include it. include/folio/types belongs to nobody.
PUBLIC_LAYER = {
    "folio/version.hpp": "core",
    "folio/context.hpp": "platform",
    "folio/page_table.hpp": "kvcache",
    "folio/kv_cache.hpp": "kvcache",
    "folio/pools.hpp": "kvcache",
    "folio/shared_prefix.hpp": "kvcache",
    "folio/cascade.hpp": "attention",
    "folio/merge.hpp": "attention",
    "folio/paged_attention.hpp": "attention",
    "folio/quantize.hpp": "attention",
    "folio/table_ops.hpp": "attention",
    "folio/attention.hpp": "attention",
    "folio/log.hpp": "attention",
    "folio/folio.hpp": "attention",
    "folio/sealed_plan.hpp": "attention",
    "folio/reference.hpp": "testing",
    "folio/verify.hpp": "testing",
}

# The libraries beside the core see of it what its users see, and the helpers that every library compiles in.
OTHER_LIBRARIES = ["testing", "backends", "capi_backends"]
HELPERS = re.compile(r"^(core|platform/cuda|capi/common)/")


def layer_of(path):
    """Of a path below src/: its directory, but for the C functions of another library."""
    return "capi_backends" if path.startswith("capi/backends/") else path.split("/")[0]


# System headers, besides those of the C++ standard library, that src/ may use.
SYSTEM_HEADERS = re.compile(
    r"^(immintrin|arm_neon|cpuid|unistd|sched|pthread|dlfcn|cuda|cuda_runtime|cuda_runtime_api|cuda_bf16|cuda_fp16|cuda_fp8)\.h$"
    r"|^(sys|linux|asm|cuda|nccl|nvtx3)/|^(nccl|mpi)\.h$")
STANDARD_HEADER = re.compile(r"^[a-z_]+$")
C_HEADER = re.compile(r"^(stdint|stddef|stdbool)\.h$")
TEST_HEADER = re.compile(r"^(gtest|gmock|nlohmann)/")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def public_layer(header):
    if header.startswith("folio/backends/"):
        return "backends"
    if header.startswith("folio/distributed"):
        return "distributed"
    if header.startswith("folio/c/"):
        return "capi_backends" if header.startswith("folio/c/backends") else "capi"
    if header.startswith("folio/kvcache/"):
        return "kvcache"
    return PUBLIC_LAYER.get(header)


def below(layer, other):
    """True if code of `layer` may include what belongs to `other`."""
    return LAYERS.index(other) <= LAYERS.index(layer)


def adapter(path):
    """The engine adapter that a file under backends/ belongs to: src/backends/flashinfer/x.hpp -> flashinfer, and so is
    include/folio/backends/flashinfer.hpp, the door to a directory of that name."""
    parts = pathlib.PurePath(path).parts
    rest = parts[parts.index("backends") + 1:]
    stem = pathlib.PurePath(rest[0]).stem
    return stem if len(rest) > 1 or (ROOT / "include/folio/backends" / stem).is_dir() else "common"


# Headers of adapters that only tests use: these may be shared.
TEST_AIDS = re.compile(r"_test_util\.hpp$")


def check_adapter(path, header):
    mine, theirs = adapter(path), adapter(header)
    tests = (is_test(path) or TEST_AIDS.search(path.name)) and TEST_AIDS.search(header)
    if theirs not in ("common", mine) and not tests:
        return f"adapter '{mine}' includes adapter '{theirs}': adapters share only backends/common"
    return None


def check_public(path, quote, header):
    if header.startswith("folio/"):
        if path.parts[2] == "c" and not header.startswith("folio/c/"):
            return "a header of the C interface includes only its like, stdint.h, stddef.h and stdbool.h"
        if path.parts[2] == "types" and not header.startswith("folio/types/"):
            return "a header of include/folio/types includes only its like and the standard library"
        if path.parts[2] == "backends" and header.startswith("folio/backends/"):
            return check_adapter(path, header)
        return None if (ROOT / "include" / header).exists() else "there is no such public header"
    if path.parts[2] == "c":
        return None if C_HEADER.match(header) else "the C header includes stdint.h, stddef.h and stdbool.h only"
    if quote == "<" and STANDARD_HEADER.match(header):
        return None
    return "public headers include public headers and the standard library only"


def check_source(path, quote, header):
    layer = layer_of("/".join(path.parts[1:]))
    if layer not in LAYERS:
        return f"src/{layer} is not in the order of docs/architecture.md (scripts/checks/check_includes.py, LAYERS)"
    if header.startswith("folio/types/"):
        return None
    if header.startswith("folio/"):
        owner = public_layer(header)
        if owner is None:
            return f"{header} has no layer (scripts/checks/check_includes.py, PUBLIC_LAYER)"
        if owner in OTHER_LIBRARIES and owner != layer and (owner, layer) != ("backends", "capi_backends"):
            return None if is_test(path) else f"{header} belongs to the library {owner}, which the others do not link"
        if not below(layer, owner):
            return f"{header} belongs to {owner}, which stands above {layer}"
        return check_adapter(path, header) if owner == "backends" and layer == "backends" else None
    if quote == '"':
        if not (ROOT / "src" / header).exists():
            return "own headers are included by their path from src/ or include/"
        owner = layer_of(header)
        if owner == "testing" and is_test(path):  # the oracle
            return None
        if not below(layer, owner):
            return f"{owner} stands above {layer}"
        if owner != layer and {owner, layer} & set(OTHER_LIBRARIES) and not (HELPERS.match(header) or is_test(path)):
            return f"{owner} and {layer} are in different libraries, which see public headers of each other only"
        return check_adapter(path, header) if owner == "backends" and layer == "backends" else None
    if STANDARD_HEADER.match(header) or SYSTEM_HEADERS.match(header) or (is_test(path) and TEST_HEADER.match(header)):
        return None
    return "the library depends on the standard library and the system only"


def check_client(path, quote, header):
    if quote == "<" or header.startswith("folio/"):
        return None
    if any((base / header).exists() for base in (ROOT / path.parts[0], ROOT / path.parent)):
        return None
    if (ROOT / "src" / header).exists():
        return f"{path.parts[0]}/ sees public headers only"
    return "there is no such header"


def main():
    problems = []
    for path in cpp_files():
        if path.parts[0] == "include":
            check = check_public
        elif path.parts[0] == "src":
            check = check_source
        elif path.parts[0] in ("tools", "examples", "bindings"):
            check = check_client
        else:
            continue
        text = read(path)
        for match in INCLUDE.finditer(text):
            quote, header = match.groups()
            problem = "includes do not climb ('..')" if ".." in header else check(path, quote, header)
            if problem:
                line = text.count("\n", 0, match.start(1)) + 1
                problems.append(f"{path}:{line}: includes {header}: {problem}")
    return report("includes", problems)


if __name__ == "__main__":
    sys.exit(main())
