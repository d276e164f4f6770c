"""The static probes: their notes in every form of the libraries, and what a tracer sees through bpftrace."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api_helpers import BUILD, BUILD_AARCH64, INCLUDE, REPOSITORY, archive, built, compile_program, tool
from commanded import Commanded, commanded
from elftools.elf.elffile import ELFFile
from features import lacks
from namespaces import needs_first_pid_namespace
from waiting import wait_until

from calm.core import control, counters

MIB = 1 << 20
MEAN = 512 << 10
HEAP_PROFILE = {"otel_memory:alloc": 3, "otel_memory:free": 1}
OURS = {
    **({} if lacks("profile") else HEAP_PROFILE),
    "calmalloc:purge__begin": 2,
    "calmalloc:purge__end": 4,
    "calmalloc:limit": 1,
    "calmalloc:helper__wakeup": 0,
}
PTLBMALLOC2 = {"ptlbmalloc2:trim__begin": 1, "ptlbmalloc2:trim__end": 2}
REGISTERS = {
    "EM_X86_64": ["%rdi", "%rsi", "%rdx", "%rcx"],
    "EM_AARCH64": ["x0", "x1", "x2", "x3"],
}


def descriptions(section: bytes) -> Iterator[bytes]:
    """The contents of the notes in a section. pyelftools takes their type for another one."""
    at = 0
    while at < len(section):
        name_bytes, data_bytes, kind = struct.unpack_from("<III", section, at)
        data = at + 12 + (name_bytes + 3) // 4 * 4
        assert (section[at + 12 : at + 12 + name_bytes], kind) == (b"stapsdt\0", 3)
        yield section[data : data + data_bytes]
        at = data + (data_bytes + 3) // 4 * 4


def notes(path: Path) -> dict[str, tuple[int, int, list[str]]]:
    """By provider:name: address, address of the semaphore, and arguments. Checks what tracers rely on."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        section = elf.get_section_by_name(".note.stapsdt")
        assert section is not None, f"{path} has no probes"
        base = elf.get_section_by_name(".stapsdt.base")
        probes = elf.get_section_by_name(".probes")
        loads = [each for each in elf.iter_segments() if each["p_type"] == "PT_LOAD"]
        found = {}
        for data in descriptions(section.data()):
            at, noted_base, semaphore = struct.unpack_from("<QQQ", data)
            provider, name, arguments = data[24:].split(b"\0")[:3]
            assert noted_base == base["sh_addr"]
            # The kernel writes to the semaphore through the file's mapping: it has an image there.
            assert probes["sh_type"] == "SHT_PROGBITS"
            assert probes["sh_addr"] <= semaphore < probes["sh_addr"] + probes["sh_size"]
            assert any(
                load["p_flags"] & 2 and 0 <= semaphore - load["p_vaddr"] < load["p_filesz"] for load in loads
            )
            code = next(load for load in loads if 0 <= at - load["p_vaddr"] < load["p_filesz"])
            assert code["p_flags"] & 1
            file.seek(code["p_offset"] + at - code["p_vaddr"])
            nop = {"EM_X86_64": b"\x90", "EM_AARCH64": b"\x1f\x20\x03\xd5"}[elf["e_machine"]]
            assert file.read(len(nop)) == nop
            words = arguments.decode().split()
            # Some tracers read the registers of a function's first arguments without looking at the note.
            registers = REGISTERS[elf["e_machine"]]
            assert words == [f"8@{register}" for register in registers[: len(words)]]
            found[f"{provider.decode()}:{name.decode()}"] = at, semaphore, words
        return found


def counts(path: Path) -> dict[str, int]:
    found = notes(path)
    assert len({semaphore for _, semaphore, _ in found.values()}) == len(found)
    return {name: len(words) for name, (_, _, words) in found.items()}


def test_notes() -> None:
    assert counts(built("libcalmalloc.so")) == OURS
    assert counts(built("libptlbmalloc2.so")) == PTLBMALLOC2


def test_notes_of_static_programs(tmp_path: Path) -> None:
    """Also where the linker drops what nothing refers to, and after strip."""
    assert counts(BUILD / "tests/api/commanded-static") == OURS
    source = tmp_path / "main.c"
    source.write_text("#include <stdlib.h>\nint main(void) { free(malloc(1)); return 0; }\n")
    program = tmp_path / "program"
    flags = ["-Wl,--gc-sections", "-Wl,-u,malloc", "-pthread"]
    for more in ([], ["-static"]):
        compile_program([tool("cc", "gcc"), "-O2", source, archive(), *flags, *more, "-o", program])
        compile_program([tool("strip", "binutils"), program])
        assert counts(program) == OURS


@pytest.mark.skipif(not (BUILD_AARCH64 / "libcalmalloc.so").is_file(), reason="build/aarch64 is not built")
def test_notes_on_aarch64() -> None:
    if not (built("libcalmalloc.so", BUILD_AARCH64).stat().st_mtime > _newest_source()):
        pytest.skip("build/aarch64 is older than the sources")
    assert counts(built("libcalmalloc.so", BUILD_AARCH64)) == OURS


