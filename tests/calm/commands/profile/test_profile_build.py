"""calm profile: from the kernel's records to findings, each step by itself."""

import dataclasses
import io
import json
import os
import shutil
import struct
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import profile_samples
import pytest
from msgspec.structs import replace
from rich.console import Console

from calm.commands.profile import counting, findings, memory, recorder, watch
from calm.commands.profile.build import bin_width, build, cause_of, kind_of
from calm.commands.profile.causes import classify
from calm.commands.profile.memory import Sampler, _Points
from calm.commands.profile.recorder import Recorder, parse_counts
from calm.commands.profile.recording import Recording, Sample, prepare, read
from calm.commands.profile.summary import _by_time, show, sparkline, ways
from calm.core import elf, symbols
from calm.core.profile_model import (
    CALL,
    CAUSES,
    CPU,
    FAULT,
    SHOOTDOWN,
    Cause,
    Curve,
    Frame,
    Profile,
    Stack,
    Timeline,
    Total,
)
from calm.core.symbols import Address

ENTRY = ("do_syscall_64", "entry_SYSCALL_64_after_hwframe")
FLUSH = ("native_flush_tlb_multi", "flush_tlb_mm_range", "tlb_flush_mmu_tlbonly", "tlb_finish_mmu")


@pytest.mark.parametrize(
    ("functions", "cause"),
    [
        ((*FLUSH, "do_madvise", "__x64_sys_madvise", *ENTRY), "madvise"),
        ((*FLUSH, "do_madvise.part.0", "__arm64_sys_madvise"), "madvise"),
        (("vector_madvise", "__do_sys_process_madvise", "do_madvise"), "process_madvise"),
        ((*FLUSH, "unmap_region", "do_vmi_align_munmap", "__vm_munmap", "__x64_sys_munmap"), "munmap"),
        ((*FLUSH, "do_vmi_munmap", "__do_sys_brk", "__x64_sys_brk"), "brk"),
        (
            (*FLUSH, "change_protection", "mprotect_fixup", "do_mprotect_pkey", "__x64_sys_mprotect"),
            "mprotect",
        ),
        (("do_mprotect_pkey", "__x64_sys_pkey_mprotect"), "mprotect"),
        (("flush_tlb_mm_range", "move_page_tables", "move_vma", "__do_sys_mremap", "do_munmap"), "mremap"),
        (("do_vmi_munmap", "mmap_region", "do_mmap", "vm_mmap_pgoff", "ksys_mmap_pgoff"), "mmap"),
        (("ptep_clear_flush", "do_wp_page", "__handle_mm_fault", "exc_page_fault"), "cow"),
        (("ptep_clear_flush", "wp_page_copy.isra.0", "handle_mm_fault"), "cow"),
        (("flush_tlb_mm_range", "dup_mmap", "dup_mm.constprop.0", "copy_process", "kernel_clone"), "fork"),
        ((*FLUSH, "exit_mmap", "__mmput", "do_exit", "do_group_exit"), "exit"),
        ((*FLUSH, "exit_mmap", "__mmput", "begin_new_exec", "__x64_sys_execve"), "exit"),
        (("arch_tlbbatch_flush", "try_to_unmap_flush", "shrink_folio_list", "handle_mm_fault"), "reclaim"),
        (("migrate_pages", "compact_zone", "try_to_compact_pages", "handle_mm_fault"), "compaction"),
        (("try_to_migrate", "migrate_pages", "do_pages_move", "__x64_sys_move_pages"), "migration"),
        (("ptep_clear_flush", "write_protect_page", "try_to_merge_one_page", "ksm_scan_thread"), "ksm"),
        (("change_protection", "change_prot_numa", "task_numa_work", "task_work_run"), "numa"),
        (("migrate_pages", "migrate_misplaced_folio", "do_numa_page", "handle_mm_fault"), "numa"),
        (("pmdp_collapse_flush", "collapse_huge_page", "khugepaged"), "collapse"),
        (("__split_huge_pmd_locked", "__split_huge_pmd", "do_madvise", "__x64_sys_madvise"), "collapse"),
        (
            ("shrink_folio_list", "reclaim_pages", "madvise_cold_or_pageout_pte_range", "do_madvise"),
            "madvise",
        ),
        (("folio_mkclean", "folio_clear_dirty_for_io", "vfs_fsync_range", "__x64_sys_msync"), "msync"),
        (("membarrier_private_expedited", "__x64_sys_membarrier"), "membarrier"),
        (("clear_page_erms", "do_anonymous_page", "handle_mm_fault", "asm_exc_page_fault"), "fault"),
        # What the interrupt found on the CPU is no cause of it.
        (
            ("flush_tlb_func", "__flush_smp_call_function_queue", "sysvec_call_function", "do_madvise"),
            "interrupt",
        ),
        # The CPU that sends flushes its own too, without an interrupt.
        (("flush_tlb_func", "flush_tlb_mm_range", "do_madvise"), "madvise"),
        (("ksys_read", "__x64_sys_read", *ENTRY), "other"),
        (("set_pte", "pick_next_task", "schedule"), "other"),
        ((), "other"),
    ],
)
def test_the_stack_names_the_cause(functions: tuple[str, ...], cause: str) -> None:
    assert classify(functions) == cause
    assert classify(reversed(functions)) == cause
    assert cause in CAUSES


