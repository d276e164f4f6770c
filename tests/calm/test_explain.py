"""calm explain: its verdicts on programs whose trouble is known, under each allocator, and bad input."""

import itertools
import json
import os
import random
import re
import signal
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calm_helpers import Calm
from explain_helpers import (
    ALLOCATORS,
    MIB,
    TROUBLES,
    available,
    build,
    huge_pages_on_request,
    running,
    verdict,
)
from namespaces import needs_first_pid_namespace

from calm.commands.explain import advice, calmalloc, command, picture, rules, stacks
from calm.commands.explain import readers as plugins
from calm.commands.explain.model import UNKNOWN, Heap, Process, estimate, exact
from calm.commands.explain.process import LiveProcess, sample
from calm.commands.explain.readers import readers
from calm.core import proc
from calm.core.errors import CalmError
from calm.core.proc import GoneError
from calm_heap_readers import glibc, versions

needs_calmalloc = pytest.mark.skipif(not available("calmalloc"), reason="calmalloc is not built")


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("explain"))


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_verdicts(troubled: Path, trouble: str, allocator: str) -> None:
    if not available(allocator):
        pytest.skip(f"{allocator} is not built")
    said, true, found = verdict(troubled, trouble, allocator)
    assert said in true
    assert sum(part.bytes for part in found.parts.values()) == found.rss
    assert abs(found.parts["remainder"].bytes) < 2 * MIB


def test_huge_pages(troubled: Path) -> None:
    if not huge_pages_on_request():
        pytest.skip("this system has no huge pages on request")
    with running(troubled, "huge") as found:
        taken = found.sample()
    if taken.huge < 32 * MIB:
        pytest.skip("the kernel gave no huge pages")
    assert rules.explain([taken]).verdict == "huge_pages"


@pytest.mark.parametrize("stripped", [False, True])
def test_a_static_program(tmp_path: Path, stripped: bool) -> None:
    """glibc's arenas are found by their contents: without a library, and without symbols."""
    program = build(tmp_path, "-static", *(["-s"] if stripped else []))
    with running(program, "retention") as found:
        taken = found.sample()
    assert rules.explain([taken]).verdict == "retained"
    assert taken.heap is not None
    assert taken.heap.in_use.bytes < 2 * MIB


def exact_blocks(allocator: str) -> int:
    """Bytes of a kept block of `fragmentation`, with what the allocator adds."""
    return 64 if allocator == "calmalloc" else 80


@pytest.mark.parametrize("allocator", ["calmalloc", "glibc", "ptlbmalloc2"])
def test_blocks_are_counted_exactly(troubled: Path, allocator: str) -> None:
    if not available(allocator):
        pytest.skip(f"{allocator} is not built")
    with running(troubled, "fragmentation", allocator) as found:
        taken = found.sample()
        kept = found.live // 64
    assert taken.heap is not None
    heap = taken.heap
    assert heap.in_use.certainty == "exact"
    # Beside the kept blocks there is what the C library allocates at its start.
    of_size = next(each for each in heap.classes if each.size in (64, 72))
    assert kept <= of_size.used <= kept + 50
    assert 0 <= heap.in_use.bytes - kept * exact_blocks(allocator) < MIB
    parts = (heap.in_use, heap.cached, heap.retained, heap.fragmentation, heap.metadata)
    assert sum(each.bytes for each in parts) == heap.footprint.bytes
    assert of_size.movable > 0.85 * of_size.bytes


@pytest.mark.parametrize("allocator", ["calmalloc", "glibc"])
def test_a_heap_that_changes(troubled: Path, allocator: str) -> None:
    """Neither a running heap nor one that was stopped anywhere, with its lock held, detains the reader."""
    if not available(allocator):
        pytest.skip(f"{allocator} is not built")
    with running(troubled, "busy", allocator) as found:
        for _ in range(10):
            for taken in (found.sample(), command.take(found.pid)):
                assert taken.heap is not None
                assert taken.heap.in_use.is_known
                assert taken.bytes("unaccounted") < 8 * MIB


class Damaged(LiveProcess):
    """A process of whose memory some words are not what they were."""

    damage: Callable[[int, bytes], bytes | None]

    def read(self, address: int, size: int) -> bytes | None:
        data = super().read(address, size)
        return None if data is None else self.damage(address, data)


