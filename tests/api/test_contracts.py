"""What each function promises, with the library loaded in each possible way.

The same cases run under glibc's malloc, to show that programs already rely on these promises.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from api_helpers import (
    GLIBC,
    KIB,
    LINKED,
    MIB,
    MODES,
    OFFLOAD,
    OURS,
    PRELOAD,
    REPOSITORY,
    STATIC,
    Programs,
    program,
    shared_library,
)

SHARED = [
    "zero-bytes",
    "huge-sizes",
    "products",
    "huge-alignments",
    "realloc-null",
    "realloc-zero",
    "realloc-fails-softly",
    "posix-memalign-refuses",
    "posix-memalign-grants",
    "posix-memalign-fails",
    "more-than-memory",
    "grows-within-a-limit",
    "aligned-alloc",
    "usable-sizes",
    "sized-frees",
    "aligned-sized-frees",
    "errno",
    "old-aligned",
    "libc-names",
    "trim",
    "mallinfo",
    "mallopt",
    "with-libc",
]
OWN = [
    "calm-family",
    "calm-stats-sizes",
    "calm-stats-count",
    "calm-get",
    "calm-price",
    "calm-trim",
    "calm-trim-small",
]
# Cases that check the memory counters.
ACCOUNTED = ["realloc-zero", "calm-stats-count", "calm-price", "trim", "calm-trim", "calm-trim-small"]
# For cases that control the time of purges and cache flushes themselves.
QUIET = "background=off"
ATTEMPTS = 3
# No timed purges, and a wait for the server, however busy the machine is.
STEADY = "test_policy=paper"
PATIENT = "test_server_timeout=3600000"


def run_case(programs: Programs, case: str, mode: str) -> None:
    """Runs a case. A late server or a timed purge excuses a wrong count, so one run must need no excuse."""
    for attempt in range(ATTEMPTS + 1):
        steady = [STEADY, *([PATIENT] if OFFLOAD in mode else [])]
        options = [mode, QUIET, *(steady if attempt == ATTEMPTS else [])]
        ran = programs.run(PRELOAD, "contracts", case, options=",".join(options))
        if case not in ACCOUNTED:
            assert "accounts" not in ran.figures, f"{case} belongs to ACCOUNTED"
            return
        assert ran["accounts"] > 0
        if ran["accounts_excused"] == 0:
            return
    pytest.fail(f"{case}: accounts that did not hold were excused in each run, even with {STEADY}")


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("way", [GLIBC, *OURS])
def test_contract(programs: Programs, way: str, case: str) -> None:
    programs.run(way, "contracts", case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [*SHARED, *OWN])
def test_contract_in_each_mode(programs: Programs, case: str, mode: str) -> None:
    run_case(programs, case, mode)


# With more messages than the rest: what allocates most is left out.
TALKATIVE = [f"{OFFLOAD},test_cache={cache}" for cache in ("locked", "off", "off,test_sync=on")]
MANY_BLOCKS = ["trim", "mallinfo", "calm-trim-small"]


@pytest.mark.parametrize("mode", TALKATIVE)
@pytest.mark.parametrize("case", [case for case in [*SHARED, *OWN] if case not in MANY_BLOCKS])
def test_contract_with_many_messages(programs: Programs, case: str, mode: str) -> None:
    run_case(programs, case, mode)


@pytest.mark.parametrize("case", OWN)
@pytest.mark.parametrize("way", [LINKED, STATIC])
def test_own_interface(programs: Programs, way: str, case: str) -> None:
    programs.run(way, "contracts", case, options=QUIET)


@pytest.mark.parametrize("way", [PRELOAD, LINKED])
def test_every_name_is_the_librarys(programs: Programs, way: str) -> None:
    programs.run(way, "contracts", "names")


def test_glibc_serves_the_cases_without_the_library(programs: Programs) -> None:
    """Otherwise the runs under glibc would prove nothing."""
    failed = programs.run(GLIBC, "contracts", "names", status=1)
    assert "governed()" in failed.stderr


@pytest.mark.parametrize("way", OURS)
def test_statistics_are_json(programs: Programs, way: str) -> None:
    ran = programs.run(way, "contracts", "calm-stats-json")
    found: dict[str, object] = {}

    def collect(value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                found[name] = inner
                collect(inner)

    collect(json.loads(ran.stdout))
    header = (REPOSITORY / "include/calmalloc.h").read_text()
    body = header[header.index("struct calm_stats {") : header.index("CALM_API int calm_stats(")]
    fields = re.findall(r"uint64_t\s+(\w+);", body)
    assert len(fields) >= 22
    for name in fields:
        assert isinstance(found.get(name), int), f"{name} is missing"
    for name in ("background", "misuse", "memory_per_cpu", "huge_pages"):
        assert name in found, f"the option {name} is missing"


def test_options_are_set_and_read(programs: Programs) -> None:
    for way in OURS:
        ran = programs.run(way, "contracts", "calm-set")
        assert ran["test_policy"] == 0
        assert len(ran.figures) == 9


@pytest.mark.parametrize("way", [GLIBC, *OURS])
def test_malloc_info_is_xml(programs: Programs, way: str, tmp_path: Path) -> None:
    path = tmp_path / "info.xml"
    programs.run(way, "contracts", "malloc-info", path)
    root = ElementTree.fromstring(path.read_text())
    assert root.tag == "malloc"
    assert root.attrib["version"]
    assert len(list(root.iter())) > 3


@pytest.mark.parametrize("way", [GLIBC, *OURS])
def test_malloc_stats_on_stderr(programs: Programs, way: str) -> None:
    stderr = programs.run(way, "contracts", "malloc-stats").stderr
    assert re.search(r"in.use", stderr)
    assert re.search(r"\d", stderr)


CASES_OF_NEW = ["forms", "expressions", "failures", "handlers", "containers", "thread-locals"]


@pytest.mark.parametrize("case", CASES_OF_NEW)
@pytest.mark.parametrize("way", [GLIBC, *OURS])
def test_new_and_delete(programs: Programs, way: str, case: str) -> None:
    programs.run(way, "news", case)


@pytest.mark.parametrize("case", ["forms", "expressions", "containers"])
def test_new_is_seen_by_what_stands_before_malloc(programs: Programs, case: str) -> None:
    interposer, counts = program("interposer.so"), {}
    for preloaded in ([interposer], [interposer, shared_library()]):
        said = programs.run(GLIBC, "news", case, LD_PRELOAD=":".join(map(str, preloaded))).stderr
        found = re.search(r"^allocated (\d+), freed (\d+)$", said, re.MULTILINE)
        assert found is not None, said
        counts[len(preloaded)] = int(found[1]), int(found[2])
    assert counts[1] == counts[2]
    assert min(counts[1]) > 20


SWEEPS = ["sizes", "alignments", "calloc", "realloc"]


@pytest.mark.parametrize("case", SWEEPS)
@pytest.mark.parametrize("way", OURS)
def test_sweep(programs: Programs, way: str, case: str) -> None:
    programs.run(way, "sweep", case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", SWEEPS)
def test_sweep_in_each_mode(programs: Programs, case: str, mode: str) -> None:
    programs.run(PRELOAD, "sweep", case, options=mode)


def test_the_sweeps_hold_for_glibc(programs: Programs) -> None:
    for case in ("sizes", "calloc", "realloc"):
        programs.run(GLIBC, "sweep", case)


@pytest.mark.parametrize("huge_pages", ["never", "earned"])
def test_untouched_blocks_cost_nothing(programs: Programs, huge_pages: str) -> None:
    """51 blocks of up to 4 GiB and one byte, each with two touched pages."""
    for way in OURS:
        ran = programs.run(way, "sweep", "doublings", options=f"huge_pages={huge_pages}")
        assert 51 * 2 * 4 * KIB <= ran["grown"] <= 2 * MIB
