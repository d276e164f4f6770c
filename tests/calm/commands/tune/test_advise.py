"""The rules of `calm tune advise` on facts made up for them, and runs of real programs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from calm_helpers import ROOT, Calm
from waiting import wait_until

from calm.commands.tune import advice
from calm.commands.tune import facts as runs
from calm.commands.tune import rules as advise_rules
from calm.commands.tune.advice import Advice
from calm.commands.tune.facts import Calls, Facts
from calm.commands.tune.rules import Finding, Unjudged
from calm.core import documents, machine, measure, proc, proc_maps, report
from calm.core.errors import PIPE_CLOSED, CalmError
from calm.core.progress import Bar

BUILD = ROOT / "build/release"
MIB = 1024 * 1024

CALM = Calls("perf", wall_s=2.0)
# A program of 100 MiB for two seconds in which nothing is wrong.
QUIET = Facts(
    command=("it",),
    wall_s=2.0,
    minor_faults=25_000,
    peak_rss_kib=100 * 1024,
    cpus=2,
    huge_pages="always",
    threads_started=4,
    shootdowns=10,
    calls=CALM,
    huge_kib=20 * 1024,
    heaps=2,
    heaps_rss_kib=10 * 1024,
    allocator="glibc",
)


def facts(**changes: Any) -> Facts:
    return dataclasses.replace(QUIET, **changes)


def calls(**changes: Any) -> Calls:
    return dataclasses.replace(CALM, **changes)


def printed(given: Facts, found: list[Finding], unjudged: list[Unjudged], quiet: list[str]) -> str:
    file = io.StringIO()
    found_by = Advice(
        command=["it"],
        facts=given,
        findings=found,
        not_judged=unjudged,
        in_order=quiet,
        environment=advise_rules.combined(found),
    )
    advice.print_report(found_by, report.console(file))
    return file.getvalue()


def fired(given: Facts) -> set[str]:
    return {finding.rule for finding in advise_rules.judge(given)[0]}


def test_nothing_is_advised_where_nothing_is_wrong() -> None:
    found, unjudged, quiet = advise_rules.judge(QUIET)
    assert (found, unjudged) == ([], [])
    assert quiet == [finding.rule for finding, _ in advise_rules.RULES]
    assert printed(QUIET, found, unjudged, quiet).startswith("nothing to advise: no rule fires\n")


# The case study's t-test1: 12,304,107 faults with 13,996 KiB resident, in 21 s.
STUDY = facts(
    wall_s=21.08,
    minor_faults=12_304_107,
    peak_rss_kib=13_996,
    huge_kib=0,
    threads_started=4000,
    calls=calls(
        wall_s=21.08, trimmed=100_000, trimmed_bytes=40_000 * MIB, grown=100_000, grown_median_bytes=8192
    ),
)

FIRING: dict[str, Facts] = {
    "page-faults": STUDY,
    "heap-churn": facts(calls=calls(brk_shrunk=60, trimmed=60, brk_grown=70)),
    "small-steps": facts(huge_kib=0, calls=calls(grown=1000, grown_median_bytes=8192)),
    "large-blocks": facts(calls=calls(mapped_large=210, unmapped_large=200, largest_bytes=MIB)),
    "arenas": facts(heaps=64, heaps_rss_kib=80 * 1024),
    "short-threads": facts(threads_started=1000, wall_s=1.0),
    "shootdowns": facts(shootdowns=4000),
    "huge-bloat": facts(huge_kib=90 * 1024, peak_without_huge_kib=40 * 1024),
}
# Each differs from one that fires by one thing alone, and that is just short of its threshold.
NOT_FIRING: list[tuple[str, dict[str, Any]]] = [
    ("page-faults", {"minor_faults": 19_000}),
    ("page-faults", {"peak_rss_kib": 12_304_107}),
    ("page-faults", {"calls": calls(wall_s=21.08, trimmed=10, trimmed_bytes=14_000 * MIB)}),
    ("heap-churn", {"calls": calls(brk_shrunk=39, trimmed=60)}),
    ("heap-churn", {"calls": calls(brk_shrunk=60, trimmed=60, wall_s=2.5)}),
    ("small-steps", {"huge_kib": 11 * 1024}),
    ("small-steps", {"huge_pages": "never"}),
    ("small-steps", {"peak_rss_kib": 8 * 1024 - 1}),
    ("small-steps", {"calls": calls(grown=1000, grown_median_bytes=256 * 1024)}),
    ("small-steps", {"calls": calls(grown=255, grown_median_bytes=8192)}),
    ("large-blocks", {"calls": calls(mapped_large=210, unmapped_large=99, largest_bytes=MIB)}),
    ("large-blocks", {"calls": calls(unmapped_large=200, largest_bytes=MIB, wall_s=4.1)}),
    ("arenas", {"heaps": 7}),
    ("arenas", {"heaps_rss_kib": 63 * 1024}),
    ("arenas", {"peak_rss_kib": 161 * 1024}),
    ("arenas", {"cpus": 33}),
    ("short-threads", {"threads_started": 99}),
    ("short-threads", {"wall_s": 20.1}),
    ("shootdowns", {"wall_s": 4.1}),
    ("shootdowns", {"shootdowns": 99, "wall_s": 0.01}),
    ("huge-bloat", {"peak_without_huge_kib": 75 * 1024}),
    ("huge-bloat", {"huge_kib": 31 * 1024}),
    ("huge-bloat", {"peak_rss_kib": 361 * 1024}),
    ("huge-bloat", {"peak_rss_kib": 400 * 1024, "huge_kib": 300 * 1024, "peak_without_huge_kib": 360 * 1024}),
]


@pytest.mark.parametrize("rule", sorted(FIRING))
def test_each_rule_fires_with_its_numbers_and_a_remedy(rule: str) -> None:
    given = FIRING[rule]
    found, _, quiet = advise_rules.judge(given)
    [finding] = [each for each in found if each.rule == rule]
    assert rule not in quiet
    assert finding.evidence
    assert finding.threshold
    assert finding.remedies
    for remedy in finding.remedies:
        assert remedy.cost
        assert bool(remedy.environment) != bool(remedy.otherwise)
    text = printed(given, found, [], quiet)
    for word in (f". {rule} ", "   evidence  ", "   fires at  ", "   remedy  ", "   cost  "):
        assert word in text


@pytest.mark.parametrize(("rule", "changes"), NOT_FIRING)
def test_each_rule_needs_all_of_its_conditions(rule: str, changes: dict[str, Any]) -> None:
    given = FIRING[rule]
    assert rule in fired(given)
    assert rule not in fired(dataclasses.replace(given, **changes))


def test_every_rule_has_facts_that_make_it_fire() -> None:
    assert set(FIRING) == {finding.rule for finding, _ in advise_rules.RULES}


def test_the_case_study_is_diagnosed_as_it_was() -> None:
    found, _, _ = advise_rules.judge(STUDY)
    [faults] = [each for each in found if each.rule == "page-faults"]
    assert faults.evidence["minor_faults"] == 12_304_107
    assert faults.evidence["pages_at_the_peak"] == 13_996 // 4
    assert faults.evidence["faults_for_each_page"] == pytest.approx(3516.5, abs=0.1)
    # At least the study's 32 MiB; with the underscore that glibc wants.
    assert faults.remedies[0].environment == {"MALLOC_TRIM_THRESHOLD_": str(32 * MIB)}
    assert "small-steps" in {each.rule for each in found}
    variables = advise_rules.combined(found)
    assert 4 * MIB <= int(variables["MALLOC_TOP_PAD_"]) <= 32 * MIB
    assert "glibc.malloc.hugetlb=1" in variables["GLIBC_TUNABLES"]
    # The cost of the same setting is printed once.
    assert printed(STUDY, found, [], []).count("as above") == 1


def test_a_trim_threshold_is_beyond_what_the_program_holds() -> None:
    [churn] = advise_rules.judge(facts(peak_rss_kib=300 * 1024, calls=calls(trimmed=1000)))[0]
    assert churn.remedies[0].environment == {"MALLOC_TRIM_THRESHOLD_": str(512 * MIB)}


@pytest.mark.parametrize(
    ("largest", "threshold"),
    [(130 * 1024, 256 * 1024), (MIB, 2 * MIB), (20 * MIB, 32 * MIB), (64 * MIB, None)],
)
def test_no_mmap_threshold_beyond_what_glibc_takes(largest: int, threshold: int | None) -> None:
    [finding] = advise_rules.judge(facts(calls=calls(unmapped_large=200, largest_bytes=largest)))[0]
    environment = finding.remedies[0].environment
    assert environment.get("MALLOC_MMAP_THRESHOLD_") == (str(threshold) if threshold else None)


@pytest.mark.parametrize(("cpus", "most"), [(1, 2), (2, 2), (8, 8)])
def test_as_many_arenas_as_cpus(cpus: int, most: int) -> None:
    [finding] = advise_rules.judge(dataclasses.replace(FIRING["arenas"], cpus=cpus))[0]
    assert finding.remedies[0].environment == {"MALLOC_ARENA_MAX": str(most)}


@pytest.mark.parametrize(
    "name", ["threads_started", "shootdowns", "calls", "heaps", "huge_kib", "peak_without_huge_kib"]
)
def test_what_is_not_known_is_not_judged_and_says_why(name: str) -> None:
    rules = {
        "threads_started": {"short-threads"},
        "shootdowns": {"shootdowns"},
        "calls": {"heap-churn", "small-steps", "large-blocks"},
        "heaps": {"arenas"},
        "huge_kib": {"small-steps", "huge-bloat"},
        "peak_without_huge_kib": {"huge-bloat"},
    }[name]
    given = facts(
        huge_kib=90 * 1024, peak_without_huge_kib=90 * 1024, calls=calls(grown=1000, grown_median_bytes=8192)
    )
    given = dataclasses.replace(given, **{name: None}, missing={name: "it is forbidden"})
    found, unjudged, quiet = advise_rules.judge(given)
    assert found == []
    assert {each.rule for each in unjudged} == rules
    assert {each.reason for each in unjudged} == {"it is forbidden"}
    assert rules.isdisjoint(quiet)
    text = printed(given, found, unjudged, quiet)
    assert text.count("it is forbidden") == len(rules)
    assert "no rule that could be judged fires" in text


def test_several_processes_are_not_judged_by_faults_alone() -> None:
    """A compiler's driver faults each program's text in; nothing is given back."""
    alone = dataclasses.replace(STUDY, calls=None, missing={"calls": "no perf"})
    assert "page-faults" in fired(alone)
    several = dataclasses.replace(alone, processes=5)
    assert "page-faults" not in fired(several)
    assert Unjudged("page-faults", "no perf") in advise_rules.judge(several)[1]


def test_a_record_that_was_cut_short_has_its_share_of_the_faults() -> None:
    # A hundredth of the run, with a hundredth of what was given back.
    given = calls(wall_s=0.2108, truncated=True, trimmed=1000, trimmed_bytes=400 * MIB)
    assert "page-faults" in fired(dataclasses.replace(STUDY, calls=given))
    whole = dataclasses.replace(given, truncated=False, wall_s=21.08)
    assert "page-faults" not in fired(dataclasses.replace(STUDY, calls=whole))


def test_settings_of_glibc_are_not_advised_to_another_malloc() -> None:
    given = dataclasses.replace(STUDY, allocator="jemalloc", shootdowns=1_000_000)
    found, unjudged, _ = advise_rules.judge(given)
    assert found[0].rule == "other-allocator"
    assert "jemalloc" in found[0].sentence
    assert {"short-threads", "shootdowns"} == {each.rule for each in found[1:]}
    assert {"page-faults", "heap-churn", "small-steps"} <= {each.rule for each in unjudged}
    assert not any(name.startswith("MALLOC_") for name in advise_rules.combined(found))
    assert (
        "sets glibc's thresholds itself" in advise_rules.judge(facts(allocator="ptlbmalloc2"))[0][0].sentence
    )


def test_a_static_program_is_reported() -> None:
    found, _, _ = advise_rules.judge(facts(static=True, allocator=None))
    assert [each.rule for each in found] == ["static"]


def test_what_is_misspelt_comes_first() -> None:
    line = "MALLOC_TRIM_THRESHOLD is not read: its name ends with an underscore"
    found, unjudged, quiet = advise_rules.judge(QUIET, [line])
    assert [each.rule for each in found] == ["environment"]
    assert line in printed(QUIET, found, unjudged, quiet)


def test_variables_of_all_findings_go_together() -> None:
    def finding(**environment: str) -> Finding:
        return Finding("rule", "sentence", {}, "", [advise_rules.Remedy("cost", environment)])

    found = [
        finding(MALLOC_TOP_PAD_="4096", GLIBC_TUNABLES="glibc.malloc.hugetlb=1"),
        finding(MALLOC_TOP_PAD_="65536", GLIBC_TUNABLES="glibc.pthread.stack_cache_size=9"),
        finding(MALLOC_TOP_PAD_="8192"),
    ]
    assert advise_rules.combined(found) == {
        "MALLOC_TOP_PAD_": "65536",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.pthread.stack_cache_size=9",
    }


PERF = """\
  7/9  syscalls:sys_enter_brk: brk: 0x00000000
  7/9  syscalls:sys_enter_brk: brk: 0x56260ea6c000
  7/9  syscalls:sys_enter_brk: brk: 0x56260ea8d000
  8/8  syscalls:sys_enter_brk: brk: 0x55260ea8d000
  7/7  syscalls:sys_enter_brk: brk: 0x56260ea6d000
  7/9  syscalls:sys_enter_mprotect: start: 0x7f066c498000, len: 0x00002000, prot: 0x00000003
  7/9  syscalls:sys_enter_mprotect: start: 0x7f066c498000, len: 0x00004000, prot: 0x00000001
  7/9  syscalls:sys_enter_madvise: start: 0x7f066c498000, len_in: 0x00021000, behavior: 0x00000004
  7/9  syscalls:sys_enter_madvise: start: 0x7f066c498000, len_in: 0x00021000, behavior: 0x0000000e
  7/9  syscalls:sys_enter_madvise: start: 0x7f066b498000, len_in: 0x007fb000, behavior: 0x00000004
  7/7  syscalls:sys_enter_mmap: addr: 0x00000000, len: 0x00200000, prot: 0x00000003, flags: 0x00000022
  7/7  syscalls:sys_enter_mmap: addr: 0x00000000, len: 0x00801000, prot: 0x00000000, flags: 0x00020022
  7/7  syscalls:sys_enter_mmap: addr: 0x00000000, len: 0x00300000, prot: 0x00000003, flags: 0x00000002
  7/7  syscalls:sys_enter_munmap: addr: 0x7f0671c49000, len: 0x00200000
  7/7  syscalls:sys_enter_mmap: addr: 0x00000000, len: 0x00802000, prot: 0x00000003, flags: 0x00020022
  7/7  syscalls:sys_enter_mmap: addr: 0x7f0671000000, len: 0x00400000, prot: 0x00000003, flags: 0x00000032
  7/7  syscalls:sys_enter_munmap: addr: 0x7f0671c49000, len: 0x00300000
  7/7  syscalls:sys_enter_munmap: addr: 0x7f0671249000, len: 0x00802000
