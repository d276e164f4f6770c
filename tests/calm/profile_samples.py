"""Profiles made up to look as real ones do, to test what reads profiles."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from calm.core.profile_model import (
    CALL,
    CPU,
    FAULT,
    SHOOTDOWN,
    Cause,
    Curve,
    Finding,
    Frame,
    Profile,
    Stack,
    Timeline,
    Total,
)

HOSTILE = "</script><script>alert(1)</script>"

_KERNEL = ("entry_SYSCALL_64_after_hwframe", "do_syscall_64")
_LISTING1 = {
    "trim": [
        ("start_thread", "libc.so.6", None),
        ("worker", "listing1", "listing1.c:41"),
        ("free", "libc.so.6", "malloc.c:3391"),
        ("_int_free", "libc.so.6", "malloc.c:4676"),
        ("heap_trim", "libc.so.6", "arena.c:649"),
        ("shrink_heap", "libc.so.6", "arena.c:542"),
        ("madvise", "libc.so.6", None),
    ],
    "stack": [
        ("start_thread", "libc.so.6", None),
        ("advise_stack_range", "libc.so.6", "allocatestack.c:190"),
        ("madvise", "libc.so.6", None),
    ],
    "touch": [
        ("start_thread", "libc.so.6", None),
        ("worker", "listing1", "listing1.c:36"),
        ("malloc", "libc.so.6", "malloc.c:3320"),
        ("_int_malloc", "libc.so.6", "malloc.c:4210"),
        ("sysmalloc", "libc.so.6", "malloc.c:2600"),
        ("grow_heap", "libc.so.6", "arena.c:505"),
    ],
    "create": [
        ("_start", "listing1", None),
        ("__libc_start_main", "libc.so.6", None),
        ("main", "listing1", "listing1.c:70"),
        ("pthread_create@@GLIBC_2.34", "libc.so.6", None),
        ("__mmap", "libc.so.6", None),
    ],
}
_INLINED = {"heap_trim", "shrink_heap", "advise_stack_range", "grow_heap"}


class Builder:
    """Collects stacks, each function once."""

    def __init__(self) -> None:
        self.frames: dict[Frame, int] = {}
        self.stacks: list[Stack] = []

    def frame(self, frame: Frame) -> int:
        return self.frames.setdefault(frame, len(self.frames))

    def user(self, function: str, module: str, source: str | None = None) -> int:
        return self.frame(Frame(function, module, inlined=function in _INLINED, source=source))

    def kernel(self, *functions: str) -> list[int]:
        return [self.frame(Frame(function, "kernel", kernel=True)) for function in functions]

    def add(self, kind: str, cause: str, frames: Sequence[int], weight: float, samples: int) -> None:
        self.stacks.append(Stack(kind, cause, tuple(frames), weight, samples))


def listing1() -> Profile:
    """Listing 1 under glibc, 16 threads, as root: shootdowns from trimming arenas, and from thread stacks."""
    make = Builder()
    paths = {name: [make.user(*step) for step in steps] for name, steps in _LISTING1.items()}
    call = make.kernel(*_KERNEL, "__x64_sys_madvise", "do_madvise", "madvise_vma_behavior")
    zap = make.kernel("zap_page_range_single", "tlb_finish_mmu", "tlb_flush_mmu", "flush_tlb_mm_range")
    fault = make.kernel("asm_exc_page_fault", "exc_page_fault", "handle_mm_fault", "do_anonymous_page")
    unmap = make.kernel(*_KERNEL, "__x64_sys_munmap", "__vm_munmap", "unmap_region", "flush_tlb_mm_range")
    make.add(SHOOTDOWN, "madvise", paths["trim"] + call + zap, 158_211.4, 1588)
    make.add(SHOOTDOWN, "madvise", paths["stack"] + call + zap, 640.2, 7)
    make.add(SHOOTDOWN, "munmap", paths["create"][:4] + unmap, 92.6, 1)
    make.add(FAULT, "fault", paths["touch"] + fault, 141_002.0, 1410)
    make.add(FAULT, "fault", [*paths["trim"][:2], *fault], 18_800.0, 188)
    make.add(CALL, "madvise", paths["trim"], 158_944.0, 1589)
    make.add(CALL, "mmap", paths["create"], 33.0, 3)
    make.add(CPU, "madvise", paths["trim"] + call + zap, 1.91, 1908)
    interrupt = make.kernel("asm_sysvec_call_function", "flush_tlb_func")
    make.add(CPU, "interrupt", paths["trim"][:2] + interrupt, 0.22, 220)
    make.add(CPU, "fault", paths["touch"] + fault, 0.41, 410)
    make.add(CPU, "other", paths["trim"][:4], 0.08, 80)
    bins = 140
    wave = [0.5 + 0.5 * math.sin(i / 9) ** 2 for i in range(bins)]
    series = {
        "shootdown:madvise": [1400 * w for w in wave],
        "shootdown:munmap": [0.0 if i % 20 else 13.0 for i in range(bins)],
        "fault": [1500 * w for w in reversed(wave)],
        "call:madvise": [1420 * w for w in wave],
        "call:mmap": [33.0 if i < 1 else 0.0 for i in range(bins)],
        "cpu:user": [0.003 + 0.001 * w for w in wave],
        "cpu:system": [0.012 + 0.004 * w for w in wave],
    }
    at = [i * 0.02 for i in range(70)]
    counted = "tracepoint tlb:tlb_flush, reason 4: one each, even if every other CPU is found idle"
    return Profile(
        command=["build/release/listing1", "16", "1000"],
        pid=None,
        began="2026-11-21T20:31:02+00:00",
        wall_s=1.4021,
        exit_code=0,
        allocator="glibc",
        privileged=True,
        machine={
            "cpu": "AMD EPYC",
            "architecture": "x86_64",
            "cpus": 2,
            "memory_kib": 24683520,
            "kernel": "6.18.44",
            "distribution": "Debian GNU/Linux 12 (bookworm)",
            "glibc": "2.36",
            "transparent_huge_pages": "madvise",
        },
        totals={
            "shootdowns": Total(158_944, counted),
            "interrupts": Total(151_020, "tracepoint csd:csd_queue_cpu to flush_tlb_func"),
            "minor_faults": Total(159_802, "rusage, all waited-for processes"),
            "major_faults": Total(0, "rusage, all waited-for processes"),
            "user_s": Total(0.41, "rusage, all waited-for processes", "s"),
            "system_s": Total(2.21, "rusage, all waited-for processes", "s"),
            "peak_rss_kib": Total(42_188, "140 samples of the process tree", "KiB"),
            "average_rss_kib": Total(20_480, "140 samples of the process tree", "KiB"),
            "threads_started": Total(16, "tracepoint task:task_newtask with CLONE_THREAD"),
            "madvise": Total(158_960, "tracepoint syscalls:sys_enter_madvise"),
            "munmap": Total(41, "tracepoint syscalls:sys_enter_munmap"),
            "mmap": Total(None, "not counted: no tracepoint of that name"),
        },
        causes=[
            Cause("madvise", 158_851, None, 158_960, 1.91),
            Cause("munmap", 93, 0, 41, 0.001),
            Cause("fault", None, 159_802, None, 0.41),
            Cause("interrupt", None, None, None, 0.22),
        ],
        frames=list(make.frames),
        stacks=make.stacks,
        timeline=Timeline(0.01, series),
        curves={
            "rss": Curve(at, [8000 + 34_000 * abs(math.sin(i / 7)) for i in range(70)]),
            "dirty": Curve(at, [6000 + 30_000 * abs(math.sin(i / 7)) for i in range(70)]),
            "huge": Curve(at, [0.0 for _ in range(70)]),
        },
        findings=[
            Finding(
                "Page faults on memory that was given back just before take 16 % of the CPU time.",
                "141,002 of 159,802 faults come from grow_heap, on the same addresses.",
                None,
                0.16,
            ),
            Finding(
                "glibc gives each arena's free end back again and again: 99.5 % of all shootdowns come from "
                "heap_trim below free.",
                "158,211 of 158,944 have shrink_heap <- heap_trim <- _int_free <- free on their stack.",
                "Run it under calmalloc (`calm run -a calmalloc -- CMD`), or raise the threshold: "
                "MALLOC_TOP_PAD_=67108864.",
                0.995,
            ),
            Finding("All 16 threads share 2 CPUs.", "16 threads started; 2 CPUs in the affinity mask."),
        ],
        own_cost=["Sampling stacks took 0.09 s of CPU time, by the clock of perf's own process."],
        own_share=0.034,
        notes=["Stacks were sampled: one in 100 shootdowns.", "12 samples were lost."],
    )


def large(stacks: int = 5000, seed: int = 1) -> Profile:
    """Many deep stacks with long C++ names."""
    dice = random.Random(seed)
    make = Builder()
    names = [
        f"std::_Hashtable<std::basic_string<char, std::char_traits<char>, std::allocator<char>>, Row{i}, "
        f"std::__detail::_Select1st>::_M_rehash_aux(unsigned long, std::integral_constant<bool, {i % 2 > 0}>)"
        if i % 3
        else f"storage::(anonymous namespace)::Tablet<{i}>::operator()(storage::Key const&) const"
        for i in range(400)
    ]
    start = [make.user("_start", "server"), make.user("main", "server", "main.cc:12")]
    end = {
        SHOOTDOWN: make.kernel(*_KERNEL, "zap_page_range_single", "flush_tlb_mm_range"),
        FAULT: make.kernel("asm_exc_page_fault", "handle_mm_fault"),
        CALL: [],
        CPU: [],
    }
    causes = ("madvise", "munmap", "mprotect", "mremap", "cow", "brk", "reclaim", "collapse", "numa")
    for index in range(stacks):
        kind = (SHOOTDOWN, FAULT, CALL, CPU)[index % 4]
        # A few callers lead to most of it, as in real programs.
        depths = range(dice.randint(4, 38))
        path = [min(int(dice.expovariate(0.05 / (1 + depth / 8))), 399) for depth in depths]
        frames = start + [
            make.frame(
                Frame(names[i], "libserver-storage.so.3", inlined=i % 5 == 0, source=f"tablet_{i % 7}.cc:{i}")
            )
            for i in path
        ]
        weight = dice.paretovariate(0.9) * (1e-3 if kind == CPU else 10)
        cause = "fault" if kind == FAULT else causes[min(int(dice.expovariate(0.8)), len(causes) - 1)]
        make.add(kind, cause, frames + end[kind], weight, 1 + int(weight))
    series = {
        f"{kind}:{cause}": [dice.random() * 60 / (1 + place) for _ in range(300)]
        for kind in (SHOOTDOWN, CALL)
        for place, cause in enumerate(causes)
    }
    return replace(
        listing1(),
        command=["/opt/server/bin/server", "--config", "/etc/a long path/" + "x" * 90, "--threads=64"],
        wall_s=30.0,
        frames=list(make.frames),
        stacks=make.stacks,
        causes=[
            Cause(cause, 1e5 / place**2, None, 2e5 / place, 2.0 / (place + 1))
            for place, cause in enumerate(causes, 1)
        ],
        timeline=Timeline(0.1, series),
        curves={},
    )


def unprivileged() -> Profile:
    """As anybody may have it: no tracepoints, so no shootdowns."""
    whole = listing1()
    why = "not counted: /sys/kernel/tracing needs root or CAP_PERFMON (perf_event_paranoid is 2)"
    unknown = ("shootdowns", "interrupts", "threads_started", "madvise", "munmap")
    kept = [stack for stack in whole.stacks if stack.kind in (FAULT, CPU)]
    return replace(
        whole,
        privileged=False,
        totals={
            name: Total(None, why, total.unit) if name in unknown else total
            for name, total in whole.totals.items()
        },
        causes=[replace(cause, shootdowns=None, calls=None) for cause in whole.causes],
        stacks=kept,
        timeline=Timeline(
            0.01,
            {
                name: rates
                for name, rates in whole.timeline.series.items()
                if name.startswith(("fault", "cpu"))
            },
        ),
        findings=[],
        own_share=None,
    )


def empty() -> Profile:
    """Of a program that ended at once, or was stopped."""
    return Profile(
        command=["true"],
        pid=None,
        began="2026-11-21T20:31:02+00:00",
        wall_s=0.0,
        exit_code=None,
        allocator="glibc",
        privileged=True,
        machine={},
        totals={},
        causes=[],
        frames=[],
        stacks=[],
        timeline=Timeline(0.0),
        curves={},
        findings=[],
        own_cost=[],
        own_share=None,
        interrupted_by=2,
    )


def hostile() -> Profile:
    """Every text tries to be markup."""
    whole = listing1()
    changes: dict[str, Any] = {
        "command": ["sh", "-c", HOSTILE],
        "allocator": HOSTILE,
        "began": HOSTILE,
        "machine": {HOSTILE: HOSTILE, "cpus": HOSTILE, "kernel": HOSTILE},
        "totals": {**whole.totals, HOSTILE: Total(1, HOSTILE), "shootdowns": Total(None, HOSTILE)},
        "causes": [*whole.causes, Cause(HOSTILE, 1.0)],
        "frames": [
            replace(frame, function=frame.function + HOSTILE, module=HOSTILE, source=HOSTILE)
            for frame in whole.frames
        ],
        "stacks": [replace(stack, cause=HOSTILE) for stack in whole.stacks],
        "timeline": Timeline(0.01, {**whole.timeline.series, f"shootdown:{HOSTILE}": [9e5] * 140}),
        "findings": [Finding(HOSTILE, HOSTILE, HOSTILE, 0.5)],
        "own_cost": [HOSTILE],
        "notes": [HOSTILE],
        "privileged": False,
    }
    return replace(whole, **changes)
