# A thin front to CMake, ctest and pytest.
SHELL := /bin/sh
PREFIX ?= /usr/local
SANITIZED := asan tsan

.PHONY: all demo peers bench abis model check check-long install deb wheel clean

all: build/release/build.ninja
	cmake --build --preset release

build/%/build.ninja:
	cmake --preset $* >/dev/null

demo:
	scripts/setup demo
	$(MAKE) --no-print-directory all
	scripts/demo

# Other allocators to compare with, built from their newest sources; see bench/peers.
peers:
	scripts/peers

# The whole suite under each of them: an hour or two, in which nothing else should run.
bench:
	scripts/setup bench
	$(MAKE) --no-print-directory all
	scripts/peers
	bin/calm bench --suite full -o build/bench.json --picture build/bench.png

# The kernel with fewer TLB shootdowns beside one without, on emulated machines, and a test of its TLBs' coherence: see
# docs/abis.md. Builds an emulator and the kernels first, from Debian's sources.
abis:
	scripts/setup abis
	$(MAKE) --no-print-directory all
	kernel/abis/build all --variants baseline,abis,debug
	bench/abis

# The protocol of offload mode, and ABIS, checked by SPIN: see tests/model and kernel/abis/model.
model:
	scripts/model

# The summaries of the test runners come last.
check:
	scripts/setup check
	scripts/fetch-glibcs build/glibcs
	for preset in release debug clang aarch64 $(SANITIZED); do \
	    cmake --preset $$preset >/dev/null && cmake --build --preset $$preset || exit 1; \
	done
	scripts/lint
	scripts/model
	for preset in release debug $(SANITIZED); do ctest --preset $$preset || exit 1; done
	.venv/bin/pytest -q -n 2 --dist loadfile -m 'not long and not alone'
	.venv/bin/pytest -q -m 'alone and not long'

# What takes longer, or needs a quiet machine: an hour's soak and the like, and the figures of the README, on this
# machine.
check-long: check
	scripts/lint deep
	.venv/bin/pytest -q -m long
	bench/emulated
	bench/emulated --library build/release/libcalmalloc.so
	bench/emulated --locks
	bench/figures

install: all
	cmake --install build/release --prefix $(PREFIX)

deb:
	packaging/deb

wheel:
	packaging/wheel

clean:
	rm -rf build