something else
"""
STRACE = """\
9 brk(NULL) = 0x56260ea6c000
9 brk(0x56260ea6c000) = 0x56260ea6c000
9 brk(0x56260ea8d000) = 0x56260ea8d000
8 brk(0x55260ea8d000) = 0x55260ea8d000
7 brk(0x56260ea6d000) = 0x56260ea6d000
9 mprotect(0x7f066c498000, 8192, 0x3 <unfinished ...>
7 mprotect(0x7f066c498000, 16384, 0x1) = 0
9 <... mprotect resumed>) = 0
9 madvise(0x7f066c498000, 135168, 0x4) = 0
9 madvise(0x7f066c498000, 135168, 0xe) = 0
9 madvise(0x7f066b498000, 8368128, 0x4) = 0
7 mmap(NULL, 2097152, 0x3, 0x22, -1, 0) = 0x7f0671c49000
7 mmap(NULL, 8392704, 0, 0x20022, -1, 0) = 0x7f0671249000
7 mmap(NULL, 3145728, 0x3, 0x2, 3, 0) = 0x7f0671c49000
7 munmap(0x7f0671c49000, 2097152) = 0
7 mmap(NULL, 8396800, 0x3, 0x20022, -1, 0) = 0x7f0671249000
7 mmap(0x7f0671000000, 4194304, 0x3, 0x30, -1, 0) = 0x7f0671000000
7 munmap(0x7f0671c49000, 3145728) = 0
7 munmap(0x7f0671249000, 8396800) = 0
+++ exited with 0 +++
"""


@pytest.mark.parametrize("text", [PERF, STRACE], ids=["perf", "strace"])
def test_calls_are_told_apart(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_stack_bytes", lambda: 8 * MIB)
    got = runs.summarise(runs.parse(text.splitlines()), "it", 1.0, truncated=False)
    assert (got.grown, got.grown_median_bytes) == (1, 0x2000)
    assert (got.brk_grown, got.brk_shrunk, got.brk_shrunk_bytes) == (1, 1, 0x20000)
    assert (got.trimmed, got.trimmed_bytes, got.stacks_returned) == (1, 0x21000, 1)
    assert (got.mapped_large, got.unmapped_large, got.large_bytes, got.largest_bytes) == (
        1,
        1,
        2 * MIB,
        2 * MIB,
    )
    assert got.returned_bytes == 0x20000 + 0x21000 + 2 * MIB


def test_heaps_of_threads_are_found() -> None:
    smaps = """\
