# The commands people type. Each installs what it is missing, builds what it needs, and runs.
# Builds go to build/<preset>, as CMakePresets.json says; `make test PRESET=dev` takes another preset.

PRESET ?= release
# `make run` has a preset of its own: the program alone. Where a GPU is visible and there is a CUDA compiler, it gets the kernels
# of that GPU too, and runs on it.
GPU := $(if $(shell command -v nvcc),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^([89]|[1-9][0-9])\.[0-9]$$' | head -n 1 | tr -d .))
# The program of `make run` is for this processor: the arithmetic of kernels that it would not choose is compiled quickly.
CPU_FLAGS := $(shell grep -m 1 '^flags' /proc/cpuinfo 2>/dev/null)
RUN_KERNEL := $(firstword $(if $(filter amx_bf16,$(CPU_FLAGS)),amx) $(if $(filter avx512vbmi,$(CPU_FLAGS)),avx512) $(if $(filter f16c,$(CPU_FLAGS)),avx2) generic)
RUN_OPTIONS := '-DFOLIO_KERNEL_COMPILE_OPTIONS=-Og;$$<$$<STREQUAL:$$<TARGET_PROPERTY:NAME>,folio_kernels_$(RUN_KERNEL)>:$(if $(filter avx2,$(RUN_KERNEL)),-O2,-O1)>'
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
BUILD := build/$(PRESET)
TRACE ?= examples/traces/mooncake_excerpt.jsonl

export CTEST_PARALLEL_LEVEL ?= $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help configure python_environment build run test_programs test bench install check tidy docs fuzz ci clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

# Where there is no GPU, tests run no kernel of one: `make test` compiles each for one architecture then, and quickly.
TEST_OPTIONS := $(if $(GPU),-DFOLIO_CUDA_QUICK=OFF,-DFOLIO_CUDA_QUICK=ON)

configure:
	@scripts/install_deps.sh build
	cmake --preset $(PRESET) -DFOLIO_CUDA_QUICK=OFF

build: configure ## build everything: library, program, examples, tests, and CUDA kernels where the toolkit is
	cmake --build $(BUILD) -j $(JOBS)

run: ## serve an excerpt of a real conversation trace on this machine's CPU, or its GPU
	@scripts/install_deps.sh run
	cmake --preset run $(RUN_OPTIONS) $(if $(GPU),-DFOLIO_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$(GPU)-real)
	cmake --build build/run -j $(JOBS) --target folio_cli
	build/run/tools/folio replay $(TRACE) $(if $(GPU),--device cuda)

# Where no package index can be reached, the Python module is left out, with a message; continuous integration insists.
python_environment:
	@scripts/install_deps.sh build python || scripts/install_deps.sh build

test_programs: python_environment
	cmake --preset $(PRESET) $(TEST_OPTIONS)
	cmake --build $(BUILD) -j $(JOBS)

test: test_programs ## build everything and run all tests
	scripts/run_tests.sh --preset $(PRESET)

bench: ## measure the attention kernels beside this machine's own limits
	@scripts/install_deps.sh build bench
	cmake --preset bench
	cmake --build build/bench -j $(JOBS)
	build/bench/tools/folio bench
	@for program in build/bench/bench/folio_*_bench; do echo "$$program"; $$program || exit 1; done

install: build ## install the library, headers and program under PREFIX (/usr/local)
	cmake --install $(BUILD) --prefix $(PREFIX)

check: ## run the source checks of continuous integration (seconds)
	scripts/checks/run_all.sh $(BUILD)

tidy: configure ## run clang-tidy over all sources (minutes)
	cmake --preset $(PRESET) -B build/apart -DFOLIO_SOURCES_TOGETHER=1
	scripts/checks/run_clang_tidy.sh --all build/apart

docs: ## build the site of docs/ with its API reference into build/docs
	@scripts/install_deps.sh docs
	build/site/bin/mkdocs build --strict

fuzz: ## fuzz every target for MINUTES (5) minutes
	scripts/fuzz.sh $(or $(MINUTES),5)

ci: ## run what continuous integration runs
	.ci/run

clean: ## remove everything that was built
	rm -rf build