TEXT = """\
 7/9     5.000001:                      tlb:tlb_flush: pages:1 reason:remote IPI send (4)
\tffffffff81342bc6 native_flush_tlb_multi ([kernel.kallsyms])
\t         101b07 __madvise (/opt/a place (with) blanks/libc.so.6)
\t           1234 _ZN1a1bEv (/opt/prog)

garbage that no sample has
    7/7 5.25: cpu-clock/period=10101010/:\x20
\t           1234 [unknown] ([vdso])
7/9 6.0: page-faults:u: \n"""


def test_samples_are_read() -> None:
    first, second, third = read(io.StringIO(TEXT), 11)
    assert (first.at_s, first.period, first.event) == (5.000001, 11, "tlb:tlb_flush")
    assert first.trace == "pages:1 reason:remote IPI send (4)"
    assert [address.kernel for address in first.stack] == [True, False, False]
    assert first.stack[1].module == "/opt/a place (with) blanks/libc.so.6"
    assert first.stack[1].offset == 0x101B07
    # A tick of the clock stands for itself.
    assert (second.event, second.period) == ("cpu-clock", 1)
    assert not second.stack[0].kernel
    assert (third.event, third.stack) == ("page-faults:u", ())
    assert [kind_of(sample.event) for sample in (first, second, third)] == [SHOOTDOWN, CPU, FAULT]


def test_offsets_in_files_are_read_where_perf_prints_them() -> None:
    """Its address is then the process's. Without them, a name may end as they do."""
    text = TEXT.replace("libc.so.6)", "libc.so.6+0x10caf7)")
    stack = next(read(io.StringIO(text), 11, has_offsets=True)).stack
    assert (stack[1].module, stack[1].offset) == ("/opt/a place (with) blanks/libc.so.6", 0x10CAF7)
    assert (stack[0].module, stack[0].offset) == ("[kernel.kallsyms]", 0xFFFFFFFF81342BC6)
    stack = next(read(io.StringIO(text), 11)).stack
    assert (stack[1].module, stack[1].offset) == ("/opt/a place (with) blanks/libc.so.6+0x10caf7", 0x101B07)


def record(kind: int, body: bytes, misc: int = 0) -> bytes:
    return struct.pack("<IHH", kind, misc, 8 + len(body)) + body


def sample(pid: int) -> bytes:
    return record(9, struct.pack("<QQII", 1, 0, pid, pid))


def fork(pid: int, parent: int, time: int) -> bytes:
    return record(7, struct.pack("<IIIIQ", pid, parent, pid, parent, time))


def comm(pid: int, name: bytes, misc: int = 0) -> bytes:
    padded = name + b"\0" * (8 - len(name) % 8)
    return record(3, struct.pack("<II", pid, pid) + padded + b"trailer!", misc)


ATTR = record(64, struct.pack("<IIQQQ", 1, 32, 0, 0, 1 << 16))
START = b"PERFILE2" + struct.pack("<Q", 16)


def prepared(*records: bytes, roots: tuple[int, ...] = (10,)) -> tuple[Recording, bytes]:
    target, recording = io.BytesIO(), Recording()
    prepare(io.BytesIO(START + b"".join(records)), target, roots, recording)
    return recording, target.getvalue()


def test_others_are_dropped_and_descendants_kept() -> None:
    # Buffers of several CPUs: a child's sample may stand before its birth.
    recording, kept = prepared(
        ATTR, sample(12), sample(99), fork(12, 11, 200), fork(11, 10, 100), sample(10), fork(99, 98, 50)
    )
    assert recording.processes == {10, 11, 12}
    assert recording.samples == 2
    assert kept == START + ATTR + sample(12) + fork(12, 11, 200) + fork(11, 10, 100) + sample(10)


def test_mappings_of_the_kernel_and_of_the_program_are_kept() -> None:
    def mapped(pid: int) -> bytes:
        return record(1, struct.pack("<iIQQQ", pid, 0, 0, 4096, 0))

    _, kept = prepared(ATTR, mapped(-1), mapped(10), mapped(99))
    assert kept == START + ATTR + mapped(-1) + mapped(10)


class Switched:
    """In the place of the fine perf: its size is set, and it answers at once."""

    def __init__(self) -> None:
        self.size = 0
        self.output = io.BytesIO()
        self.orders: list[str] = []

    def order(self, what: str) -> None:
        self.orders.append(what)

    def answered(self) -> bool:
        return True