7f0000000000-7f0000121000 rw-p 00000000 00:00 0
Rss:                 100 kB
7f0000121000-7f0004000000 ---p 00000000 00:00 0
Rss:                   0 kB
7f0004000000-7f0004021000 rw-p 00000000 00:00 0
Rss:                  28 kB
7f0008000000-7f000c100000 rw-p 00000000 00:00 0
Rss:                 999 kB
7f0010000000-7f0010021000 rw-p 00000000 08:01 77                         /a/file
Rss:                 999 kB
7f0014001000-7f0014021000 rw-p 00000000 00:00 0
Rss:                 999 kB
"""
    assert runs.count_heaps(proc.parse_mappings(smaps)) == (2, 128)


@pytest.mark.parametrize(
    ("files", "executable", "name"),
    [
        (["/usr/lib/libc.so.6", "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"], b"", "jemalloc"),
        (["/usr/lib/libc.so.6", "/usr/lib/libtcmalloc_minimal.so.4"], b"", "gperftools"),
        (["/a/libptlbmalloc2.so", "/usr/lib/libc.so.6"], b"", "ptlbmalloc2"),
        (["/usr/lib/libc.so.6"], b"..<jemalloc>: ..", "jemalloc"),
        (["/usr/lib/libc.so.6"], b"..", "glibc"),
        (["/lib/libc-2.31.so"], b"..", "glibc"),
        (["/lib/ld-musl-x86_64.so.1"], b"..", "musl"),
        (["/usr/bin/it"], b"..", None),
    ],
)
def test_whose_malloc_it_is(files: list[str], executable: bytes, name: str | None) -> None:
    assert proc_maps.allocator(files, executable) == name


@pytest.mark.parametrize("rss", [30_000, 12_000])
def test_the_largest_process_speaks_for_all(rss: int, tmp_path: Path) -> None:
    sampler = runs.Sampler(Bar())
    for pid, (name, kib) in enumerate((("small", 10_000), ("large", rss), ("later", 5_000)), 1):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "maps").write_text(f"0-1 r-xp 0 08:01 77    /bin/{name}\n0-1 rw-p 0 00:00 0 [heap]\n")
        (folder / "program").write_text(name)
        (folder / "exe").symlink_to(folder / "program")
        sampler.identify(pid, kib, tmp_path)
    assert sampler.files == ["/bin/large"]
    assert sampler.executable == b"large"


def test_shootdowns_that_are_no_interrupts_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.measure(["true"], groups=())
    counted = {"shootdowns": measure.Counter(0), "threads_started": measure.Counter(3)}
    run = dataclasses.replace(real, counters=counted)
    monkeypatch.setattr(runs, "measure", lambda *_, **__: measure.without_broadcasts(run))
    monkeypatch.setattr(machine, "broadcast_here", lambda: machine.Broadcast("by broadcast", always=True))
    found, _ = runs.first_run(("true",), Bar())
    assert (found.shootdowns, found.threads_started) == (None, 3)
    assert found.missing["shootdowns"] == "by broadcast"
    monkeypatch.setattr(machine, "broadcast_here", lambda: machine.Broadcast("some", always=False))
    assert runs.first_run(("true",), Bar())[0].shootdowns == 0


@pytest.mark.parametrize("code", [0, 1])
def test_a_third_run_that_is_stopped_tells_nothing(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a program that ends by itself then: what it had by that time is not what it takes."""
    real = measure.measure(["true"], groups=())
    stopped = dataclasses.replace(real, code=code, interrupted_by=2, peak_rss_kib=1000)
    third_is_needed = dataclasses.replace(FIRING["huge-bloat"], peak_without_huge_kib=None, missing={})
    monkeypatch.setattr(runs, "first_run", lambda *_: (third_is_needed, real))
    monkeypatch.setattr(runs, "record", lambda *_: CALM)
    monkeypatch.setattr(runs, "run_without_huge_pages", lambda *_: stopped)
    found = advice.gather(("it",))
    assert found.interrupted_by == 2
    assert found.facts.peak_without_huge_kib is None
    assert found.facts.missing["peak_without_huge_kib"] == "the run was stopped"
    assert found.facts.calls == CALM


