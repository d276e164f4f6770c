"""System calls that fail, and limits: malloc returns NULL, and nothing else breaks."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from api_helpers import (
    GIB,
    GLIBC,
    KIB,
    MIB,
    OFFLOAD,
    OURS,
    PRELOAD,
    STATIC,
    Programs,
    limit,
    run_command,
    tool,
)

# Each with the errors that a kernel, or a container's filter, gives.
CALLS = {
    "mmap": ["ENOMEM"],
    "mprotect": ["ENOMEM"],
    "munmap": ["ENOMEM"],
    "mremap": ["ENOMEM"],
    "madvise": ["ENOMEM", "EINVAL"],
    "process_madvise": ["EPERM", "ENOSYS", "EINVAL"],
    "pidfd_open": ["EPERM", "ENOSYS"],
    "membarrier": ["ENOSYS"],
    "rseq": ["ENOSYS"],
    "clone": ["EAGAIN"],
    "clone3": ["EAGAIN", "ENOSYS"],
    "openat": ["EMFILE", "ENOENT", "EACCES"],
    "read": ["EIO"],
    "sched_getaffinity": ["EPERM"],
    "prctl": ["EINVAL"],
}
# Which make the program itself start: they may fail only once it is in main.
FROM_MAIN = {"mmap", "mprotect", "munmap", "openat", "read", "clone", "clone3", "prctl"}
POINTS = [1, 2, 5, 20]


class Traced:
    """`faults survive` and its system calls."""

    def __init__(self, programs: Programs, way: str, options: str, folder: Path) -> None:
        self.command: list[str | Path] = [programs.path("faults", way), "survive"]
        self.env = programs.environment(way)
        self.strace: list[str | Path] = [tool("strace", "strace"), "-f", "--seccomp-bpf", "-qq"]
        self.log = folder / "trace"
        variables = [f"CALM_OPTIONS={options}"] if options else []
        if way == PRELOAD:
            # For the program only, not for strace.
            variables.append(f"LD_PRELOAD={self.env.pop('LD_PRELOAD')}")
        self.strace += [word for variable in variables for word in ("-E", variable)]

    def count(self, call: str) -> tuple[int, int]:
        """The number of calls before main's mark, and after it by the main thread."""
        command = [*self.strace, "-o", self.log, "-e", f"trace={call},getppid", *self.command]
        run_command(command, self.env)
        lines = self.log.read_text().splitlines()
        first = lines[0].split()[0] if lines else ""
        names = [
            found[1]
            for line in lines
            if line.startswith(first) and (found := re.match(r"\d+ +(\w+)\(", line))
        ]
        assert "getppid" in names, f"strace cannot follow the program here: {lines[:5]}"
        mark = names.index("getppid")
        return names[:mark].count(call), names[mark:].count(call)

    def inject(self, call: str, error: str, when: str) -> None:
        command = [*self.strace, "-o", self.log, "-e", f"trace={call}"]
        command += ["-e", f"inject={call}:error={error}:when={when}", *self.command]
        ran = run_command(command, self.env, status=None)
        assert ran.status == 0, (
            f"{call} fails with {error}, when={when}: status {ran.status}\n"
            f"{ran.command}\n{ran.stderr[-3000:]}"
        )
        assert ran["granted"] + ran["refused"] >= (1 if when.endswith("+") else 1000)


def points(total: int) -> list[int]:
    return [point for point in POINTS if point <= total] + ([total] if total > POINTS[-1] else [])


@pytest.mark.parametrize("options", ["", "background=off,vectored_purge=off"], ids=["default", "plain"])
@pytest.mark.parametrize("call", CALLS)
def test_call_fails(programs: Programs, tmp_path: Path, call: str, options: str) -> None:
    """Once, at some point, and always from some point on, in a program that handles NULL."""
    traced = Traced(programs, PRELOAD, options, tmp_path)
    before, after = traced.count(call)
    base = before if call in FROM_MAIN else 0
    total = after if call in FROM_MAIN else before + after
    for error in CALLS[call]:
        for point in points(max(total, 1)):
            traced.inject(call, error, f"{base + point}")
            traced.inject(call, error, f"{base + point}+")


@pytest.mark.parametrize("call", ["mmap", "mprotect", "madvise", "clone", "sched_getaffinity", "prctl"])
def test_call_fails_around_a_server(programs: Programs, tmp_path: Path, call: str) -> None:
    """Including the calls that start the server, and those that it makes."""
    traced = Traced(programs, PRELOAD, OFFLOAD, tmp_path)
    before, _ = traced.count(call)
    for when in ("1+", "2", f"{before + 1}", f"{before + 2}+", f"{before + 5}"):
        if call not in FROM_MAIN or int(when.rstrip("+")) > before:
            traced.inject(call, CALLS[call][0], when)