def test_the_fine_recording_pauses_when_it_has_written_too_much() -> None:
    perf = Switched()
    fine = recorder._Fine(perf, 100.0)  # type: ignore[arg-type]
    # For long a MiB a second, and as much at once.
    for second in range(3):
        perf.size += 1 << 20
        fine.tick(101.0 + second)
    assert perf.orders == []
    perf.size += 5 << 20
    fine.tick(104.0)
    for moment in (104.1, 104.9):
        fine.tick(moment)
        assert perf.orders == ["disable"]
    fine.tick(105.0)
    assert perf.orders == ["disable", "enable"]
    fine.tick(105.1)
    times = (103.9, 104.0, 105.05, 105.1, 200.0)
    assert [fine.covers(moment) for moment in times] == [True, False, False, True, True]
    # What was written before counts no more.
    fine.tick(105.2)
    assert perf.orders == ["disable", "enable"]


def test_each_moment_is_of_one_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    perfs = [Switched(), Switched()]
    made = Recorder(99)
    made._perfs, made._fine = perfs, recorder._Fine(perfs[1], 100.0)  # type: ignore[assignment, arg-type]
    made._fine.on = [[100.0, 101.0]]
    events = [at(moment, event) for moment in (100.5, 101.5) for event in ("tlb:tlb_flush", "cpu-clock")]

    def sampled(_perf: str, _prepared: IO[bytes], period: int, *, traced: bool) -> list[Sample]:
        # The clock runs in the coarse one alone.
        return [
            dataclasses.replace(e, period=period)
            for e in events
            if e.event != "cpu-clock" or period == recorder.COARSE
        ]

    monkeypatch.setattr(recorder, "script", sampled)
    found = {(s.at_s, s.event, s.period) for s, _ in made.samples(Recording())}
    assert found == {
        (100.5, "tlb:tlb_flush", 11),
        (101.5, "tlb:tlb_flush", 997),
        (100.5, "cpu-clock", 997),
        (101.5, "cpu-clock", 997),
    }


def test_exec_forgets_what_was_mapped() -> None:
    before = comm(10, b"shell name")
    execed = comm(10, b"a", 1 << 13)
    _, kept = prepared(ATTR, before, execed)
    assert kept.startswith(START + ATTR + before + execed)
    cover = kept[len(START + ATTR + before + execed) :]
    kind, _, size = struct.unpack_from("<IHH", cover)
    assert (kind, size) == (10, len(cover))
    pid, _, begin, length = struct.unpack_from("<IIQQ", cover, 8)
    assert pid == 10
    assert begin < 0x10000
    assert length > 1 << 47
    # Same moment, same ids as the exec.
    assert cover.endswith(b"//anon\0\0trailer!")


def test_lost_records_are_counted_and_payloads_skipped() -> None:
    tracing = record(66, struct.pack("<I", 16)) + sample(10)[:16]
    lost = record(2, struct.pack("<QQ", 1, 5)) + record(13, struct.pack("<Q", 4))
    recording, kept = prepared(ATTR, tracing, lost, sample(10))
    assert (recording.lost, recording.samples) == (9, 1)
    assert kept.endswith(sample(10))


def test_a_stream_that_was_cut_off_ends_at_its_last_whole_record() -> None:
    whole = START + ATTR + sample(10)
    target, recording = io.BytesIO(), Recording()
    prepare(io.BytesIO(whole + sample(10)[:20]), target, [10], recording)
    assert (recording.samples, target.getvalue()) == (1, whole)
    nothing = Recording()
    prepare(io.BytesIO(b""), io.BytesIO(), [10], nothing)
    assert nothing.samples == 0


KERNEL = tuple(Address("[kernel.kallsyms]", i, name) for i, name in enumerate(("do_madvise", *ENTRY)))
USER = (Address("/no/such/prog", 1, "inner"), Address("/no/such/prog", 2, "main"))


def at(
    moment: float, event: str, stack: tuple[Address, ...] = USER, period: int = 1, trace: str = ""
) -> Sample:
    return Sample(moment, period, event, trace, stack)


