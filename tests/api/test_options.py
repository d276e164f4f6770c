"""Options set by CALM_OPTIONS, and the messages about them."""

from __future__ import annotations

import pytest
from api_helpers import GLIBC, MIB, OFFLOAD, OURS, PRELOAD, Programs, complaints

VALID = {
    "background": ["on", "off"],
    "misuse": ["abort", "warn", "immediate"],
    "memory_per_cpu": ["auto", "0", "8", "1000000"],
    "huge_pages": ["never", "earned"],
    "vectored_purge": ["auto", "on", "off"],
    "test_policy": ["adaptive", "paper"],
    "test_cgroup": ["on", "off"],
    "test_placement": ["off", "lines", "random", "colors"],
    "test_cache": ["auto", "locked", "off"],
}
# Reports show test options only where they differ from these.
INITIAL = {
    "test_policy": "adaptive",
    "test_cgroup": "on",
    "test_placement": "colors",
    "test_cache": "auto",
}
EACH = [f"{name}={value}" for name, values in VALID.items() for value in values]


@pytest.mark.parametrize("option", EACH)
def test_valid_option(programs: Programs, option: str) -> None:
    """The report contains it unless it is a test's default; no message."""
    ran = programs.run(PRELOAD, "stress", "rounds=2", options=f"{option},report=exit")
    assert complaints(ran.stderr) == []
    name, value = option.split("=")
    text = str({**ran.report, **ran.report.get("options", {})}.get(name))
    if INITIAL.get(name) == value:
        assert text == "None"
        return
    assert text in (value, str(value == "on")), f"{name} is {text}: {ran.report}"


def test_all_at_once(programs: Programs) -> None:
    options = ",".join(f"{name}={values[-1]}" for name, values in VALID.items())
    for way in OURS:
        ran = programs.run(way, "stress", "rounds=2", options=options)
        assert complaints(ran.stderr) == []


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("test_polcy=paper", ["test_polcy"]),
        ("policy=paper", ["policy"]),
        ("test_policy", ["test_policy"]),
        ("test_policy=", ["test_policy"]),
        ("test_policy=papers", ["papers"]),
        ("memory_per_cpu=abc", ["memory_per_cpu"]),
        ("memory_per_cpu=-5", ["memory_per_cpu"]),
        ("memory_per_cpu=8g", ["memory_per_cpu"]),
        ("slack=50,purge_time=5", ["slack", "purge_time"]),
        ("test_cache=sometimes", ["cache"]),
        ("background=1", ["background"]),
        ("offload=on", ["LD_PRELOAD=libcalmoffload.so"]),
        ("test_Policy=paper", ["test_Policy"]),
        ("nonsense", ["nonsense"]),
        ("=paper", ["calmalloc:"]),
        ("first=1,test_policy=paper,second=2", ["first", "second"]),
        ("test_policy=paper,test_cache=bad,misuse=bad", ["cache", "misuse"]),
        ("x" * 5000 + "=1", ["xxx"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_bad_option(programs: Programs, way: str, options: str, named: list[str]) -> None:
    """One message for each, which names it; other options apply."""
    ran = programs.run(way, "stress", "rounds=2", options=f"{options},report=exit")
    lines = [line for line in ran.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == len(named), ran.stderr
    for line, name in zip(lines, named, strict=True):
        assert line.startswith("calmalloc:")
        assert name in line
    is_paper = "test_policy=paper" in options.split(",")
    assert ran.report["options"].get("test_policy") == ("paper" if is_paper else None)


SERVER = ["server_cpu=auto", "server_cpu=0", "test_sync=off", "test_server_timeout=1"]


@pytest.mark.parametrize("option", [*EACH, *SERVER])
def test_valid_option_of_the_offload_library(programs: Programs, option: str) -> None:
    ran = programs.run(PRELOAD, "stress", "rounds=2", options=f"{OFFLOAD},{option}")
    assert complaints(ran.stderr) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("server_cpu=maybe", ["server_cpu"]),
        ("server_cpu=8192,server_cpu=-1", ["server_cpu", "server_cpu"]),
        ("server_cpu=1x,server_cpu=", ["server_cpu", "server_cpu"]),
        ("test_server_timeout=0,test_sync=perhaps", ["test_server_timeout", "test_sync"]),
    ],
)
def test_bad_option_of_the_offload_library(programs: Programs, options: str, named: list[str]) -> None:
    ran = programs.run(PRELOAD, "stress", "rounds=2", options=f"{OFFLOAD},{options}")
    lines = complaints(ran.stderr)
    assert len(lines) == len(named), ran.stderr
    for line, name in zip(lines, named, strict=True):
        assert name in line


@pytest.mark.parametrize("options", ["", "test_policy=paper"])
def test_silent(programs: Programs, options: str) -> None:
    for way in OURS:
        assert programs.run(way, "stress", "rounds=2", CALM_OPTIONS=options).stderr == ""


def test_report_at_exit(programs: Programs) -> None:
    for way in OURS:
        ran = programs.run(way, "stress", "rounds=2", options="report=exit")
        assert ran.stderr.count("\n") == 1
        assert ran.report["in_use"] + ran.report["dirty"] == ran.report["footprint"]
        assert ran.report["dirtied"] >= ran["dirtied"]
    assert programs.run(PRELOAD, "stress", "rounds=2", options="report=off").stderr == ""


def test_a_report_for_each_process(programs: Programs) -> None:
    """For those that end by exit(): an eighth of the children, and the parent."""
    ran = programs.run(PRELOAD, "processes", "fork-storm", "16", options="report=exit")
    assert sum(line.startswith("{") for line in ran.stderr.splitlines()) == 3


@pytest.mark.parametrize("way", OURS)
def test_helper_thread(programs: Programs, way: str) -> None:
    """It starts with the second thread, not before (while little is kept), and not with background=off."""
    ran = programs.run(way, "threads", "count-threads", "signals", options="background=on")
    assert ran["alone"] == ran["still_alone"] == 1
    assert ran["after_a_thread"] == 2
    ran = programs.run(way, "threads", "count-threads", options="background=off")
    assert ran["alone"] == ran["after_a_thread"] == 1
    assert programs.run(GLIBC, "threads", "count-threads")["after_a_thread"] == 1


def test_vectored_purge(programs: Programs) -> None:
    on, off = (
        programs.run(
            PRELOAD, "retention", "plain", "100000,reversed", options=f"vectored_purge={value},background=off"
        )
        for value in ("on", "off")
    )
    assert off["purge_vectored_calls"] == 0
    assert off["purge_single_calls"] > 0
    assert off["purged"] > 100 * MIB
    assert on["purged"] > 100 * MIB
    assert on["purge_vectored_calls"] + on["purge_single_calls"] > 0


def test_costly_memory_is_not_kept(programs: Programs) -> None:
    """A higher number means more memory and fewer purges."""
    kept, purges = [], []
    for gib in ("1", "8", "160"):
        ran = programs.run(
            PRELOAD, "retention", "steady", "3000,random", options=f"memory_per_cpu={gib},background=off"
        )
        kept.append(ran["dirty_limit"])
        purges.append(ran["purges"])
    assert kept[0] < kept[1] < kept[2]
    assert purges[0] > purges[1] > purges[2]


def test_without_a_cache_nothing_is_cached(programs: Programs) -> None:
    ran = programs.run(PRELOAD, "retention", "plain", "100,reversed", options="test_cache=off,background=off")
    assert ran["cached"] == 0
    ran = programs.run(PRELOAD, "retention", "plain", "100,reversed", options="background=off")
    assert 0 < ran["cached"] <= ran["cached_limit"]