def damaged(process: LiveProcess, damage: Callable[[int, bytes], bytes | None]) -> Damaged:
    found = Damaged.__new__(Damaged)
    found.__dict__.update(process.__dict__)
    found.damage = damage
    return found


@needs_calmalloc
def test_a_layout_of_another_version(troubled: Path) -> None:
    """The counters remain, which every release has."""

    def newer(_address: int, data: bytes) -> bytes:
        return data[:8] + b"\4" + data[9:] if data.startswith(b"calmblks") else data

    with running(troubled, "leak", "calmalloc") as found, sample(found.pid) as process:
        [heap] = calmalloc.heaps(damaged(process, newer))
    assert heap is not None
    assert heap.in_use.certainty == "estimate"
    assert heap.in_use.bytes >= found.live
    assert heap.fragmentation == UNKNOWN
    assert "layout" in heap.notes[0]


@pytest.mark.parametrize("allocator", ["calmalloc", "glibc"])
def test_damaged_memory(troubled: Path, allocator: str) -> None:
    """Whatever is read, no reader raises, and none takes what it reads for a size of its own work."""
    if not available(allocator):
        pytest.skip(f"{allocator} is not built")
    chance = random.Random(1)

    def flip(_address: int, data: bytes) -> bytes | None:
        if chance.random() < 0.02:
            return None
        changed = bytearray(data)
        for _ in range(chance.choice((0, 0, 1, 8))):
            changed[chance.randrange(len(changed))] = chance.randrange(256) if changed else 0
        return bytes(changed)

    with running(troubled, "mappings", allocator) as found:
        os.kill(found.pid, signal.SIGSTOP)
        for _ in range(60):
            with sample(found.pid) as process:
                taken = picture.picture(damaged(process, flip), readers())
            assert sum(part.bytes for part in taken.parts.values()) == taken.rss
            assert rules.explain([taken]).verdict in rules.VERDICTS


def test_descriptors_that_overlap(troubled: Path) -> None:
    """As a hostile process may have them: as many slabs as fit, each of the same pages."""
    if not available("calmalloc"):
        pytest.skip("calmalloc is not built")
    with running(troubled, "fragmentation", "calmalloc") as found, sample(found.pid) as process:
        (table,) = calmalloc.tables(process)
        layout = calmalloc._layout(process, table.blocks)
        spans = calmalloc._spans(process, calmalloc._heaps(process, layout)[0])
        slabs = spans[spans["state"] == layout.slab]
        many = np.repeat(slabs[:1], 200_000)
        many["pages"] = 1 << 10
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calmalloc, "_spans", lambda *_: many)
            tracemalloc.start()
            blocks = calmalloc._blocks(process, layout)
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert int(blocks.pages.sum()) % 200_000 == 0
    assert most < 64 << 20


def test_a_huge_reservation(troubled: Path) -> None:
    """Of terabytes it is not asked page by page what is resident."""
    with running(troubled, "mappings") as found, sample(found.pid) as process:
        assert process.present(0, 1 << 44) is None
        assert process.resident(0, 1 << 44) is None
        pages = 0
        while (part := process.present(0, 1 << 35)) is not None:
            pages += len(part)
            assert pages <= 1 << 30