def test_weights_are_scaled_to_the_totals() -> None:
    totals = {
        "shootdowns": Total(1000, ""),
        "minor_faults": Total(40, ""),
        "major_faults": Total(10, ""),
        "user_s": Total(1.0, "", "s"),
        "system_s": Total(3.0, "", "s"),
        "madvise": Total(90, ""),
        "munmap": Total(7, ""),
    }
    samples = [
        at(100.0, "tlb:tlb_flush", KERNEL + USER, 11),
        at(100.5, "tlb:tlb_flush", USER, 499),
        at(100.5, "syscalls:sys_enter_madvise", period=11),
        at(100.6, "syscalls:sys_enter_mmap", period=11),
        at(100.7, "exceptions:page_fault_user", period=11, trace="address=0x1 ip=0x2 error_code=0x7"),
        at(100.7, "exceptions:page_fault_user", period=11, trace="address=0x1 ip=0x2 error_code=0x5"),
        *[at(100.9, "cpu-clock", KERNEL + USER)] * 10,
        *[at(200.0, "cpu-clock")] * 10,
        at(100.9, "dummy:HG"),
    ]
    parts = build(samples, totals, began=100.0, wall_s=1.0, tick_s=0.01)
    causes = {cause.key: cause for cause in parts.causes}
    assert causes["madvise"].shootdowns == pytest.approx(1000 * 11 / 510)
    assert causes["madvise"].calls == 90
    assert causes["madvise"].cpu_s == pytest.approx(2.0)
    assert causes["munmap"] == Cause("munmap", 0, 0, 7, 0)
    assert causes["cow"].faults == causes["fault"].faults == pytest.approx(25)
    assert sum(s.weight for s in parts.stacks if (s.kind, s.cause) == (CALL, "madvise")) == pytest.approx(90)
    assert parts.causes[-1].key == "other"
    # Nobody counted these, so the samples are all there is.
    assert causes["mmap"].calls == 11
    for kind, total in ((SHOOTDOWN, 1000), (FAULT, 50), (CPU, 4.0)):
        assert sum(s.weight for s in parts.stacks if s.kind == kind) == pytest.approx(total)
    series = parts.timeline.series
    assert parts.timeline.bin_s == bin_width(1.0) == 0.01
    assert sum(series["shootdown:madvise"]) == pytest.approx(1000 * 11 / 510)
    assert series["cpu:system"][90] == pytest.approx(2.0)
    # What comes late is of the last bin.
    assert series["cpu:user"][-1] == pytest.approx(2.0)
    assert {len(values) for values in series.values()} == {100}


@pytest.mark.parametrize(
    ("code", "cause"), [("0x4", "fault"), ("0x6", "fault"), ("0x7", "cow"), ("?", "fault")]
)
def test_a_copy_is_of_a_page_that_was_there(code: str, cause: str) -> None:
    made = at(1.0, "exceptions:page_fault_user", trace=f"address=0x1 ip=0x2 error_code={code}")
    assert cause_of(made, FAULT) == cause


def test_ticks_that_nobody_counted_are_seconds() -> None:
    (stack,) = build([at(100.5, "cpu-clock")] * 20, {}, 100.0, 1.0, 0.01).stacks
    assert stack.weight == pytest.approx(0.2)


def test_cpu_time_is_not_told_apart_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_line(addresses: Collection[Address]) -> dict[Address, tuple[Frame, ...]]:
        return {a: (Frame("f", "prog", source=f"f.c:{a.offset}"),) for a in addresses}

    monkeypatch.setattr(symbols, "resolve", by_line)
    both = [Address("prog", 1, "f"), Address("prog", 2, "f")]
    for event, number in (("cpu-clock", 1), ("page-faults", 2)):
        assert len(build([at(100.5, event, (a,)) for a in both], {}, 100.0, 1.0, 0.01).stacks) == number


def test_a_few_samples_make_no_curve_of_cpu_time() -> None:
    """Nineteen of them, for 4 s of CPU time: each would be 21 CPUs, for a hundredth of a second."""
    samples = [at(100 + n / 20, "cpu-clock", KERNEL + USER) for n in range(20)]
    totals = {"user_s": Total(1.0, "", "s"), "system_s": Total(3.0, "", "s")}
    few = build(samples[:19], totals, began=100.0, wall_s=1.0, tick_s=0.01)
    assert few.timeline.series == {}
    assert sum(stack.weight for stack in few.stacks) == pytest.approx(4.0)
    assert "cpu:system" in build(samples, totals, began=100.0, wall_s=1.0, tick_s=0.01).timeline.series


def test_without_the_kernels_part_cpu_time_is_the_users_and_has_no_causes() -> None:
    totals = {"user_s": Total(1.0, "", "s"), "system_s": Total(3.0, "", "s"), "minor_faults": Total(40, "")}
    samples = [*[at(100.5, "cpu-clock")] * 20, at(100.5, "page-faults:u", period=11)]
    parts = build(samples, totals, began=100.0, wall_s=1.0, tick_s=0.01, kernel_stacks=False)
    assert sum(stack.weight for stack in parts.stacks if stack.kind == CPU) == pytest.approx(1.0)
    assert sum(parts.timeline.series["cpu:user"]) == pytest.approx(1.0)
    assert parts.causes == [Cause("fault", None, 40, None, None)]