@pytest.mark.parametrize(
    "call", ["mmap", "madvise", "process_madvise", "membarrier", "rseq", "sched_getaffinity"]
)
def test_call_fails_from_the_very_first(programs: Programs, tmp_path: Path, call: str) -> None:
    """In a static program, the library makes the first mapping."""
    traced = Traced(programs, STATIC, "", tmp_path)
    before, after = traced.count(call)
    for error in CALLS[call]:
        for point in points(max(before + after, 1)):
            traced.inject(call, error, f"{point}")
            # Without any memory the C library itself does not get as far as main.
            if call != "mmap" or point > before:
                traced.inject(call, error, f"{point}+")


def test_faults_are_noticed(programs: Programs, tmp_path: Path) -> None:
    """Otherwise the tests above might inject nothing."""
    traced = Traced(programs, PRELOAD, "", tmp_path)
    refused = 0
    for call in ("mmap", "mprotect"):
        before, after = traced.count(call)
        assert before > 3
        assert after > 0
        command = [*traced.strace, "-o", "/dev/null", "-e", f"trace={call}"]
        command += ["-e", f"inject={call}:error=ENOMEM:when={before + 1}+", *traced.command]
        refused += run_command(command, traced.env)["refused"]
    assert refused > 0


LIMITS = [(64 * MIB, block) for block in (100, 3000, 100 * KIB, 7 * MIB)]
LIMITS += [(256 * MIB, 3000), (256 * MIB, 100 * KIB), (GIB, 100 * KIB)]


@pytest.mark.parametrize(("space", "block"), LIMITS)
@pytest.mark.parametrize("way", [PRELOAD, STATIC])
def test_address_space_is_limited(programs: Programs, way: str, space: int, block: int) -> None:
    """Most of it can be allocated, then NULL; after a free all of it again, also in other sizes."""
    ran = programs.run(way, "faults", "limit", str(block), prepare=limit(resource.RLIMIT_AS, space))
    room = space - 16 * MIB
    # A block of 100 bytes takes 112, and a large one may leave a hole of its size.
    assert ran["first"] >= room * 0.6 - block, ran.stdout
    assert ran["second"] >= ran["first"] * 0.95 - block
    assert ran["other"] >= ran["first"] * 0.7 - block
    assert ran["again"] >= ran["first"] * 0.9 - block


def test_address_space_is_limited_for_glibc(programs: Programs) -> None:
    ran = programs.run(GLIBC, "faults", "limit", "3000", prepare=limit(resource.RLIMIT_AS, 256 * MIB))
    assert ran["first"] > 200 * MIB


@pytest.mark.parametrize("block", [3000, 100 * KIB])
def test_address_space_is_limited_with_a_server(programs: Programs, block: int) -> None:
    space = limit(resource.RLIMIT_AS, 256 * MIB)
    ran = programs.run(PRELOAD, "faults", "limit", str(block), options=OFFLOAD, prepare=space)
    assert min(ran["first"], ran["second"], ran["other"], ran["again"]) >= 32 * MIB, ran.stdout


@pytest.mark.parametrize("options", ["", "test_cache=locked", "test_cache=off"])
def test_address_space_is_limited_with_threads(programs: Programs, options: str) -> None:
    for block in (200, 50 * KIB):
        ran = programs.run(
            PRELOAD,
            "faults",
            "limit-threads",
            str(block),
            options=options,
            prepare=limit(resource.RLIMIT_AS, 256 * MIB),
        )
        assert ran["threads"] >= 300 * MIB
        assert ran["again"] >= 120 * MIB


@pytest.mark.parametrize("way", OURS)
def test_tiny_address_space(programs: Programs, way: str) -> None:
    """Too little for the allocator's usual reservations, but enough for the program."""
    ran = programs.run(way, "faults", "limit", "3000", prepare=limit(resource.RLIMIT_AS, 24 * MIB))
    assert ran["first"] >= 2 * MIB


# From 64 MiB on at least this part of what the C library's own malloc gets, and the other below.
SHARE, SMALL_SHARE = 0.85, 0.75


@pytest.mark.parametrize("space", [24, 48, 64, 128, 512])
def test_share_of_address_space(programs: Programs, space: int) -> None:
    for block in (64, 1000, 64 * KIB, MIB):
        prepare = limit(resource.RLIMIT_AS, space * MIB)
        ours = programs.run(PRELOAD, "faults", "limit", str(block), prepare=prepare)
        glibc = programs.run(GLIBC, "faults", "limit", str(block), prepare=prepare)
        share = SHARE if space >= 64 else SMALL_SHARE
        assert ours["first"] >= share * glibc["first"], block


def make_room(programs: Programs, way: str, how: str, block: int, kept: int, space: int, early: bool) -> bool:
    """Whether something else succeeds, once as many blocks as there is room for were freed but for a few."""
    argument = f"{how} {block} {kept} {0 if early else space}"
    prepare = limit(resource.RLIMIT_AS, space * MIB) if early else None
    return programs.run(way, "faults", "make-room", argument, prepare=prepare)["succeeds"] == 1


