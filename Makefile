# A thin front to CMake, ctest and pytest.
SHELL := /bin/sh
.DEFAULT_GOAL := all
PREFIX ?= /usr/local
# The presets that `make check` builds beside release; some of them are only compiled.
ALSO := debug asan tsan clang aarch64 musl

# The pieces of check-long run one at a time even with -j, since some need a quiet machine.
.NOTPARALLEL:
.PHONY: help all demo peers bench abis model docs build-tests check check-long install deb wheel clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1 \2/p' Makefile | while read -r name text; do printf '%-12s %s\n' "$$name" "$$text"; done

all: build/release/build.ninja ## build the libraries and the tool
	cmake --build --preset release

build/%/build.ninja:
	cmake --preset $* >/dev/null

demo: ## install what is missing, build, and compare the allocators on this machine
	scripts/setup demo
	$(MAKE) --no-print-directory all
	scripts/demo

# Other allocators to compare with, built from their newest sources; see bench/peers.
peers: ## build the newest releases of other allocators, to compare with
	scripts/peers

# The whole suite under each of them: an hour or two, in which nothing else should run.
bench: ## run the whole suite under every allocator: an hour or two
	scripts/setup bench
	$(MAKE) --no-print-directory all
	scripts/peers
	bin/calm bench --suite full -o build/bench.json --picture build/bench.png

# The kernel with fewer TLB shootdowns beside one without, on emulated machines, and a test of its TLBs' coherence: see
# docs/abis.md. Builds an emulator and the kernels first, from Debian's sources.
abis: ## count the shootdowns that patched kernels save, on emulated machines
	scripts/setup abis
	$(MAKE) --no-print-directory all
	kernel/abis/build all --variants baseline,abis,debug
	bench/abis

# The protocol of offload mode, and ABIS, checked by SPIN: see tests/model and kernel/abis/model.
model: ## check the models of offload mode and of ABIS
	scripts/model

# README.md, docs/ and a reference that is made from the code, as mkdocs.yml says. A dead link ends it. The variable
# silences advertisements for a successor of mkdocs.
docs: ## build the documentation as a site in build/docs
	scripts/setup docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build
	@echo "docs: build/docs/index.html"

# All that tests need.
build-tests: ## build what the tests run
	scripts/setup check
	scripts/fetch-glibcs build/glibcs
	cmake --preset release >/dev/null
	cmake --build --preset release --target all tests programs
	for preset in $(ALSO); do \
	    cmake --preset $$preset >/dev/null && cmake --build --preset $$preset || exit 1; \
	done

# The summaries of the test runners come last.
check: build-tests ## install what is missing, build, and run every test
	scripts/lint
	scripts/model
	.venv/bin/python scripts/run-tests

# What takes longer, or needs a quiet machine: an hour's soak and the like, and the figures of docs/figures.md, on this
# machine. `make check-long-NAME` runs one piece: docs/testing.md.
LONG := lint ctest pytest mutants emulated figures
.PHONY: $(LONG:%=check-long-%)
long_lint = cmake --preset clang-deep && cmake --build --preset clang-deep
long_ctest = for preset in release asan tsan; do CALM_TEST_FACTOR=5 CALM_TEST_SEED=$$(date +%s) ctest --preset $$preset || exit 1; done
long_pytest = .venv/bin/pytest -q -m long
long_mutants = scripts/mutants
long_emulated = bench/emulated && bench/emulated --library build/release/libcalmalloc.so && bench/emulated --locks
long_figures = bench/figures

check-long: check $(LONG:%=check-long-%) ## and what takes hours; check-long-NAME: one of its pieces

$(LONG:%=check-long-%): check-long-%: build-tests
	@start=$$(date +%s); { $(long_$*); } && echo "check-long-$*: passed in $$(($$(date +%s) - start)) s"

install: all ## install below PREFIX (/usr/local)
	cmake --install build/release --prefix $(PREFIX)

deb: ## make Debian packages in build/packages
	packaging/deb

wheel: ## make a Python wheel in build/packages
	packaging/wheel

clean: ## remove what was built
	rm -rf build