def start(out: str | Path, *command: str | Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "calm", "tune", "advise", "--json", out, "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        start_new_session=True,
    )


def advised(*command: str | Path, code: int = 0, **variables: str) -> dict[str, Any]:
    process = start("-", *command, **variables)
    stdout, stderr = process.communicate()
    assert process.returncode == code, stderr
    found: dict[str, Any] = json.loads(stdout)
    return found


def rules(found: dict[str, Any]) -> set[str]:
    return {each["rule"] for each in found["findings"]}


def test_t_test1_is_diagnosed() -> None:
    found = advised(BUILD / "ttest1", "150")
    assert {"page-faults", "heap-churn"} <= rules(found)
    assert found["environment"]["MALLOC_TRIM_THRESHOLD_"]
    # None: it ended before its files were read, on a machine that was busy.
    assert found["facts"]["allocator"] in ("glibc", None)
    assert found["facts"]["calls"]["stacks_returned"] >= 100
    assert found["facts"]["threads_started"] == 150
    # What is advised helps: it does not fire any more.
    after = advised(BUILD / "ttest1", "150", **found["environment"])
    assert rules(after).isdisjoint({"page-faults", "heap-churn"})
    assert after["facts"]["minor_faults"] < found["facts"]["minor_faults"] / 4


def test_a_program_that_is_in_order_gets_no_advice(tmp_path: Path) -> None:
    process = start(tmp_path / "it.json", BUILD / "cfrac", "--number", "526553932693478606158826113967")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stdout.startswith("nothing to advise: no rule ")
    assert json.loads((tmp_path / "it.json").read_text())["findings"] == []


