"""Folio for Conan 2, built from the sources that this recipe stands in: conan create packaging/conan."""

import os
import pathlib
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain
from conan.tools.files import copy, rmdir

EXPORTED = ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*")


class FolioConan(ConanFile):
    name = "folio"
    description = "Paged attention for LLM serving, on CPUs and NVIDIA GPUs"
    license = "Apache-2.0"
    topics = ("attention", "llm", "inference")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "cuda": [True, False], "mpi": [True, False]}
    default_options = {"shared": True, "cuda": False, "mpi": False}

    @property
    def _root(self):
        return pathlib.Path(self.recipe_folder).parents[1]

    def set_version(self):
        header = (self._root / "include/folio/version.hpp").read_text()
        self.version = re.search(r'FOLIO_VERSION_STRING "([0-9.]+)"', header).group(1)

    def export_sources(self):
        for pattern in EXPORTED:
            copy(self, pattern, self._root, self.export_sources_folder)

    def validate(self):
        check_min_cppstd(self, 20)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # nothing is written beside the sources
        for name, value in {
            "FOLIO_CUDA": "ON" if self.options.cuda else "OFF",
            "FOLIO_MPI": "ON" if self.options.mpi else "OFF",
            "FOLIO_NCCL": "OFF",
            "FOLIO_BUILD_TESTS": False,
            "FOLIO_BUILD_TOOLS": False,
            "FOLIO_BUILD_EXAMPLES": False,
            "FOLIO_BUILD_PYTHON": "OFF",
            "FOLIO_BUILD_STATIC_TOO": False,
            "FOLIO_SOURCES_TOGETHER": "16",
        }.items():
            toolchain.cache_variables[name] = value
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        rmdir(self, os.path.join(self.package_folder, "share"))

    def package_info(self):
        # Folio's own CMake package is the one that consumers find, with its components.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "folio")]
        self.cpp_info.libs = ["folio_backends", "folio_testing", "folio"]
        if not self.options.shared:
            self.cpp_info.system_libs = ["pthread", "m"]