def test_what_was_not_sampled_is_no_zero() -> None:
    totals = {"shootdowns": Total(None, "not counted"), "madvise": Total(5, "")}
    (cause,) = build([], totals, 0.0, 1.0, 0.01).causes
    assert cause == Cause("madvise", None, None, 5, None)
    (known,) = build([], totals | {"shootdowns": Total(0, "")}, 0.0, 1.0, 0.01).causes
    assert known.shootdowns == 0


@pytest.mark.parametrize(
    ("wall_s", "width"), [(0.001, 0.01), (1.0, 0.01), (3.3, 0.05), (1000, 10), (0, 0.01)]
)
def test_bins_have_round_widths(wall_s: float, width: float) -> None:
    assert bin_width(wall_s) == pytest.approx(width)


TRIM = ("start_thread", "work", "cfree@GLIBC_2.2.5", "_int_free", "heap_trim", "shrink_heap", "__GI_madvise")


def profile(
    stacks: list[tuple[str, str, tuple[str, ...], float]],
    totals: dict[str, float] | None = None,
    causes: list[Cause] | None = None,
    module: str = "libc.so.6",
    wall_s: float = 1.0,
) -> Profile:
    frames: list[Frame] = []
    made = []
    for kind, cause, functions, weight in stacks:
        indices = tuple(range(len(frames), len(frames) + len(functions)))
        frames += [Frame(function, module) for function in functions]
        made.append(Stack(kind, cause, indices, weight, 60))
    values = {
        "shootdowns": 10_000.0,
        "user_s": 2.0,
        "system_s": 2.0,
        "peak_rss_kib": 1e6,
        "minor_faults": 100.0,
    }
    return replace(
        profile_samples.empty(),
        command=["prog"],
        wall_s=wall_s,
        exit_code=0,
        interrupted_by=None,
        totals={name: Total(value, "") for name, value in (values | (totals or {})).items()},
        causes=causes or [],
        frames=frames,
        stacks=made,
        timeline=Timeline(0.01),
        sampled={kind: 60.0 for kind, *_ in stacks},
        curves={"rss": Curve([0.0], [1.0])},
    )


def test_arena_trimming_is_found() -> None:
    found = findings.find(
        profile(
            [(SHOOTDOWN, "madvise", TRIM, 9300.0), (CALL, "madvise", TRIM, 93_000.0)], {"madvise": 100_000}
        )
    )
    assert found[0].text == (
        "93 % of 100,000 madvise calls and 93 % of the program's 10,000 shootdowns come from arena trimming "
        "in glibc's free."
    )
    assert "about 9,300 shootdowns, about 93,000 madvise calls" in found[0].evidence
    assert found[0].share == pytest.approx(0.93)
    assert "calm tune" in str(found[0].remedy)


@pytest.mark.parametrize(
    ("cause", "functions", "module", "words"),
    [
        ("mmap", ("main", "heap_trim", "shrink_heap", "mmap"), "libc.so.6", "arena trimming"),
        # Without debugging information the inlined ones are missing.
        ("madvise", ("main", "free", "_int_free", "madvise"), "libc.so.6", "arena trimming in glibc's free"),
        (
            "brk",
            ("main", "free", "_int_free", "systrim", "sbrk", "brk"),
            "libc.so.6",
            "shrinking the main heap",
        ),
        (
            "mprotect",
            ("main", "malloc", "_int_malloc", "sysmalloc", "grow_heap"),
            "libc.so.6",
            "page by page",
        ),
        ("munmap", ("main", "__GI___libc_free", "munmap_chunk", "munmap"), "libc.so.6", "mmap threshold"),
        (
            "madvise",
            ("start_thread", "advise_stack_range", "madvise"),
            "libc.so.6",
            "threads that begin and end",
        ),
        ("madvise", ("clone3", "start_thread", "madvise"), "libc.so.6", "threads that begin and end"),
        ("madvise", ("main", "free", "purge", "madvise"), "libjemalloc.so.2", "jemalloc's purging"),
        ("process_madvise", ("free", "process_madvise"), "libmimalloc.so.3", "mimalloc's purging"),
        ("munmap", ("free", "munmap"), "libsnmalloc.so", "snmalloc's purging"),
    ],
)
def test_each_place_is_found(cause: str, functions: tuple[str, ...], module: str, words: str) -> None:
    calls = profile([(CALL, cause, functions, 5000.0)], {cause: 5000}, module=module)
    (found,) = findings.find(calls)
    assert words in found.text
    assert found.remedy
    assert f"100 % of 5,000 {cause} calls" in found.text
    # The program's own calls are not the allocator's.
    assert findings.find(profile([(CALL, cause, ("main", "own"), 5000.0)], {cause: 5000})) == []
    # Nor are a few worth a sentence.
    assert findings.find(profile([(CALL, cause, functions, 50.0)], {cause: 50}, module=module)) == []


