# The commands people type. Each installs what it is missing, builds what it needs, and runs.
# Builds go to build/<preset>, as CMakePresets.json says; `make test PRESET=dev` takes another preset.

PRESET ?= release
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
BUILD := build/$(PRESET)
TRACE ?= examples/traces/mooncake_excerpt.jsonl

export CTEST_PARALLEL_LEVEL ?= $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help configure python_environment build run test bench install check tidy docs fuzz ci clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

configure:
	@scripts/install_deps.sh build
	cmake --preset $(PRESET)

build: configure ## build everything: library, program, examples, tests, and CUDA kernels where the toolkit is
	cmake --build $(BUILD) -j $(JOBS)

run: configure ## serve an excerpt of a real conversation trace on this machine's CPU
	cmake --build $(BUILD) -j $(JOBS) --target folio_cli
	$(BUILD)/tools/folio replay $(TRACE)

# Where no package index can be reached, the Python module is left out, with a message; continuous integration insists.
python_environment:
	@scripts/install_deps.sh build python || scripts/install_deps.sh build

test: python_environment ## build everything and run all tests
	@$(MAKE) --no-print-directory build
	ctest --preset $(PRESET)

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
	scripts/checks/run_clang_tidy.sh --all $(BUILD)

docs: ## build the site of docs/ with its API reference into build/docs
	@scripts/install_deps.sh docs
	build/site/bin/mkdocs build --strict

fuzz: ## fuzz every target for MINUTES (5) minutes
	scripts/fuzz.sh $(or $(MINUTES),5)

ci: ## run what continuous integration runs
	.ci/run

clean: ## remove everything that was built
	rm -rf build