# The limits' number is what matters: at some the last segment is small, or what is kept is in a large one.
ROOM = [round(24 * 1.2**i) for i in range(18)]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("how", ["thread", "map", "library", "trim", "idle"])
def test_freed_address_space_serves_others(programs: Programs, how: str, early: bool) -> None:
    limits = ROOM if how == "thread" else ROOM[::5]
    for i, space in enumerate(space for space in limits if early or space >= 32):
        block = (64, 1000, 64 * KIB, MIB)[i % 4]
        for kept in (0, 1):
            assert make_room(programs, PRELOAD, how, block, kept, space, early), (space, block, kept)


def test_freed_address_space_serves_others_beside_old_blocks(programs: Programs) -> None:
    """Each thousandth block stays, so that no part of the heap is free as a whole."""
    for space in ROOM[::6]:
        assert make_room(programs, PRELOAD, "thread", 2000, 2, space, True), space


def test_freed_address_space_serves_others_with_a_server(programs: Programs) -> None:
    for space in (128, 512):
        argument = "thread 1000 1 0"
        ran = programs.run(
            PRELOAD,
            "faults",
            "make-room",
            argument,
            options=OFFLOAD,
            prepare=limit(resource.RLIMIT_AS, space * MIB),
        )
        assert ran["succeeds"] == 1, space


def test_limit_that_is_not_announced(programs: Programs) -> None:
    programs.run(PRELOAD, "faults", "unseen-limit")


@pytest.mark.parametrize("background", ["on", "off"])
def test_python_needs_little_address_space(programs: Programs, background: str) -> None:
    """At most 4 MiB more than under the C library's own malloc."""

    def runs(way: str, kibibytes: int) -> bool:
        env = programs.environment(way, f"background={background}")
        bytes_ = kibibytes * KIB
        command = [sys.executable, "-I", "-c", "print(1)"]
        done = subprocess.run(
            command, env=env, preexec_fn=limit(resource.RLIMIT_AS, bytes_), capture_output=True
        )
        return done.returncode == 0

    few, enough = 4 * KIB, 256 * KIB
    while enough - few > 256:
        middle = (few + enough) // 2
        few, enough = (few, middle) if runs(GLIBC, middle) else (middle, enough)
    assert runs(PRELOAD, enough + 4 * KIB)


@pytest.mark.parametrize("before", ["freed", "trimmed", "little"])
@pytest.mark.parametrize("way", OURS)
def test_as_many_mappings_as_there_may_be(programs: Programs, way: str, before: str) -> None:
    """The heap grows on, as it needs none for that."""
    assert programs.run(way, "faults", "many-mappings", before)["small"] >= 200 * MIB


@pytest.mark.parametrize("way", OURS)
def test_data_is_limited(programs: Programs, way: str) -> None:
    ran = programs.run(way, "faults", "limit", "3000", prepare=limit(resource.RLIMIT_DATA, 128 * MIB))
    assert ran["first"] >= 64 * MIB
    assert ran["again"] >= ran["first"] * 0.9


@pytest.mark.parametrize("background", ["on", "off"])
@pytest.mark.parametrize("way", OURS)
def test_locked_memory(programs: Programs, way: str, background: str) -> None:
    """Reserved memory is not populated, and few purges are tried that the kernel refuses."""
    ran = programs.run(way, "faults", "lock", options=f"background={background}")
    # Four threads at 30 MiB each: what they hold at once, and what caches and spans round it up to.
    assert ran["grown_by_first"] < 16 * MIB
    assert ran["grown_by_one"] < 60 * MIB
    assert ran["grown_by_all"] < 200 * MIB
    assert ran["purge_failures"] <= ran["frees"] // 20
    assert ran["purged"] == 0


def test_nobody_may_have_threads(programs: Programs) -> None:
    """The helper cannot start, and other threads do its work."""
    env = programs.environment(PRELOAD)
    strace: list[str | Path] = [
        tool("strace", "strace"),
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=clone,clone3",
    ]
    strace += ["-E", f"LD_PRELOAD={env.pop('LD_PRELOAD')}"]
    # The first two threads are the program's and, perhaps, the helper.
    for when in ("1", "2", "2+"):
        command = [*strace, "-e", f"inject=clone3:error=EAGAIN:when={when}", programs.path("faults", PRELOAD)]
        assert run_command([*command, "survive"], env)["granted"] > 10000


@pytest.mark.parametrize("since", ["now", "exec"])
@pytest.mark.parametrize("way", [GLIBC, *OURS])
def test_purges_without_effect_are_not_believed(programs: Programs, way: str, since: str) -> None:
    """calloc's blocks are zero nevertheless."""
    assert programs.run(way, "faults", "purged-in-vain", since)["zero"] == 1