@pytest.mark.parametrize(
    "cause", ["cow", "fork", "collapse", "numa", "ksm", "reclaim", "compaction", "migration"]
)
def test_each_of_the_kernels_doings_is_found(cause: str) -> None:
    (found,) = findings.find(profile([], causes=[Cause(cause, shootdowns=4000.0)]))
    assert "40 % of the program's 10,000 shootdowns come from" in found.text
    assert found.remedy
    assert found.share == pytest.approx(0.4)
    assert findings.find(profile([], causes=[Cause(cause, shootdowns=40.0, cpu_s=0.01)])) == []
    # A large part of little is little.
    assert findings.find(profile([], {"shootdowns": 99}, [Cause(cause, shootdowns=99.0)])) == []


def test_who_runs_under_calmalloc_is_not_sent_there() -> None:
    purge = [(CALL, "madvise", ("free", "purge"), 5000.0)]
    made = profile(purge, {"minor_faults": 1e6, "peak_rss_kib": 400_000}, module="libcalmalloc.so")
    found = findings.find(replace(made, allocator="calmalloc"))
    assert len(found) == 2
    assert all(
        "memory_per_cpu" in str(each.remedy) and "-a calmalloc" not in str(each.remedy) for each in found
    )


def test_refaults_are_found() -> None:
    (found,) = findings.find(profile([], {"minor_faults": 1e6, "peak_rss_kib": 400_000}))
    assert "10 times the largest footprint" in found.text
    assert findings.find(profile([], {"minor_faults": 1e6, "peak_rss_kib": 1_100_000})) == []
    # What is not known to have been spent is no nothing.
    assert found.share == 0
    blind = replace(profile([], {"minor_faults": 1e6, "peak_rss_kib": 400_000}), kernel_stacks=False)
    assert findings.find(blind)[0].share is None


def test_many_processes_take_memory_once_each() -> None:
    made = profile([], {"minor_faults": 1e6, "peak_rss_kib": 10_000})
    assert findings.find(made, 101) == []
    assert len(findings.find(made, 99)) == 1


def test_nothing_to_mend() -> None:
    calm = [(CPU, "other", ("main",), 3.99), (CPU, "fault", ("main",), 0.01)]
    (found,) = findings.find(profile(calm, {"shootdowns": 10}))
    assert "nothing to mend" in found.text
    # Fifty samples say so, fewer do not.
    few = [replace(stack, samples=24) for stack in profile(calm).stacks]
    assert findings.find(replace(profile(calm, {"shootdowns": 10}), stacks=few)) == []
    busy = [(CPU, "other", ("main",), 3.0), (CPU, "fault", ("main",), 1.0)]
    assert findings.find(profile(busy, {"shootdowns": 10})) == []
    # Shootdowns harm others than who is sampled.
    assert findings.find(profile(calm, {"shootdowns": 10_000})) == []


def test_what_matters_most_comes_first() -> None:
    grow = ("malloc", "sysmalloc", "grow_heap", "mprotect")
    found = findings.find(
        profile(
            [
                (CALL, "mprotect", grow, 1000.0),
                (SHOOTDOWN, "madvise", TRIM, 9000.0),
                (CALL, "madvise", TRIM, 100_000.0),
            ],
            {"madvise": 100_000, "mprotect": 1000},
            [Cause("madvise", 9000.0, calls=100_000), Cause("mprotect", calls=1000)],
        )
    )
    assert ["trimming" in f.text for f in found] == [True, False]
    shrink = ("main", "free", "systrim", "brk")
    found = findings.find(profile([(SHOOTDOWN, "madvise", TRIM, 2000.0), (SHOOTDOWN, "brk", shrink, 6000.0)]))
    assert ["trimming" in f.text for f in found] == [False, True]


def test_a_stack_is_told_once() -> None:
    ends = ("main", "pthread_join", "purge", "madvise")
    made = profile([(CALL, "madvise", ends, 5000.0)], {"madvise": 5000}, module="libjemalloc.so.2")
    (found,) = findings.find(made)
    assert "jemalloc's purging" in found.text


STACKS_COUNTED = {
    "\n\tffffffff81000001 native_flush_tlb_multi+1\n\tffffffff82000002 do_madvise.part.0+460\n": 40,
    # As 0.23 writes it.
    r"\n\tffffffff81000001 native_flush_tlb_multi+1\n\tffffffff83000003 __vm_munmap+2\n": 2,
    "\n\tffffffff82000002 madvise_walk_vmas+460\n": 3,
}


def test_counts_by_stack_are_added_up_by_cause() -> None:
    lines = ({"type": "attached_probes"}, {"type": "map", "data": {"@found": STACKS_COUNTED}})
    text = "\n\n".join(map(json.dumps, lines))
    assert counting.parse(text) == {"madvise": 43, "munmap": 2}
    assert counting.parse("") == counting.parse(text[: len(text) - 9]) == {}