def _newest_source() -> float:
    return max(path.stat().st_mtime for path in (REPOSITORY / "src").rglob("probe*"))


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_notes_with_link_time_optimization(tmp_path: Path, compiler: str) -> None:
    library = tmp_path / "libcalmalloc.so"
    sources = [
        path
        for path in (REPOSITORY / "src").rglob("*.c")
        if path.name not in ("credentials.c", "syscall_wrappers.c")
    ]
    flags = ["-std=gnu17", "-D_GNU_SOURCE", "-O2", "-flto", "-fPIC", "-fno-builtin", "-fexceptions"]
    flags += ["-fvisibility=hidden", "-shared", "-pthread", f"-I{REPOSITORY / 'src'}", INCLUDE]
    # It has assembly, whose names link-time optimization does not see.
    apart = tmp_path / "syscall_wrappers.o"
    compile_program(
        [
            tool(compiler, compiler),
            *(flag for flag in flags if flag != "-shared"),
            "-fno-lto",
            "-c",
            REPOSITORY / "src/api/syscall_wrappers.c",
            "-o",
            apart,
        ]
    )
    compile_program([tool(compiler, compiler), *flags, *sources, apart, "-o", library])
    assert counts(library) == OURS


# --- what tracers see ---


def semaphores(program: Commanded, library: Path) -> dict[str, int]:
    pid = program.pid
    found = notes(library)
    start = min(image.start for image in counters.images(pid) if image.path == str(library.resolve()))
    with control.memory(pid) as there:
        words = {name: there.read(start + semaphore, 2) for name, (_, semaphore, _) in found.items()}
    return {name: int.from_bytes(word or b"", "little") for name, word in words.items()}


def mean_in_force(program: Commanded) -> int:
    """Asks the library, whose answer to `no more` is what is in force nevertheless."""
    program.do("busy")
    with control.memory(program.pid) as there:
        (table,), _ = counters.Finder().tables(there.read, counters.images(program.pid))
        mean = control.ask(there, table, control.PROFILE, 0, 120)
    program.do("large")
    return mean


def needs_bpftrace() -> None:
    if os.geteuid() != 0 or shutil.which("bpftrace") is None:
        pytest.skip("needs root and bpftrace")
    if not Path("/sys/bus/event_source/devices/uprobe").exists():
        pytest.skip("the kernel has no uprobes")


class Tracer:
    """bpftrace, which counts in the kernel: no event is lost."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def end(self) -> dict[str, dict[str, int]]:
        """Its maps: by name, the values by key."""
        for _ in range(10):
            # One that comes while bpftrace sets itself up may be lost.
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = self.process.communicate(timeout=20)
                break
        else:
            pytest.fail("bpftrace does not end")
        found: dict[str, dict[str, int]] = {}
        for line in output.splitlines():
            if line.startswith("{") and (event := json.loads(line))["type"] == "map":
                found |= event["data"]
        return found


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file of its own: a tracer of another test does not see the processes of this one."""
    return Path(shutil.copy(built("libcalmalloc.so"), tmp_path / "libcalmalloc.so"))