def test_memory_is_looked_at_from_outside() -> None:
    for seconds in ("1", "10", "100"):  # on a busy machine the samples may come late
        found = advised(BUILD / "idle-burst", "--bytes", "40000000", "--threads", "5", "--seconds", seconds)
        if found["facts"].get("heaps"):
            break
    # One for each thread at least, of 8 MB each.
    assert 5 <= found["facts"]["heaps"] <= 10
    assert 30 * 1024 < found["facts"]["heaps_rss_kib"] < 60 * 1024


# Has 96 MiB in huge pages, touches a page of each, and says how much it has so, in KiB.
SPARSE = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
int main(int argc, char **argv) {
    const unsigned long huge = 1 << 21;
    char *memory = mmap(0, 49 * huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory += huge - (unsigned long)memory % huge;
    madvise(memory, 48 * huge, MADV_HUGEPAGE);
    for (int i = 0; i < 48; i++) memory[i * huge] = 1;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    char line[256];
    long kib;
    while (fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "AnonHugePages: %ld", &kib) == 1) printf("%ld\\n", kib);
    }
    sleep(atoi(argv[1]));
    return 0;
}
"""


def test_a_run_without_huge_pages_tells_what_was_touched(tmp_path: Path) -> None:
    (tmp_path / "sparse.c").write_text(SPARSE)
    subprocess.run(["cc", "-o", tmp_path / "sparse", tmp_path / "sparse.c"], check=True)
    has = subprocess.run([tmp_path / "sparse", "0"], check=True, capture_output=True, text=True).stdout
    if int(has) < 90 * 1024:
        pytest.skip("this machine has no huge pages to give")
    for seconds in ("1", "10", "100"):  # on a busy machine the samples may come late
        found = advised(tmp_path / "sparse", seconds)
        if found["facts"]["huge_kib"] >= 90 * 1024:
            break
    assert rules(found) == {"huge-bloat"}
    assert found["facts"]["peak_without_huge_kib"] < 10 * 1024


def test_settings_that_do_nothing_are_named() -> None:
    found = advised("true", MALLOC_TRIM_THRESHOLD="1000000")
    assert "environment" in rules(found)
    assert "MALLOC_TRIM_THRESHOLD_" in found["findings"][0]["sentence"]


def test_large_blocks_and_another_malloc() -> None:
    # A threshold that is set does not adapt, so each block is mapped by itself.
    command = (
        BUILD / "malloc-large",
        "--rounds",
        "400",
        "--min",
        "200000",
        "--max",
        "300000",
        "--blocks",
        "2",
    )
    fixed = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    assert "large-blocks" in rules(advised(*command, **fixed))
    library = BUILD / "libcalmalloc.so"
    for seconds in ("1", "10", "100"):  # on a busy machine the samples may come late
        found = advised(BUILD / "larson", "--seconds", seconds, LD_PRELOAD=str(library))
        if found["facts"]["allocator"] is not None:
            break
    assert found["facts"]["allocator"] == "calmalloc"
    assert "other-allocator" in rules(found)


def test_without_tracepoints_strace_tells(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "perf").write_text("#!/bin/sh\nexit 255\n")
    (folder / "perf").chmod(0o755)
    strace = shutil.which("strace")
    assert strace is not None, "strace is not installed"
    (folder / "strace").symlink_to(strace)
    found = advised(BUILD / "ttest1", "60", PATH=f"{folder}:/usr/bin:/bin")
    assert found["facts"]["calls"]["recorder"] == "strace"
    assert found["facts"]["calls"]["trimmed"] > 10
    (folder / "strace").unlink()
    # One that may not trace, as in many a container, must not pass for a program without calls.
    (folder / "strace").write_text("#!/bin/sh\nexit 1\n")
    (folder / "strace").chmod(0o755)
    found = advised(BUILD / "ttest1", "2", PATH=str(folder))
    assert {each["rule"] for each in found["not_judged"]} >= {"heap-churn", "large-blocks"}
    assert "recorded no call" in found["not_judged"][0]["reason"]
    (folder / "strace").unlink()
    # /bin/sh is there, and nothing else.
    found = advised(BUILD / "ttest1", "60", PATH=str(folder))
    assert found["facts"]["calls"] is None
    reasons = {each["rule"]: each["reason"] for each in found["not_judged"]}
    assert "tracepoints" in reasons["heap-churn"]
    assert "strace is not installed" in reasons["heap-churn"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "missing argument 'CMD...'"),
        (("--trials", "2", "--", "true"), 2, "no such option '--trials'"),
        (("--json", "/no/such/file", "--", "true"), 1, "cannot write /no/such/file: no such directory"),
        (("--json", "/dev/full", "--", "true"), 1, "cannot write /dev/full: No space left on device"),
        (("-o", "/dev/full", "--", "true"), 1, "cannot write /dev/full: No space left on device"),
    ],
)
def test_bad_input_gets_one_line(calm: Calm, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = calm("tune", "advise", *arguments)
    assert result.returncode == code
    assert result.stderr.startswith(f"calm: {message}")
    assert result.stderr.count("\n") == 1


def test_a_closed_pipe_ends_it_quietly() -> None:
    words = [sys.executable, "-m", "calm", "tune", "advise", "--", "true"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == PIPE_CLOSED


def test_the_document_is_one_that_calm_reads(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    assert start(path, "true").wait() == 0
    assert documents.read(str(path), Advice).command == ["true"]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(CalmError, match="cut short"):
        documents.read(str(path), Advice)


def test_a_program_that_fails_is_reported_and_ends_with_1() -> None:
    found = advised("sh", "-c", "exit 3", code=1)
    assert {each["reason"] for each in found["not_judged"]} >= {"the program failed (exit code 3)"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", ["first", "second"])
def test_what_is_known_is_kept_when_it_is_stopped_and_nothing_is_left(
    at: str, number: signal.Signals, tmp_path: Path
) -> None:
    # The first run is quick where the mark is not there yet, and makes it.
    mark, up = tmp_path / "mark", tmp_path / "up"
    script = (
        f"touch {up}; exec sleep 6100.5"
        if at == "first"
        else f"test -e {mark} && touch {up} && sleep 6100.5; touch {mark}"
    )
    process = start(tmp_path / "it.json", "sh", "-c", script, TMPDIR=str(tmp_path))
    wait_until(up.exists)
    below = proc.descendants(process.pid)
    assert below
    # Ctrl-C goes to the whole group; another signal goes to this process alone.
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr
    assert "nothing to advise" in stdout
    assert "stopped" in stderr
    assert json.loads((tmp_path / "it.json").read_text())["interrupted_by"] == number
    for pid in below:
        command = Path(f"/proc/{pid}/cmdline")
        assert not command.exists() or b"6100.5" not in command.read_bytes()
    assert not list(tmp_path.glob("calm-advise-*"))


def test_what_a_recorded_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 6200.5 & echo $! >> {pid}"
    assert advised("sh", "-c", script)["facts"]["calls"]["recorded"] > 0
    pids = pid.read_text().split()
    assert len(pids) > 1  # of each run
    assert not any(Path("/proc", each).exists() for each in pids)


def test_huge_pages_are_off_only_meanwhile() -> None:
    status = Path("/proc/self/status")
    if "THP_enabled" not in status.read_text():
        pytest.skip("this kernel does not say whether a process may have huge pages")
    before = status.read_text().split("THP_enabled:")[1].split()[0]
    with runs.without_huge_pages():
        inherited = subprocess.run(
            ["cat", "/proc/self/status"], capture_output=True, text=True, check=True
        ).stdout
        assert inherited.split("THP_enabled:")[1].split()[0] == "0"
    assert status.read_text().split("THP_enabled:")[1].split()[0] == before