def test_counted_causes_outweigh_samples() -> None:
    """One sample tells nothing of how 1,000 shootdowns divide; a cause without a sample has its count."""
    flush = tuple(Address("[kernel.kallsyms]", 0xFFFFFFFF00000000, name) for name in ("x", "do_madvise"))
    samples = [at(100.5, "tlb:tlb_flush", flush, period=997)]
    totals = {"shootdowns": Total(1000.0, ""), "madvise": Total(10, ""), "munmap": Total(10, "")}
    sampled = {c.key: c.shootdowns for c in build(samples, totals, 100.0, 1.0, 0.01).causes}
    assert sampled == {"madvise": 1000, "munmap": 0}
    parts = build(samples, totals, 100.0, 1.0, 0.01, counted={"madvise": 101, "munmap": 909})
    assert {c.key: c.shootdowns for c in parts.causes} == {"madvise": 100, "munmap": 900}
    assert sum(stack.weight for stack in parts.stacks) == pytest.approx(100)
    assert parts.sampled == {SHOOTDOWN: 1.0}


def test_a_sample_stands_for_the_time_since_the_one_before() -> None:
    """Not for its own hundredth of a second: that would be a peak of 99,700 events a second."""
    samples = [at(100.0 + second, "tlb:tlb_flush", period=997) for second in (0.25, 0.5, 1.0)]
    series = build(samples, {}, 100.0, 1.0, 0.01).timeline.series["shootdown:other"]
    assert sum(series) == pytest.approx(3 * 997)
    assert max(series) < 2.1 * 997 / 25
    assert series[75] == pytest.approx(997 / 50, rel=0.1)


def test_an_interval_needs_samples() -> None:
    made = profile([])
    assert made.interval(SHOOTDOWN, 0.5) is None
    few, many = (replace(made, sampled={SHOOTDOWN: n}) for n in (19.0, 400.0))
    assert few.interval(SHOOTDOWN, 0.5) is None
    low, high = many.interval(SHOOTDOWN, 0.5) or (0, 0)
    assert (low, high) == pytest.approx((0.419, 0.581), abs=0.001)
    low, high = many.interval(SHOOTDOWN, 0.0) or (1, 1)
    assert low == 0 < high < 0.03


def test_ways_in_memory_management_are_sure_by_their_own_samples() -> None:
    """Three of 9,903 samples say little of how those three divide."""
    made = replace(
        profile(
            [
                (CPU, "fault", ("main", "f"), 0.02),
                (CPU, "madvise", ("main", "g"), 0.01),
                (CPU, "other", (), 99),
            ]
        ),
        sampled={CPU: 9903.0},
    )
    text = io.StringIO()
    show(Console(file=text, width=200), made)
    assert "page fault (60 samples, too few)" in text.getvalue()


def test_a_few_samples_of_shootdowns_make_no_finding() -> None:
    stacks = [(SHOOTDOWN, "madvise", TRIM, 9300.0)]
    assert findings.find(profile(stacks))
    assert not findings.find(replace(profile(stacks), sampled={SHOOTDOWN: 9.0}))
    assert findings.find(replace(profile(stacks), sampled={SHOOTDOWN: 9.0}, causes_counted=True))