@contextmanager
def traced(program: Commanded, probes: dict[str, str], path: Path) -> Iterator[Tracer]:
    """Probes with what to do; waits until all are attached."""
    needs_bpftrace()
    script = "".join(f"usdt:{path}:{name} {{ {action} }}\n" for name, action in probes.items())
    environment = os.environ | {"BPFTRACE_MAP_KEYS_MAX": "100000"}
    with subprocess.Popen(
        ["bpftrace", "-f", "json", "-e", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:

            def attached() -> bool:
                if process.poll() is not None:
                    assert process.stdout is not None
                    pytest.skip(f"bpftrace cannot trace here: {process.stdout.read()[-500:]}")
                now = semaphores(program, path)
                return all(now[name] == 1 for name in probes)

            wait_until(attached)
            yield Tracer(process)
        finally:
            process.kill()


PROFILE = {
    "otel_memory:alloc": "@weights[pid, arg1] = sum(arg2); @allocations[pid, arg1] = count(); "
    "@live[pid, arg0] = 1;",
    "otel_memory:free": "if (@live[pid, arg0] == 1) { @frees[pid] = count(); delete(@live[pid, arg0]); } "
    "else { @unknown[pid] = count(); }",
}


@needs_first_pid_namespace
@pytest.mark.feature("profile")
@pytest.mark.parametrize("options", ["", "profile=64k"])
def test_heap_profile(library: Path, options: str) -> None:
    """Weights add up to what was allocated; what is freed are blocks whose allocation was seen."""
    small, large = 900, 2000000
    with commanded(preload=library, options=options) as program:
        pid = program.do("large")
        with traced(program, PROFILE, library) as tracer:
            program.do("large", f"hold 400000 {small}", f"hold 100 {large}", "free", "large")
            maps = tracer.end()
    mean = 65536 if "profile" in options else MEAN
    for count, size in ((400000, small), (100, large)):
        total = count * size
        # Six standard deviations of a Poisson process over the bytes.
        assert abs(maps["@weights"][f"{pid},{size}"] - total) <= 6 * (total * mean) ** 0.5 + total / 100
    weight = maps["@weights"][f"{pid},{small}"] / maps["@allocations"][f"{pid},{small}"]
    assert weight == pytest.approx(mean, rel=0.01)
    # The program keeps only its array of pointers, of which each version but the last was freed. The kernel
    # skips an event if it interrupts another one on the same CPU.
    seen = sum(maps["@allocations"].values())
    assert len(maps.get("@live", {})) <= 1 + seen // 100
    assert maps.get("@unknown", {}).get(f"{pid}", 0) <= seen // 100
    assert abs(maps["@frees"][f"{pid}"] - seen) <= 1 + seen // 100


@pytest.mark.feature("profile")
def test_listener_goes(library: Path) -> None:
    """Sampling is on while a tracer listens; also one that is killed leaves nothing behind."""
    with commanded(preload=library) as program:
        program.do("large")
        assert mean_in_force(program) == 0
        with traced(program, {"otel_memory:alloc": PROFILE["otel_memory:alloc"]}, library) as tracer:
            program.do("large")
            assert mean_in_force(program) == MEAN
            tracer.process.kill()
            tracer.process.wait()
            wait_until(lambda: not any(semaphores(program, library).values()))
        program.do("large")
        assert mean_in_force(program) == 0
        program.do("hold 1000 1000", "free")
        assert program.end() == 0


@needs_first_pid_namespace
@pytest.mark.feature("profile")
def test_forks(library: Path) -> None:
    """A child of a process that is traced is traced as well, and no longer once the tracer goes."""
    with commanded(preload=library) as program:
        parent = program.pid
        with traced(program, PROFILE, library) as tracer:
            child = program.do("large", "fork", "large", "hold 100000 900", "free")
            maps = tracer.end()
        assert child != parent
        assert f"{child},900" in maps["@weights"]
        wait_until(lambda: not any(semaphores(program, library).values()))
        program.do("large")
        assert mean_in_force(program) == 0
        assert program.end() == 0


def test_governor(library: Path) -> None:
    """A trim that is asked for is one purge of that reason, with the amounts that the counters have."""
    probes = {
        "calmalloc:purge__begin": "@begun[arg0] = sum(arg1); @begins[arg0] = count();",
        "calmalloc:purge__end": "@given[arg0] = sum(arg1); @ranges[arg0] = sum(arg2); @ns[arg0] = sum(arg3); "
        "@ends[arg0] = count();",
        "calmalloc:limit": "@limit = count(); if (arg0 == @last) { @same = count(); } @last = arg0;",
    }
    with commanded(preload=library, options="test_policy=paper,memory_per_cpu=160,background=off") as program:
        program.do("hold 200 1000000")
        with traced(program, probes, library) as tracer:
            program.do("free-every 2", "busy")
            with control.memory(program.pid) as there:
                (table,), _ = counters.Finder().tables(there.read, counters.images(program.pid))
                before: dict[str, Any] = table.values(there.read)
                given = control.ask(there, table, control.TRIM, 0, 120)
                after: dict[str, Any] = table.values(there.read)
            program.do("large")
            maps = tracer.end()
    asked = "2"
    assert maps["@begins"][asked] == maps["@ends"][asked] == 1
    assert maps["@begun"][asked] >= maps["@given"][asked] == given
    assert 0 < maps["@ranges"][asked] <= after["purge_ranges"] - before["purge_ranges"]
    assert 0 < maps["@ns"][asked] <= after["purge_ns"] - before["purge_ns"]
    assert maps["@limit"]
    assert not maps.get("@same")


@needs_first_pid_namespace
def test_helper(library: Path) -> None:
    with commanded(preload=library) as program:
        program.do("large")
        with traced(program, {"calmalloc:helper__wakeup": 'printf("%d\\n", pid);'}, library) as tracer:
            program.do("hold 300 1000000", "free", "busy")
            assert tracer.process.stdout is not None
            wanted = f'"{program.pid}\\n"'
            assert any(wanted in line for line in tracer.process.stdout), "bpftrace has ended"


def test_ptlbmalloc2(tmp_path: Path) -> None:
    library = Path(shutil.copy(built("libptlbmalloc2.so"), tmp_path / "libptlbmalloc2.so"))
    probes = {
        "ptlbmalloc2:trim__begin": "@begins = count();",
        "ptlbmalloc2:trim__end": "@ends = count(); @trimmed = sum(arg0); @purged = sum(arg1);",
    }
    with commanded(preload=library) as program, traced(program, probes, library) as tracer:
        program.do("hold 3000 100000", "free", "busy", "large")
        maps = tracer.end()
    assert maps["@begins"] == maps["@ends"]
    assert int(str(maps["@trimmed"])) >= int(str(maps["@purged"])) > 100 * MIB