def test_a_process_that_ends_while_it_is_read(troubled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(troubled, "mappings") as found:

        def kill(process: Process) -> tuple[Heap, ...]:
            os.kill(process.pid, signal.SIGKILL)
            found.process.wait()
            glibc.heaps(process)
            return ()

        monkeypatch.setattr(command, "readers", lambda: (kill,))
        with pytest.raises(GoneError, match=f"there is no process {found.pid}"):
            command.take(found.pid)


def test_a_process_that_becomes_a_zombie(troubled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(troubled, "mappings") as found:

        def kill(process: Process) -> tuple[Heap, ...]:
            os.kill(process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            glibc.heaps(process)
            return ()

        monkeypatch.setattr(command, "readers", lambda: (kill,))
        with pytest.raises(CalmError, match=r"ended while it was read"):
            command.take(found.pid)
        with pytest.raises(CalmError, match=r"has ended"):
            command.take(found.pid)


def test_without_permission(troubled: Path) -> None:
    with running(troubled, "mappings") as found:
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        os.seteuid(65534)
        try:
            with pytest.raises(CalmError, match=r"may not be read; root may") as error:
                command.take(found.pid)
        finally:
            os.seteuid(0)
        assert error.value.exit_code == 1


def test_an_allocator_that_cannot_be_read(troubled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is not taken for the program's own mappings."""
    monkeypatch.setattr(picture, "_unread", lambda *_: "snmalloc")
    with running(troubled, "mappings") as found:
        said = rules.explain([found.sample()])
    assert (said.verdict, said.certainty) == ("unknown", "unknown")
    assert "snmalloc" in said.why


def test_a_glibc_of_another_layout(troubled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas that are not proved are not read."""
    for name, form in glibc._LAYOUTS.items():
        monkeypatch.setitem(glibc._LAYOUTS, name, replace(form, heap_header=64))
    with running(troubled, "caches") as found:
        taken = found.sample()
    said = rules.explain([taken])
    assert (said.verdict, said.certainty) == ("unknown", "unknown")
    assert taken.heap is not None
    assert taken.heap.in_use == UNKNOWN
    assert "of this version" in said.why


def test_a_glibc_of_another_version(troubled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recognized is reported, and nothing is read."""
    monkeypatch.setattr(versions, "TABLE", ())
    with running(troubled, "caches") as found:
        taken = found.sample()
    said = rules.explain([taken])
    assert (said.verdict, said.certainty) == ("unknown", "unknown")
    assert re.search(r"Unknown version: glibc 2\.\d+\.", said.why)
    assert taken.heap is not None
    assert taken.heap.ranges == ()


def test_without_the_plugin(troubled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heap of another allocator is known by its mappings; calmalloc's own is read."""
    monkeypatch.setattr(plugins, "entry_points", lambda **_: ())
    plugins.readers.cache_clear()
    try:
        with running(troubled, "fragmentation") as found:
            said = rules.explain([found.sample()])
        with running(troubled, "fragmentation", "calmalloc") as found:
            of_ours = rules.explain([found.sample()])
    finally:
        plugins.readers.cache_clear()
    assert (said.verdict, said.certainty) == ("unknown", "unknown")
    assert "glibc" in said.evidence[0]
    assert "calm_heap_readers" in said.why
    assert of_ours.verdict == "fragmentation"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("999999999",), 1, "there is no process 999999999"),
        (("0",), 2, "0 is not a process id"),
        (("99999999999",), 2, "99999999999 is not a process id"),
        ((), 2, "missing argument"),
        pytest.param(("2",), 1, "2 is a thread of the kernel", marks=needs_first_pid_namespace),
        (("--for", "0s", "1"), 2, "not in the range"),
        (("--", "./no-such-program"), 127, "no-such-program"),
        (("--", "/etc/hostname"), 126, "cannot run '/etc/hostname'"),
        (("--for", "10s", "--", "false"), 1, "CMD ended with status 1"),
        (("--json", "/no/such/folder/x", "1"), 1, "no such directory"),
    ],
)
def test_bad_input(calm: Calm, words: tuple[str, ...], status: int, message: str) -> None:
    result = calm("explain", *words)
    assert result.returncode == status
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_thread_is_not_a_process(troubled: Path) -> None:
    with running(troubled, "busy") as found:
        thread = max(proc.threads(found.pid))
        with pytest.raises(CalmError, match=f"{thread} is a thread of process {found.pid}"):
            command.take(thread)


def test_the_document(troubled: Path, calm: Calm, tmp_path: Path) -> None:
    path = tmp_path / "explain.json"
    with running(troubled, "fragmentation") as found:
        result = calm("explain", "--for", "1ms", "--json", path, str(found.pid))
    assert result.returncode == 0
    document = json.loads(path.read_text())
    assert document["schema"] == "calm-explain"
    assert (document["pid"], document["verdict"], document["grew"]) == (found.pid, "fragmentation", False)
    assert document["allocator"] == "glibc"
    assert len(document["samples"]) == 2
    for taken in document["samples"]:
        assert sum(part["bytes"] for part in taken["parts"].values()) == taken["rss"]
    assert document["summary"] in result.stdout
    assert document["steps"]
    for step in document["steps"]:
        assert step in result.stdout


@needs_calmalloc
@pytest.mark.feature("profile")
def test_stacks_that_hold_the_memory(troubled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALM_OPTIONS", "profile=64k")
    with running(troubled, "leak", "calmalloc") as found:
        first = stacks.snapshot(found.pid)
        [held, *_] = stacks.evidence(found.pid, [first], grew=False)
        found.go_on()
        last = stacks.snapshot(found.pid)
        [grown, *_] = stacks.evidence(found.pid, [first, last], grew=True)
    assert "by the heap profile: " in held
    assert "leak ← main" in held
    assert "more, by the heap profile: " in grown
    assert "leak ← main" in grown


@needs_calmalloc
def test_no_stacks_without_a_profile(troubled: Path) -> None:
    with running(troubled, "leak", "calmalloc") as found:
        assert stacks.snapshot(found.pid) is None
    assert stacks.evidence(found.pid, [None, None], grew=True) == []


def test_a_command(troubled: Path, calm: Calm) -> None:
    """Its own output has standard output to itself, and it is ended."""
    result = calm("explain", "--for", "10ms", "--", "sh", "-c", "echo $$; exec sleep 1000")
    assert result.returncode == 0, result.stderr
    assert "small: " in result.stderr
    pid = int(result.stdout)
    assert not Path(f"/proc/{pid}").exists()


def test_a_program_that_becomes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again; one that does not end to do so is not."""
    stat, names = proc.stat(os.getpid()), iter("aabccc")
    monkeypatch.setattr(proc, "stat", lambda _: replace(stat, name=next(names)))
    assert command.take(os.getpid()).pid == os.getpid()
    assert list(names) == []
    names = itertools.cycle("aab")
    with pytest.raises(CalmError, match="executed another program while it was read"):
        command.take(os.getpid())


def test_a_name_is_no_process_id(calm: Calm) -> None:
    """Without `--`, the name of a running process is a mistake for its id, and starts nothing."""
    name = Path("/proc/self/comm").read_text().strip()
    result = calm("explain", "--for", "10ms", name)
    assert result.returncode == 2
    assert f"{name} is not a process id; processes of that name: " in result.stderr
    assert "To start the program, put `--` before it" in result.stderr


def heap(**figures: int) -> Heap:
    names = ("in_use", "cached", "retained", "fragmentation", "metadata")
    found = {name: exact(figures.get(name, 0) * MIB) for name in names}
    return Heap("glibc", "2.36", footprint=exact(sum(each.bytes for each in found.values())), **found)


def pictured(rss: int, shared: int = 0, **parts: int) -> picture.Picture:
    """A picture of so many MiB."""
    found = {name: exact(parts.get(name, 0) * MIB) for name in picture.PARTS}
    found["remainder"] = exact(0)
    return picture.Picture(
        pid=1,
        command="program",
        rss=rss * MIB,
        parts=found,
        heaps=(heap(**{name: size for name, size in parts.items() if name in picture.HEAP_PARTS}),),
        of_heaps=({name: found[name] for name in picture.HEAP_PARTS},),
        unread="",
        untouched=0,
        shared=shared * MIB,
        swap=0,
        huge=0,
        empty_huge=exact(0),
        largest=(),
        notes=(),
    )


@pytest.mark.parametrize("part", ["in_use", "cached", "retained", "fragmentation"])
def test_the_largest_part_is_the_verdict(part: str) -> None:
    assert rules.explain([pictured(40, **{part: 30, "files": 10})]).verdict == part
    assert rules.explain([pictured(9, **{part: 7, "files": 2})]).verdict == "small"


def test_growth_outweighs_size() -> None:
    before, after = pictured(200, in_use=180, cached=20), pictured(230, in_use=181, cached=49)
    said = rules.explain([before, after])
    assert (said.verdict, said.grew) == ("cached", True)
    assert rules.explain([before, pictured(230, in_use=210, cached=20)]).verdict == "leak_suspected"


def test_growth_is_that_of_the_heap_that_grew() -> None:
    """Not of the one that is largest; and each further cause has the steps of the heap that it is in."""
    of_library = replace(
        heap(), allocator="jemalloc", library="libduckdb.so", settings="DUCKDB_JE_MALLOC_CONF"
    )

    def both(library_in_use: int, library_retained: int) -> picture.Picture:
        parts = {"in_use": 200 + library_in_use, "retained": library_retained}
        found = pictured(sum(parts.values()), **parts)
        own = {name: exact(200 * MIB if name == "in_use" else 0) for name in picture.HEAP_PARTS}
        other = dict.fromkeys(picture.HEAP_PARTS, exact(0))
        other |= {"in_use": exact(library_in_use * MIB), "retained": exact(library_retained * MIB)}
        return replace(found, heaps=(heap(in_use=200), of_library), of_heaps=(own, other))

    said = rules.explain([both(10, 0), both(60, 20)])
    assert said.verdict == "leak_suspected"
    assert "50.0 MiB of it is jemalloc in libduckdb.so's." in said.evidence
    assert said.steps[-1].startswith("DUCKDB_JE_MALLOC_CONF=")
    assert rules.explain([both(10, 0)]).evidence[-1] == "200.0 MiB of it is glibc's."


def test_what_did_not_grow_is_explained_by_its_size() -> None:
    said = rules.explain([pictured(200, in_use=200), pictured(201, in_use=201)])
    assert (said.verdict, said.grew) == ("in_use", False)


def test_blocks_that_replace_free_memory_grow() -> None:
    """RSS stays as it is where a leak consumes what the allocator retained."""
    said = rules.explain([pictured(200, in_use=100, retained=100), pictured(200, in_use=150, retained=50)])
    assert (said.verdict, said.grew) == ("leak_suspected", True)


def test_growth_of_blocks_while_rss_falls() -> None:
    said = rules.explain([pictured(210, in_use=100, retained=110), pictured(200, in_use=150, retained=50)])
    assert said.summary.startswith("RSS fell by 10.0 MiB to 200.0 MiB.")
    assert said.evidence[0] == "This part grew by 50.0 MiB, while others shrank."


def test_sharing_counts_where_it_is_half() -> None:
    assert rules.explain([pictured(100, shared=60, in_use=90)]).verdict == "shared"
    assert rules.explain([pictured(100, shared=40, in_use=90)]).verdict == "in_use"


def test_further_causes_are_named() -> None:
    said = rules.explain([pictured(100, in_use=60, fragmentation=30, cached=5)])
    assert [each.verdict for each in said.also] == ["fragmentation"]


def test_further_causes_have_a_step_each() -> None:
    said = rules.explain([pictured(100, in_use=60, retained=30)])
    assert said.steps[-1] == "malloc_trim(0), called by the program, returns it at once."


@pytest.mark.parametrize(("top", "advised"), [(80, True), (1, False)])
def test_ptlbmalloc2_is_advised_where_memory_is_at_the_tops(top: int, advised: bool) -> None:
    steps = advice.steps("retained", replace(heap(retained=100), facts={"top": top * MIB}), 1)
    assert any("-a ptlbmalloc2" in each for each in steps) == advised
    assert any("-a calmalloc" in each for each in steps)


def test_settings_and_functions_have_the_prefix_of_the_build() -> None:
    of_library = replace(
        heap(), allocator="jemalloc", library="libduckdb.so", settings="DUCKDB_JE_MALLOC_CONF"
    )
    steps = advice.steps("retained", of_library, 1)
    assert steps[0].startswith("`SET allocator_background_threads=true`")
    assert steps[1].startswith("DUCKDB_JE_MALLOC_CONF=background_thread:true,")
    assert len(steps) == 2  # a function that the image does not have is none to call
    steps = advice.steps("retained", replace(of_library, control="duckdb_je_mallctl"), 1)
    assert steps[2].startswith('duckdb_je_mallctl("arena.')
    assert not [each for each in advice.steps("in_use", of_library, 1) if "heap run" in each]


def test_how_a_heap_is_made_to_return_memory() -> None:
    assert "call (int)malloc_trim(0)" in advice.release("glibc", heap(), 7)
    jemalloc = replace(heap(), allocator="jemalloc", library="libx.so", settings="X_MALLOC_CONF")
    assert advice.release("jemalloc", jemalloc, 7).startswith("X_MALLOC_CONF=")
    assert 'call (int)x_mallctl("arena.' in advice.release(
        "jemalloc", replace(jemalloc, control="x_mallctl"), 7
    )
    arrow = replace(heap(), allocator="mimalloc", library="libarrow.so.2600", control="mi_collect")
    assert advice.release("mimalloc", arrow, 7).startswith("`pyarrow.default_memory_pool()")
    assert advice.release("rpmalloc", None, 7) == ""


def test_an_allocator_of_a_library_spoils_no_other_figure(troubled: Path) -> None:
    """One that cannot be read, as it is idle: its memory, if any, counts as other mappings."""
    with running(troubled, "mappings") as program, sample(program.pid) as found:
        idle = Heap("mimalloc", "", UNKNOWN, UNKNOWN, notes=("It was not found.",), library="libarrow.so")
        taken = picture.picture(found, [*readers(), lambda _: (idle,)])
    assert taken.parts["unaccounted"].bytes == 0
    assert taken.parts["other"].certainty == "estimate"
    assert "mimalloc in libarrow.so: It was not found." in taken.notes


def test_memory_in_use_leads_to_the_heap_profile() -> None:
    for allocator in ("glibc", "jemalloc", "mimalloc", "calmalloc"):
        steps = advice.steps("in_use", replace(heap(), allocator=allocator), 1)
        assert steps[0].startswith("`calm heap run ")


def test_a_process_id_is_no_file(calm: Calm) -> None:
    result = calm("explain", "--json", str(os.getpid()))
    assert result.returncode == 2
    assert f"--json {os.getpid()}: is a number, not a file; process ids go before --json" in result.stderr


def test_a_process_that_changes_while_it_is_read_is_an_estimate() -> None:
    first = pictured(100, in_use=50)
    first.parts["remainder"] = exact(50 * MIB)
    said = rules.explain([first, pictured(100, in_use=100)])
    assert (said.certainty, "differ by 50.0 MiB" in said.why) == ("estimate", True)


def test_an_estimate_says_so() -> None:
    found = pictured(100, in_use=90)
    found.parts["in_use"] = estimate(90 * MIB)
    assert rules.explain([found]).certainty == "estimate"


def test_a_process_that_changed_while_it_was_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As jemalloc's purging between smaps and RSS; and what never fits says so, whatever is uncertain."""
    changed, settled = pictured(20, in_use=50), pictured(20, in_use=20)
    changed = replace(changed, parts=changed.parts | {"remainder": replace(exact(0), bytes=-30 * MIB)})
    for pictures, expected in (([changed, settled], settled), ([changed] * 3, changed)):
        left = iter(pictures)
        monkeypatch.setattr(command, "_take", lambda _, left=left: next(left))
        assert command.take(1) is expected
    guessed = replace(changed, parts=changed.parts | {"in_use": estimate(50 * MIB)})
    said = rules.explain([guessed])
    assert (said.certainty, "differ by 30.0 MiB" in said.why) == ("estimate", True)


def test_every_verdict_and_allocator_has_steps() -> None:
    for verdict_ in rules.VERDICTS:
        for allocator in ALLOCATORS:
            steps = advice.steps(verdict_, replace(heap(), allocator=allocator), 1)
            assert steps or verdict_ == "small"
            assert len(set(steps)) == len(steps)


def test_free_memory_has_a_date() -> None:
    """Of calmalloc, as far as the policy knows."""
    facts = {"limit": 90 * MIB, "waiting_bytes": 80 * MIB, "waiting_unused_ns": 1_200_000_000}
    facts |= {"waiting_until_ns": 3_300_000_000}
    found = pictured(100, in_use=10, retained=90)
    cases = ((1_000_000_000, "usually needed again after 1.0 s"), (0, "never needed again so far"))
    for reuse, words in cases:
        known = replace(heap(retained=90), facts={**facts, "waiting_reuse_ns": reuse})
        said = rules.explain([replace(found, heaps=(known,))])
        assert f"80.0 MiB, last needed 1.2 s ago, {words}, goes at 3.3 s" in " ".join(said.evidence)