def test_perf_ends_before_the_counts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take half a second to end, and what a watched process does then is no part of the profile."""
    ended: list[str] = []
    made = Recorder(99)
    perf = SimpleNamespace(cpu_s=0.0, ask_to_end=lambda: ended.append("perf"), end=lambda: None)
    monkeypatch.setattr(made, "_perfs", [perf])
    monkeypatch.setattr(made.counts, "stop", lambda: ended.append("counts") or {"madvise": 1})
    made.stop()
    assert ended[:2] == ["perf", "counts"]
    assert made.shootdowns == {"madvise": 1}


@pytest.mark.parametrize(
    ("counted", "total", "fits"),
    [
        ({"madvise": 1000}, 1000, True),
        ({"madvise": 1000}, 950, True),
        ({"madvise": 30, "munmap": 1}, 12, True),
        ({"madvise": 1000}, 500, False),
        ({}, 5, False),
        ({"madvise": 3}, 0, False),
        ({"madvise": 3}, None, False),
    ],
)
def test_counts_of_other_processes_are_not_believed(
    counted: dict[str, int], total: float | None, fits: bool
) -> None:
    found = watch._fitting(counted, {"shootdowns": Total(total, "")})
    assert found == (counted if fits else None)


def test_ways_leave_lines_out() -> None:
    made = profile(
        [(CPU, "fault", ("main", "f"), 1.0), (CPU, "fault", ("main", "f"), 2.0), (CPU, "other", (), 9.0)]
    )
    (way,) = ways(made, CPU)
    assert way.weight == pytest.approx(3.0)


def test_calls_that_nobody_made_need_no_row() -> None:
    text = io.StringIO()
    show(Console(file=text, width=200), profile([], {"munmap": 0, "brk": 3, "threads_started": 0}))
    assert [name in text.getvalue() for name in ("munmap", "brk calls", "threads started")] == [
        *(False, True, True)
    ]


def test_a_call_is_told_by_its_own_name() -> None:
    text = io.StringIO()
    show(Console(file=text, width=200), profile([(CALL, "brk", ("main", "sysmalloc", "brk"), 2000.0)]))
    assert "about 2,000, brk (60 samples, 84.7 to 100.0 %)\n" in text.getvalue()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([0, 0], ""),
        ([1, 0, 8], "▂ █"),
        ([5.0] * 200, "█" * 60),
        ([0.0] * 119 + [1.0], " " * 59 + "█"),
    ],
)
def test_sparklines(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_counts_of_perf_stat() -> None:
    text = (
        "# started on Sat\n\n123,,tlb:tlb_flush,5,100.00,,\n"
        "<not counted>,,syscalls:sys_enter_brk,0,100.00,,\n"
        "<not supported>,,task:task_newtask,0,100.00,,\n7,,unknown:event,1,100.00,,\n"
    )
    assert parse_counts(text) == {"shootdowns": 123, "brk": 0}


@pytest.mark.parametrize(("cpu_s", "at_least", "at_most"), [(0.0, 60, 100), (0.01, 1, 1)])
def test_samples_of_memory_are_paid_in_cpu_time(
    monkeypatch: pytest.MonkeyPatch, cpu_s: float, at_least: int, at_most: int
) -> None:
    """Waiting for a CPU that others have costs nobody anything, and is no reason to look more seldom."""
    now_s = spent_s = 0.0

    def look(_: Sampler) -> int:
        nonlocal now_s, spent_s
        now_s += 0.01
        spent_s += cpu_s
        return 100

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s > 1.5:
            sampler._stop.set()

    clock = SimpleNamespace(monotonic=lambda: now_s, thread_time=lambda: spent_s)
    monkeypatch.setattr(memory, "time", clock)
    monkeypatch.setattr(Sampler, "_rss_kib", look)
    sampler = Sampler(os.getpid())
    monkeypatch.setattr(sampler._stop, "wait", wait)
    sampler._run()
    assert at_least <= sampler.samples <= at_most


def test_a_curve_that_grows_long_keeps_every_second_point() -> None:
    points = _Points()
    for n in range(4001):
        points.add(n / 100, n)
    curve = points.curve()
    assert (len(curve.at_s), curve.at_s[:2], curve.kib[-1]) == (2001, [0.0, 0.02], 4000)
    assert points.min_s == pytest.approx(0.02, rel=0.01)


def test_values_at_even_steps_are_the_latest_known() -> None:
    values = _by_time([0.0, 3.0, 6.0], [1.0, 2.0, 3.0])
    assert values == [1.0] * 29 + [2.0] * 30 + [3.0]


def test_places_in_a_file_become_its_addresses(tmp_path: Path) -> None:
    program = shutil.which("true") or ""
    found = elf.segments(program)[1]
    first, last = found.offset, found.offset + found.size - 1
    assert symbols.file_address(program, first) == found.address
    assert symbols.file_address(program, last) == found.address + found.size - 1
    assert symbols.file_address(program, 1 << 40) is None
    (tmp_path / "cut").write_bytes(Path(program).read_bytes()[:100])
    assert symbols.file_address(str(tmp_path / "cut"), first) is None


def test_what_addr2line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "0x10\ninner\n/src/a.c:5 (discriminator 3)\nouter\n/src/b.c:?\n0x20\n??\n??:0\n"
    monkeypatch.setattr(symbols, "_run", lambda *_: said)
    assert symbols._read(["addr2line"], "prog", [0x10, 0x20]) == {
        0x10: [("inner", "a.c:5"), ("outer", None)],
        0x20: [("??", None)],
    }


@pytest.mark.skipif(not shutil.which("c++filt"), reason="there is no c++filt")
@pytest.mark.parametrize(
    ("mangled", "plain"),
    [
        ("_ZN4shop4backEPi", "shop::back(int*)"),
        ("_ZN4shop4back17h0123456789abcdefE", "shop::back"),
        ("_RNvCs1234_4shop4back", "shop::back"),
        (
            "_ZN51_$LT$inl..shop..Till$u20$as$u20$inl..shop..Give$GT$4give17he26efb96b6742393E",
            "<inl::shop::Till as inl::shop::Give>::give",
        ),
        ("do_it", "do_it"),
        ("_Zebra", "_Zebra"),
    ],
)
def test_names_are_demangled(mangled: str, plain: str) -> None:
    address = Address("/no/such/file", 1, mangled)
    (frame,) = symbols.resolve([address])[address]
    assert frame == Frame(plain, "file")
