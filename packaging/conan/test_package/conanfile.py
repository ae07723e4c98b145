"""Builds and runs the consumer of tests/consumer over the package."""

import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout

CONSUMER = "../../../tests/consumer"


class FolioTestConan(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps", "VirtualRunEnv"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # nothing is written beside the sources
        toolchain.cache_variables["FOLIO_KIND"] = "shared" if self.dependencies["folio"].options.shared else "static"
        toolchain.cache_variables["FOLIO_HAS_C_API"] = True
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder=CONSUMER)
        cmake.build()

    def test(self):
        if can_run(self):
            for program in ("consumer_cc", "consumer_backends", "consumer_c"):
                self.run(os.path.join(self.cpp.build.bindir, program), env="conanrun")
