#!/usr/bin/env python3
"""A wheel and its source distribution hold what they must and nothing else; prints what decides the wheel's tag.

  inspect_wheel.py cpu|cu13 WHEEL SDIST

Needs pyelftools, which auditwheel brings.
"""

import email
import io
import pathlib
import re
import sys
import tarfile
import zipfile

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from sources import project_files, report

NAMES = {"cpu": "folio-attention", "cu13": "folio-attention-cu13"}
LIMITS = {"cpu": 10, "cu13": 40}  # MB of 10^6 bytes
# What every Linux with a Python has. The unwinder is shared, so that a process has one; libstdc++ is inside.
SYSTEM = {"ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0",
          "librt.so.1"}
PACKAGE = pathlib.Path("bindings/python/folio")
SDIST_ROOTS = ("bindings/python", "cmake", "include", "src", "tools")
SDIST_FILES = {"CMakeLists.txt", "LICENSE", "docs/python.md", "examples/traces/mooncake_excerpt.jsonl", "pyproject.toml"}
PROGRAM = "folio/bin/folio"
NEWEST_GLIBC = (2, 34)
TEST = re.compile(r"_test(_util)?\.(cc|hpp)$")


def glibc_version(name):
    match = re.fullmatch(r"GLIBC_([0-9.]+)", name)
    return tuple(map(int, match[1].split("."))) if match else (0,)


def deciding_symbols(elf):
    """The newest glibc version that the module asks for, and the symbols that do."""
    versions = {}
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, entries in section.iter_versions():
                versions.update({entry["vna_other"]: entry.name for entry in entries})
    wanted = {}
    table, numbers = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
    for index, symbol in enumerate(table.iter_symbols()):
        name = versions.get(numbers.get_symbol(index)["ndx"])
        if symbol["st_shndx"] == "SHN_UNDEF" and name:
            wanted.setdefault(name, []).append(symbol.name)
    newest = max(wanted, key=glibc_version)
    return newest, sorted(wanted[newest])


def elf_problems(name, data, problems):
    """What a module and a program have in common. Returns the file, and prints what decides the platform tag."""
    elf = ELFFile(io.BytesIO(data))
    needed = {tag.needed for section in elf.iter_sections() if isinstance(section, DynamicSection)
              for tag in section.iter_tags("DT_NEEDED")}
    problems += [f"{name} needs {library}, which not every system has" for library in sorted(needed - SYSTEM)]
    if elf.get_section_by_name(".symtab"):
        problems.append(f"{name} is not stripped")
    newest, symbols = deciding_symbols(elf)
    shown = ", ".join(symbols[:8]) + (f" and {len(symbols) - 8} more" if len(symbols) > 8 else "")
    print(f"  {name}: {newest} is the newest version asked for: {shown}")
    if glibc_version(newest) > NEWEST_GLIBC:
        problems.append(f"{name} asks for {newest}; wheels are for systems with glibc {'.'.join(map(str, NEWEST_GLIBC))}")
    print(f"  {name}: shared libraries: {', '.join(sorted(needed))}")
    return elf


def module_problems(name, data, problems):
    elf = elf_problems(name, data, problems)
    exported = {symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
                if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"}
    if exported != {"PyInit__folio"}:
        problems.append(f"{name} exports {sorted(exported)}; PyInit__folio is enough")


def wheel_problems(variant, path):
    problems = []
    name, version, python, abi, platform = path.name.removesuffix(".whl").split("-")
    megabytes = path.stat().st_size / 1e6
    print(f"{path.name}: {megabytes:.1f} MB (limit {LIMITS[variant]})")
    if megabytes > LIMITS[variant]:
        problems.append(f"{path.name} has {megabytes:.1f} MB; the limit is {LIMITS[variant]}")
    if name != NAMES[variant].replace("-", "_"):
        problems.append(f"{path.name} is not named {NAMES[variant]}")
    if not all(tag.startswith("manylinux") for tag in platform.split(".")):
        problems.append(f"platform tag {platform} is not a manylinux one")
    if int(python.removeprefix("cp3")) >= 12 and (python, abi) != ("cp312", "abi3"):
        problems.append(f"tag {python}-{abi}: from Python 3.12 on it must be cp312-abi3")
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        info = f"{name}-{version}.dist-info"
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        modules = [name for name in names if re.fullmatch(r"folio/_folio\.[\w.-]*so", name)]
        if len(modules) != 1:
            problems.append(f"extension modules: {modules}")
        for module in modules:
            module_problems(module, wheel.read(module), problems)
        if PROGRAM in names:
            elf_problems(PROGRAM, wheel.read(PROGRAM), problems)
            if not wheel.getinfo(PROGRAM).external_attr >> 16 & 0o111:
                problems.append(f"{PROGRAM} is not executable")
    if metadata["Name"] != NAMES[variant]:
        problems.append(f"METADATA names it {metadata['Name']}")
    problems += [f"it depends on {requirement}" for requirement in metadata.get_all("Requires-Dist", [])
                 if "extra ==" not in requirement]
    package = {str("folio" / file.relative_to(PACKAGE)) for file in project_files() if file.is_relative_to(PACKAGE)}
    expected = package | set(modules) | {"folio/_folio.pyi", f"{info}/METADATA", f"{info}/RECORD", f"{info}/WHEEL",
                                         f"{info}/entry_points.txt", f"{info}/licenses/LICENSE", PROGRAM,
                                         "folio/traces/mooncake_excerpt.jsonl"}
    optional = {f"{info}/sboms/auditwheel.cdx.json"}
    problems += [f"{path.name} lacks {name}" for name in sorted(expected - names)]
    problems += [f"{path.name} holds {name}, which nobody needs" for name in sorted(names - expected - optional)]
    return problems


def sdist_problems(path):
    with tarfile.open(path) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()} - {"PKG-INFO"}
    expected = {str(file) for file in project_files()
                if str(file) in SDIST_FILES or (str(file).startswith(tuple(root + "/" for root in SDIST_ROOTS))
                                                and not TEST.search(file.name))}
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {len(names)} files")
    return ([f"{path.name} lacks {name}" for name in sorted(expected - names)] +
            [f"{path.name} holds {name}, which building does not need" for name in sorted(names - expected)])


def main():
    variant, wheel, sdist = sys.argv[1], *(pathlib.Path(name).resolve() for name in sys.argv[2:4])
    problems = wheel_problems(variant, wheel) + sdist_problems(sdist)
    return report("wheel", problems)


if __name__ == "__main__":
    sys.exit(main())
