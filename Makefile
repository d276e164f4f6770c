# A front end for CMake, ctest and pytest.
SHELL := /bin/sh
.DEFAULT_GOAL := all
PREFIX ?= /usr/local
# The presets that `make check` builds in addition to release; some are only compiled.
ALSO := debug asan tsan fuzz clang aarch64 musl

# The parts of check-long run one at a time even with -j, because some need an otherwise idle machine.
.NOTPARALLEL:
.PHONY: help all test demo peers bench abis model docs build-tests check check-long install uninstall deb wheel clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1 \2/p' Makefile | while read -r name text; do printf '%-12s %s\n' "$$name" "$$text"; done

all: build/release/build.ninja ## build the libraries and the tool
	cmake --build --preset release

build/%/build.ninja:
	cmake --preset $* >/dev/null

# Ninja, Python and root are not needed, and nothing is installed.
test: ## build the library and run the C tests; needs only a C compiler and CMake
	cmake --preset test >/dev/null
	MAKEFLAGS=--no-print-directory cmake --build --preset test -j "$$(nproc)"
	ctest --preset test -j "$$(nproc)"

demo: ## install missing packages, build, and compare allocators on this machine
	scripts/setup demo
	$(MAKE) --no-print-directory all
	scripts/demo

# See bench/peers. PEER_SOURCES="NAME=DIR …" builds peers from source trees.
PEER_SOURCES :=
peers: ## build the newest releases of other allocators, for comparison
	scripts/peers $(PEER_SOURCES:%=--source %)

# Nothing else should run on the machine meanwhile.
bench: ## run the whole suite under every allocator (one to two hours)
	scripts/setup bench
	$(MAKE) --no-print-directory all
	scripts/peers $(PEER_SOURCES:%=--source %)
	bin/calm bench run --suite full --json build/bench.json --plot build/bench.png

# Compares the patched kernel with an unpatched one on emulated machines, and tests the coherence of its TLBs: see
# docs/abis.md. First builds an emulator and the kernels from Debian's sources.
abis: ## count the shootdowns that patched kernels save, on emulated machines
	scripts/setup abis
	$(MAKE) --no-print-directory all
	kernel/abis/build all --variants baseline,abis,debug
	bench/abis

# See tests/model and kernel/abis/model.
model: ## check the models of calmoffload and of ABIS with SPIN
	scripts/model

# See mkdocs.yml. A dead link fails the build. The variable silences advertisements for a successor of mkdocs.
docs: ## build the documentation site in build/docs
	scripts/setup docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build
	@echo "docs: build/docs/index.html"

build-tests: ## build everything that the tests need
	scripts/setup check
	scripts/fetch-glibcs build/glibcs
	cmake --preset release >/dev/null
	cmake --build --preset release --target all tests programs
	for preset in $(ALSO); do \
	    cmake --preset $$preset >/dev/null && cmake --build --preset $$preset || exit 1; \
	done

# The test runners run last, so that their summaries end the output.
check: build-tests ## install missing packages, build, and run every test
	scripts/lint
	scripts/model
	.venv/bin/python scripts/run-tests

# Tests that take longer or need an otherwise idle machine, such as a soak test of an hour, and the figures of
# docs/figures.md. `make check-long-NAME` runs one part: docs/testing.md.
LONG := lint ctest fuzz pytest checked mutants emulated figures
.PHONY: $(LONG:%=check-long-%)
long_lint = cmake --preset clang-deep && cmake --build --preset clang-deep
long_ctest = for preset in release asan tsan; do CALM_TEST_FACTOR=5 CALM_TEST_SEED=$$(date +%s) ctest --preset $$preset || exit 1; done
long_fuzz = CALM_TEST_SEED=$$(date +%s) scripts/fuzz --seconds 60
long_pytest = .venv/bin/pytest -q -m long
long_checked = cmake --build --preset debug --target all programs && CALMALLOC_BUILD=$(CURDIR)/build/debug .venv/bin/pytest -q tests/programs
long_mutants = scripts/mutants
long_emulated = bench/emulated && bench/emulated --library build/release/libcalmalloc.so && bench/emulated --locks
long_figures = bench/figures

check-long: check $(LONG:%=check-long-%) ## run check and tests that take hours; check-long-NAME: one part

$(LONG:%=check-long-%): check-long-%: build-tests
	@start=$$(date +%s); { $(long_$*); } && echo "check-long-$*: passed in $$(($$(date +%s) - start)) s"

install: all ## install below PREFIX (/usr/local)
	cmake --install build/release --prefix $(PREFIX)

# What is installed is listed by installing it elsewhere. Python adds compiled modules to the folder that is ours alone.
uninstall: all ## remove what `make install` put below PREFIX
	rm -rf build/uninstall
	DESTDIR=$(CURDIR)/build/uninstall cmake --install build/release --prefix $(PREFIX) >/dev/null
	cd build/uninstall && find . ! -type d -printf '$(DESTDIR)/%P\0' | xargs -0 rm -f
	rm -rf build/uninstall '$(DESTDIR)$(abspath $(PREFIX))/share/calmalloc'

deb: ## build Debian packages in build/packages
	packaging/deb

wheel: ## build a Python wheel in build/packages
	packaging/wheel

clean: ## remove build/
	rm -rf build
