"""`calm lab`: with a QEMU that is made up, for all that can go wrong; and one real boot."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from calm_helpers import ROOT, Calm
from lab_helpers import compiled, needs_x86_64, turned, unpacked
from lab_qemu import VERSION, archive
from waiting import wait_until

from calm import cli
from calm.core.errors import CalmError
from research.lab import guest, packages, session
from research.lab.architecture import ARCHITECTURES, ARM64, X86_64, Architecture, host
from research.lab.guest import Turn
from research.lab.machine import Qemu
from research.lab.packages import Parts

LIBRARY = ROOT / "build/release/libcalmalloc.so"
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="calmalloc is not built")
pytestmark = needs_library


class Fake:
    """A folder with a QEMU, a kernel and a busybox that are none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: dict[str, Any] = {"acts": {}, "log": str(folder / "log")}
        tools = folder / "tools"
        tools.mkdir()
        for architecture in (X86_64, ARM64):
            qemu = tools / architecture.qemu
            qemu.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/common/lab_qemu.py "$@"\n')
            qemu.chmod(0o755)
        for name in ("kernel", "busybox"):
            (folder / name).write_bytes(name.encode())
        self.environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "FAKE_QEMU": str(folder / "plan.json"),
        }
        self.cache = folder / "cache"
        self.fixed = ["lab", "--accel", "tcg", *self.files]

    @property
    def files(self) -> list[str]:
        """Options, so that nothing is fetched."""
        kernel, busybox = self.folder / "kernel", self.folder / "busybox"
        return ["--kernel", str(kernel), "--busybox", str(busybox), "--cache", str(self.cache)]

    def act(self, library: str = "", **does: Any) -> None:
        """What happens under a library; without one, under glibc."""
        self.plan["acts"][library] = does
        self.save()

    def save(self) -> None:
        (self.folder / "plan.json").write_text(json.dumps(self.plan))

    def started(self) -> list[dict[str, Any]]:
        """What QEMU was started with."""
        log = self.folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def await_hanging(self, calm: int) -> None:
        """Until a run hangs, and calm has taken note of all that was said before."""
        wait_until((self.folder / "hangs").exists)
        said = Path(f"/proc/{self.started()[0]['pid']}/fd/1")

        def unread() -> int:
            with said.open("rb", buffering=0) as pipe:
                return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)

        def waits() -> int:
            status = Path(f"/proc/{calm}/status").read_text()
            return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

        wait_until(lambda: not unread())
        before = waits()
        wait_until(lambda: waits() > before + 2)

    def consoles(self) -> list[Path]:
        """Those that were kept."""
        return sorted(self.cache.glob("console-*.log"))

    def left_over(self) -> list[str]:
        """What is in the cache, but for what is meant to stay."""
        stays = {"kvm.json", *(path.name for path in self.consoles())}
        return sorted({path.name for path in self.cache.iterdir()} - stays)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    made = Fake(tmp_path)
    made.act(interrupts=[1000, 3000, 2000])
    made.act("libcalmalloc.so", interrupts=[10])
    return made


Lab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def lab(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lab:
    """The command, without a process of its own: it would take longer than all the rest."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["calm", *fake.fixed, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output, errors = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(sys.argv, ended.value.code, output, errors)

    return run


def test_counts_become_medians_and_ratios(lab: Lab, fake: Fake) -> None:
    result = lab("--cpus", "8", "--sockets", "2", "-n", "3", "--json", "--", "true")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["schema"] == "calm-lab"
    glibc, calmalloc = told["allocators"]
    # Turns 0, 2 and 4 are glibc's.
    assert [run["interrupts_system_wide"] for run in glibc["runs"]] == [1000, 2000, 3000]
    assert glibc["median"]["interrupts_system_wide"] == 2000
    assert glibc["median"]["shootdowns"] == 1000
    assert calmalloc["ratio"]["interrupts_system_wide"]["value"] == pytest.approx(10 / 2000)
    assert (calmalloc["library"], len(calmalloc["runs"])) == (str(LIBRARY), 3)
    assert told["machine"]["cpus"] == 8
    assert told["machine"]["nodes"] == 2
    assert told["machine"]["emulated"] is True
    assert told["qemu"] == VERSION
    assert "wall_s" not in glibc["median"], "times of an emulator mean nothing"
    assert str(fake.folder) not in json.dumps(told["qemu_command"])
    assert "TLB interrupts" in result.stderr
    assert "process_madvise" in result.stderr
    assert fake.left_over() == []


def test_the_machine_is_the_one_asked_for(lab: Lab, fake: Fake) -> None:
    lab("--cpus", "6", "--sockets", "3", "--memory", "1000M", "-n", "1", "--", "true")
    (started,) = fake.started()
    words = " ".join(started["arguments"])
    assert "-smp 6,sockets=3,cores=2,threads=1" in words
    assert "-m 1000M" in words
    sizes = [f"id=node{node},size={size}M" for node, size in enumerate((334, 333, 333))]
    assert all(size in words for size in sizes)
    assert "node,nodeid=2,cpus=4-5,memdev=node2" in words


def test_the_guest_is_told_all(lab: Lab, fake: Fake) -> None:
    fake.plan["keep"] = str(fake.folder / "kept")
    fake.save()
    result = lab(
        *(
            "-a",
            "glibc,calmalloc:CALM_OPTIONS=memory_per_cpu=7",
            "-n",
            "2",
            "--pin",
            "0-1,3",
            "--env",
            "COLOR=it's red",
        ),
        *("--env", "FAKE_QEMU", "--syscalls", "--", "sh", "-c", 'echo "$1"', "a b"),
    )
    assert result.returncode == 0, result.stderr
    files = archive(fake.folder / "kept")
    mode, init = files["init"]
    assert mode & 0o111
    runs = [line for line in init.decode().splitlines() if line.startswith("run l")]
    assert [line.split()[1:3] for line in runs] == [["l0", "0"], ["l1", "1"], ["l0", "2"], ["l1", "3"]]
    assert all("'COLOR=it'\"'\"'s red'" in line for line in runs)
    assert all(f"FAKE_QEMU={fake.folder}/plan.json" in line for line in runs)
    assert all("-c tlb,syscalls" in line for line in runs)
    assert all("taskset -c 0-1,3 sh -c 'echo \"$1\"' 'a b'" in line for line in runs)
    assert f"-e LD_PRELOAD={LIBRARY}" in runs[1]
    assert "-e CALM_OPTIONS=memory_per_cpu=7" in runs[1]
    assert "LD_PRELOAD" not in runs[0]
    assert files[".lab/busybox"][1] == b"busybox"
    assert str(LIBRARY.resolve()).lstrip("/") in files
    assert str(Path.cwd()).lstrip("/") in files
    assert files["etc/passwd"][1].startswith(b"root:")
    assert len(files["etc/passwd"][1].splitlines()) == 1, "this machine's users are nobody's business"


@pytest.mark.parametrize("where", ["-o", "--json"])
def test_a_full_disk_is_one_line(lab: Lab, where: str) -> None:
    result = lab("-n", "1", where, "/dev/full", "--", "true")
    assert result.returncode == 1
    assert result.stderr == "calm: cannot write /dev/full: No space left on device\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_pipe_ends_it(fake: Fake, form: list[str]) -> None:
    """The reader closed its end before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "calm", *fake.fixed, "-n", "1", *form, "--", "true"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | fake.environment
    result = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writer)
    assert result.returncode == 141
    assert b"Traceback" not in result.stderr


def test_the_report_goes_to_a_file(lab: Lab, fake: Fake) -> None:
    path = fake.folder / "report"
    result = lab("-n", "1", "-o", path, "--json", "--", "true")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["rounds"] == 1
    assert "TLB interrupts" in path.read_text()


def test_forty_columns_without_color(fake: Fake) -> None:
    """The terminal wraps long lines; the program writes no color."""
    leader, terminal = os.openpty()
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    words = [sys.executable, "-m", "calm", *fake.fixed, "-n", "1", "--", "true"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"} | fake.environment
    environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(words, stdout=terminal, stderr=subprocess.PIPE, env=environment) as process:
        os.close(terminal)
        output = b""
        with contextlib.suppress(OSError):
            while data := os.read(leader, 1 << 16):
                output += data
    os.close(leader)
    assert process.returncode == 0
    assert b"TLB interrupts" in output
    assert not re.search(rb"\x1b\[[0-9;]*\b3[0-7]m", output)


def test_this_machines_preload_stays_here(fake: Fake, calm: Calm) -> None:
    fake.plan["keep"] = str(fake.folder / "kept")
    fake.save()
    calm(
        *fake.fixed, "-n", "1", "-a", "glibc", "--", "true", env=fake.environment | {"MALLOC_ARENA_MAX": "1"}
    )
    assert b"MALLOC_ARENA_MAX" not in archive(fake.folder / "kept")["init"][1]


def test_a_failing_program_is_shown_and_not_run_again(lab: Lab, fake: Fake) -> None:
    fake.act("libcalmalloc.so", code=3, errors="one\ntwo\x1b[31m\n")
    result = lab("-n", "3", "--json", "--", "true")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert lines[:3] == ["calm: calmalloc: true: exit code 3", "    one", "    two [31m"]
    glibc, calmalloc = json.loads(result.stdout)["allocators"]
    assert len(glibc["runs"]) == 3
    assert (calmalloc["runs"], calmalloc["failure"]) == ([], "exit code 3")
    assert calmalloc["median"]["interrupts_system_wide"] is None
    assert calmalloc["ratio"]["interrupts_system_wide"]["value"] is None, "a run that failed is in no ratio"


def test_there_is_no_ratio_to_one_that_failed(lab: Lab, fake: Fake) -> None:
    fake.act("", code=3)
    result = lab("-n", "2", "--json", "--", "true")
    assert result.returncode == 1
    glibc, calmalloc = json.loads(result.stdout)["allocators"]
    assert (len(glibc["runs"]), len(calmalloc["runs"])) == (0, 2)
    assert calmalloc["median"]["interrupts_system_wide"] == 10
    assert calmalloc["ratio"]["interrupts_system_wide"] == {"value": None, "low": None, "high": None, "n": 0}


def test_a_signal_has_its_name(lab: Lab, fake: Fake) -> None:
    fake.act("libcalmalloc.so", signal=11)
    assert "killed by SIGSEGV (11)" in lab("-n", "1", "--", "true").stderr


def test_a_library_that_was_not_loaded_does_not_count(lab: Lab, fake: Fake) -> None:
    words = "ERROR: ld.so: object 'x.so' from LD_PRELOAD cannot be preloaded (cannot open): ignored."
    fake.act("libcalmalloc.so", interrupts=[10], errors=words)
    result = lab("-n", "1", "--json", "--", "true")
    assert result.returncode == 1
    assert json.loads(result.stdout)["allocators"][1]["runs"] == []
    assert "its library was not loaded" in result.stderr


def test_one_that_hangs_costs_the_others_a_boot_and_no_more(lab: Lab, fake: Fake) -> None:
    fake.act("libcalmalloc.so", hangs=True, console="still here\n")
    result = lab("-n", "2", "--timeout", "2s", "--json", "--", "true")
    assert result.returncode == 1
    assert "calmalloc: true: did not finish in 2 s (--timeout)" in result.stderr
    assert [len(side["runs"]) for side in json.loads(result.stdout)["allocators"]] == [2, 0]
    assert len(fake.started()) == 2
    (console,) = fake.consoles()
    assert console.read_text() == "still here\n"
    assert fake.left_over() == []


def test_each_console_that_is_told_of_is_kept(lab: Lab, fake: Fake) -> None:
    """A second boot that goes wrong, or another run of ours at the same time, writes over none."""
    fake.act("", console="Kernel panic - not syncing: first\n", dies=True)
    fake.act("libcalmalloc.so", console="Kernel panic - not syncing: second\n", dies=True)
    for _ in range(2):
        result = lab("-n", "1", "--", "true")
        assert result.returncode == 1
        first, second = result.stderr.splitlines()
        for line, word in ((first, "first"), (second, "second")):
            told, _, path = line.partition("; its console is in ")
            assert told.endswith(f"panicked: {word}")
            assert Path(path).read_text() == f"Kernel panic - not syncing: {word}\n"
    assert len(fake.consoles()) == 4


def test_old_consoles_are_swept(lab: Lab, fake: Fake) -> None:
    fake.cache.mkdir()
    old = fake.cache / "console-7-abc.log", fake.cache / "console-others.log"
    for path in (*old, fake.cache / "console-8-abc.log"):
        path.write_text("")
    for path in old:
        os.utime(path, (time.time() - 8 * 24 * 3600,) * 2)
    assert lab("-n", "1", "--", "true").returncode == 0
    assert [path.name for path in fake.consoles()] == ["console-8-abc.log", "console-others.log"]


def test_a_second_boot_that_fails_does_not_hide_why_there_was_one(lab: Lab, fake: Fake) -> None:
    fake.act("", dies=True)
    fake.plan["then"] = {"boots into": "Kernel panic - not syncing: again\n"}
    fake.save()
    result = lab("-n", "1", "--json", "--", "true")
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert first.startswith("calm: glibc: true: the guest stopped before its end")
    assert second.startswith("calm: the guest's kernel panicked: again")
    assert json.loads(result.stdout)["allocators"][0]["failure"]


def test_a_guest_that_dies_between_two_runs_is_a_failure(lab: Lab, fake: Fake) -> None:
    fake.act("", code=0, dies_after=True, interrupts=[5])
    result = lab("-n", "1", "--", "true")
    assert result.returncode == 1
    assert result.stderr.startswith("calm: the guest stopped before its end")
    assert "TLB interrupts" in result.stdout, "what was known is shown"


@pytest.fixture
def lasting(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Of each run under glibc so many seconds pass, by the clock of calm lab, and none otherwise."""
    seen = fake.folder / "seen"
    now_s = each_s = 0.0
    feed = guest.Listener.feed

    def fed(listener: guest.Listener, data: bytes) -> list[tuple[int, guest.Run]]:
        nonlocal now_s
        found = list(feed(listener, data))
        now_s += each_s * sum(run.label == "glibc" for _, run in found)
        if listener.running is not None:
            (seen / str(listener.running)).touch()
        return found

    monkeypatch.setattr(guest.Listener, "feed", fed)
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now_s))

    def last(seconds: float) -> None:
        nonlocal each_s
        each_s = seconds
        shutil.rmtree(seen, ignore_errors=True)
        seen.mkdir()
        for library in ("", "libcalmalloc.so"):
            # No run ends before its beginning has been seen.
            fake.act(library, waits_for=str(seen))

    return last


def test_the_timeout_is_for_each_run(lab: Lab, lasting: Callable[[float], None]) -> None:
    lasting(0.6)
    assert lab("-a", "glibc", "-n", "4", "--timeout", "1600ms", "--", "true").returncode == 0


def test_rounds_that_take_long_are_fewer(
    lab: Lab, fake: Fake, lasting: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first one always, another only if it would end in time, and -n says how many whatever they take."""
    for seconds, enough_s, rounds in ((0.1, 0.1, 1), (2, 5.5, 2), (0.1, 60.0, 3)):
        lasting(seconds)
        monkeypatch.setattr("research.lab.command.ENOUGH_S", enough_s)
        result = lab("--json", "--", "true")
        assert result.returncode == 0, result.stderr
        told = json.loads(result.stdout)
        assert [len(side["runs"]) for side in told["allocators"]] == [rounds, rounds]
        assert ("of 3 rounds" in result.stderr) == (rounds < 3), result.stderr
        assert any(
            f"{rounds} of 3 rounds, as one takes {seconds:.0f} s" in note for note in told["notes"]
        ) == (rounds < 3)
    lasting(0.1)
    monkeypatch.setattr("research.lab.command.ENOUGH_S", 0.1)
    assert "of 2 rounds" not in lab("-n", "2", "--", "true").stdout
    assert fake.left_over() == []


def test_what_a_killed_one_left_is_swept(lab: Lab, fake: Fake) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    mine = [f"boot-{os.getppid()}-x", f".busybox-static.{os.getppid()}.x"]
    ended = [f"boot-{process.pid}-x", f".linux-image-6.1.0-56-cloud-amd64.{process.pid}.x"]
    # --cache may name a folder with more in it.
    others = ["boot-repair-data", ".config.d", ".linux-image-notes.d", "linux-image-6.1.0-56-cloud-amd64"]
    for name in (*ended, *mine, *others):
        (fake.cache / name).mkdir(parents=True)
    assert lab("-n", "1", "--", "true").returncode == 0
    assert fake.left_over() == sorted([*mine, *others])


@pytest.mark.parametrize(
    ("console", "told"),
    [
        ("Kernel panic - not syncing: Fatal exception\n", "the guest's kernel panicked: Fatal exception"),
        (
            "Out of memory: Killed process 99 (listing1) total-vm\n",
            "ran out of memory, and its kernel killed listing1",
        ),
        ("", "the guest stopped before its end"),
    ],
)
def test_a_guest_that_dies_in_a_run(lab: Lab, fake: Fake, console: str, told: str) -> None:
    fake.act("libcalmalloc.so", console=console, dies=True)
    result = lab("-n", "1", "--", "true")
    assert result.returncode == 1
    first = result.stderr.splitlines()[0]
    assert told in first
    (kept,) = fake.consoles()
    assert first.endswith(f"its console is in {kept}")
    assert kept.read_text() == console
    assert "glibc" in result.stdout, "what was known is shown"


def test_a_program_killed_for_memory(lab: Lab, fake: Fake) -> None:
    fake.act("", code=4)
    fake.act("libcalmalloc.so", console="Out of memory: Killed process 7 (true) total\n", signal=9)
    result = lab("-a", "calmalloc,glibc", "-n", "1", "--", "true")
    assert "calmalloc: true: the guest ran out of memory, and its kernel killed true" in result.stderr
    assert "glibc: true: exit code 4\n" in result.stderr, "memory was the other's want"


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (
            {"boots into": "Kernel panic - not syncing: No working init found.\n"},
            "kernel panicked: No working init",
        ),
        ({"boots into": "Initramfs unpacking failed: write error\n"}, "more --memory may help"),
        ({"complains": "-m 9999G: cannot set up guest memory"}, "QEMU: -m 9999G: cannot set up guest memory"),
        ({"cpus": 3}, "the guest sees 3 CPUs in 1 sockets"),
    ],
)
def test_a_guest_that_does_not_come_up(lab: Lab, fake: Fake, plan: dict[str, Any], told: str) -> None:
    fake.plan |= plan
    fake.save()
    result = lab("-n", "1", "--", "true")
    assert result.returncode == 1
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert fake.left_over() == []


def test_a_boot_has_its_time(lab: Lab, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "BOOT_S", 1.0)
    fake.plan["boots in"] = 5
    fake.save()
    result = lab("-n", "1", "--", "true")
    assert (result.returncode, result.stderr) == (1, "calm: the guest did not boot in 1 s\n")
    assert fake.left_over() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_what_is_known(fake: Fake, number: signal.Signals, code: int) -> None:
    fake.act("libcalmalloc.so", hangs=True)
    with subprocess.Popen(
        [sys.executable, "-m", "calm", *fake.fixed, "-n", "5", "--", "true"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | fake.environment,
    ) as process:
        fake.await_hanging(process.pid)
        process.send_signal(number)
        output, errors = process.communicate()
    assert process.returncode == code, errors
    assert "1,000" in output, "glibc's first round was over"
    assert "stopped after 0 of 5 rounds" in errors
    assert "Traceback" not in errors
    (started,) = fake.started()
    assert not Path(f"/proc/{started['pid']}").exists(), "QEMU is gone"
    assert fake.left_over() == []


def test_qemu_does_not_outlive_a_calm_that_is_killed(fake: Fake) -> None:
    fake.act("", hangs=True)
    with subprocess.Popen(
        [sys.executable, "-m", "calm", *fake.fixed, "-n", "1", "--", "true"],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | fake.environment,
    ) as process:
        wait_until(fake.started)
        process.kill()
    (started,) = fake.started()
    wait_until(lambda: not Path(f"/proc/{started['pid']}").exists(), "QEMU lives on")


def test_kvm_is_tried_by_booting_and_once(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_QEMU", fake.environment["FAKE_QEMU"])
    monkeypatch.setattr(session.os, "access", lambda *_: True)  # type: ignore[attr-defined]
    fake.cache.mkdir()
    qemu = Qemu(str(fake.folder / "tools" / X86_64.qemu), VERSION)
    parts = Parts(fake.folder / "kernel", "kernel 1", fake.folder / "busybox")
    reasons = [session._kvm_boots(qemu, parts, fake.cache, lambda: None) for _ in range(2)]
    assert reasons[0] == reasons[1]
    assert "failed to set MSR 0x10a" in str(reasons[0])
    assert len(fake.started()) == 1
    # Another kernel, or another QEMU, is another question.
    fake.plan["kvm"] = "works"
    fake.save()
    other = Parts(parts.kernel, "kernel 2", parts.busybox)
    assert session._kvm_boots(qemu, other, fake.cache, lambda: None) is None
    assert session._kvm_boots(qemu, other, fake.cache, lambda: None) is None
    assert len(fake.started()) == 2


@pytest.mark.skipif(not os.access("/dev/kvm", os.R_OK | os.W_OK), reason="no /dev/kvm here")
def test_times_are_shown_under_kvm_alone(fake: Fake, calm: Calm) -> None:
    arguments = ["--json", "-n", "1", "-a", "glibc", "--", "true"]
    refused = calm("lab", "--accel", "kvm", *fake.files, *arguments, env=fake.environment)
    assert refused.returncode == 1
    assert "no machine boots under KVM here" in refused.stderr
    (fake.cache / "kvm.json").unlink()
    fake.plan["kvm"] = "works"
    fake.save()
    told = json.loads(calm("lab", *fake.files, *arguments, env=fake.environment).stdout)
    assert told["machine"]["accelerator"] == "kvm"
    assert told["allocators"][0]["median"]["wall_s"] == 5.0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--cpus", "10", "--sockets", "4", "--", "true"), 2, "multiple of --sockets"),
        (("--cpus", "0", "--", "true"), 2, "--cpus"),
        (("--cpus", "255", "--sockets", "5", "--", "true"), 2, "more than the emulated machine can number"),
        (("--memory", "many", "--", "true"), 2, "not a number of bytes"),
        (("--memory", "100M", "--", "true"), 2, "need at least"),
        (("--memory", "900000G", "--", "true"), 2, "are available on this machine"),
        (("--pin", "0-16", "--", "true"), 2, "CPUs from 0 to 15"),
        (("--pin", "x", "--", "true"), 2, "CPUs from 0 to 15"),
        (("--env", "=1", "--", "true"), 2, "neither NAME=VALUE nor"),
        (("--env", "NOT_SET_HERE", "--", "true"), 2, "neither NAME=VALUE nor"),
        (("--add", "/no/such", "--", "true"), 2, "no such file or directory"),
        (("-a", "nosuch", "--", "true"), 2, "unknown allocator"),
        (("--json", "/no/such/file", "--", "true"), 1, "no such directory"),
        (("--timeout", "0", "--", "true"), 2, "--timeout"),
        (("--timeout", "5", "--", "true"), 2, "'5' is not a duration"),
        (("--", "no-such-program"), 127, "no such program"),
        ((), 2, "cmd"),
    ],
)
def test_bad_input_gets_one_line(
    lab: Lab, fake: Fake, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = lab(*arguments)
    assert result.returncode == code, result.stderr
    assert message.lower() in result.stderr.lower()
    assert result.stderr.count("\n") == 1
    assert fake.started() == []


def test_without_qemu_or_apt_it_says_what_to_install(tmp_path: Path, fake: Fake, calm: Calm) -> None:
    tools = tmp_path / "few"
    tools.mkdir()
    for name in ("true", "ldd", "sh", "bash", "cat", "sleep"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    result = calm("lab", *fake.files, "--", "true", env={"PATH": str(tools)})
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "Debian package qemu-system-x86" in result.stderr
    (tools / X86_64.qemu).symlink_to(fake.folder / "tools" / X86_64.qemu)
    result = calm("lab", "--cache", tmp_path / "empty", "--", "true", env={"PATH": str(tools)})
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "apt-cache is missing" in result.stderr


def test_files_named_as_arguments_are_offered(lab: Lab, tmp_path: Path) -> None:
    data, more, other = tmp_path / "my data", tmp_path / "more", tmp_path / "other"
    data.write_text("x")
    more.write_text("x")
    other.write_text("y")
    # These are its kernel's own.
    there = ["/proc/cpuinfo", "/sys/kernel", "/dev/null"]
    result = lab("-n", "1", "--add", other, "--", "true", data, data, f"--in={more}", other, "plain", *there)
    assert result.stderr.count("note:") == 2, result.stderr
    assert f"--add '{data}' carries it" in result.stderr


def test_an_argument_may_be_longer_than_a_name_of_a_file(lab: Lab, tmp_path: Path) -> None:
    result = lab("-n", "1", "--", "true", "x" * 300, f"--words={'y' * 5000}")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_setting_that_glibc_does_not_read_is_told_of(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TOP_PAD", "1")  # stays here
    result = lab("-n", "1", "-a", "glibc,glibc:MALLOC_TRIM_THRESHOLD=-1", "--", "true")
    assert result.returncode == 0
    (told,) = result.stderr.splitlines()
    assert told.startswith("calm: MALLOC_TRIM_THRESHOLD is set, but glibc reads MALLOC_TRIM_THRESHOLD_, ")


def test_a_static_program_is_told_of(lab: Lab, tmp_path: Path) -> None:
    source, path = tmp_path / "static.c", tmp_path / "static"
    source.write_text("int main(void) { return 0; }\n")
    command = ["cc", "-static", "-o", path, source]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no static C library")
    assert "no allocator can be preloaded" in lab("-n", "1", "--", path).stderr


def test_turns_have_their_own_names_in_the_script() -> None:
    turns = [Turn("a:x y", ("p",)), Turn("b", ("q",)), Turn("a:x y", ("p",))]
    text = guest.script(
        list(enumerate(turns)),
        probe=Path("/probe"),
        groups=(),
        environment={},
        folder=Path("/a b"),
        port="ttyS7",
    ).decode()
    assert "exec 3>/dev/ttyS7\n" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("run l")] == ["l0", "l1", "l0"]
    assert "cd '/a b'\n" in text
    assert "-c none" in text


@pytest.fixture
def cross_build(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a checkout has cross-compiled for arm64, beside Debian's libraries in the cache."""
    build = fake.folder / "checkout/build/aarch64"
    turned(compiled(build / "libcalmalloc.so", "-shared"))
    for name in ("calm-probe", "program"):
        turned(compiled(build / name))
    unpacked(fake.cache / "arm64")
    monkeypatch.setattr("calm.core.paths.checkout", lambda: fake.folder / "checkout")
    return build


@needs_x86_64
def test_a_guest_of_another_architecture(lab: Lab, fake: Fake, cross_build: Path) -> None:
    fake.plan |= {"keep": str(fake.folder / "kept"), "page_kib": 16}
    fake.save()
    library = cross_build / "libcalmalloc.so"
    specs = f"glibc,calmalloc:A=1,2;B=3,also={library}"
    words = ("--arch", "arm64", "--cpus", "4", "-n", "1", "-a", specs, "--json", "--")
    result = lab(*words, cross_build / "program")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["machine"]["architecture"], told["machine"]["page_size_kib"]) == ("aarch64", 16)
    assert told["glibc"] == "2.99"
    labels = [side["label"] for side in told["allocators"]]
    assert labels == ["glibc", "calmalloc:A=1,2;B=3", "also"]
    (started,) = fake.started()
    command = " ".join(started["arguments"])
    assert "-M virt,gic-version=max" in command
    assert "-accel tcg,thread=single" in command
    assert "-append console=ttyAMA0 " in command
    assert "tsc=" not in command
    # The reports have a port where the kernel does not write.
    assert command.endswith("-chardev stdio,id=reports -device pci-serial,chardev=reports")
    files = archive(fake.folder / "kept")
    init = files["init"][1].decode()
    assert "exec 3>/dev/ttyS0\n" in init
    runs = [line for line in init.splitlines() if line.startswith("run l")]
    assert [f"-e LD_PRELOAD={library}" in line for line in runs] == [False, True, True]
    assert "-e A=1,2 -e B=3" in runs[1]
    assert all(f" {cross_build}/calm-probe -c" in line for line in runs)
    for name in ("calm-probe", "libcalmalloc.so", "program"):
        assert files[str(cross_build / name).lstrip("/")][1] == (cross_build / name).read_bytes()
    assert fake.left_over() == ["arm64"]


@needs_x86_64
def test_arm64_is_said_to_send_no_interrupts(lab: Lab, fake: Fake, cross_build: Path) -> None:
    for name in ("", "libcalmalloc.so"):
        fake.act(name, interrupts=[None])
    result = lab("--arch", "arm64", "-n", "1", "--json", "--", cross_build / "program")
    told = json.loads(result.stdout)
    for side in told["allocators"]:
        assert set(side["median"]) == {"minor_faults", "peak_rss_kib"}
        assert side["runs"][0]["counters"]["shootdowns"]["value"] is None
    assert "TLB interrupts" not in result.stderr
    assert "not counted" not in result.stderr
    assert (
        "note: arm64 CPUs invalidate TLBs by broadcast (TLBI): no interrupt is sent for it" in result.stderr
    )


@needs_x86_64
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--arch", "arm64", "PROGRAM"), 1, "calm-probe is not built for arm64: in a checkout, `cmake --pre"),
        (("--arch", "arm64", "-a", "calmoffload", "PROGRAM"), 1, "libcalmoffload.so is not built for arm64"),
        (("--arch", "arm64", "-a", "jemalloc", "PROGRAM"), 2, "unknown allocator 'jemalloc' for arm64"),
        (("--arch", "arm64", "-a", "glibc,glibc", "PROGRAM"), 2, "'glibc' is given twice"),
        (("--arch", "arm64", "-a", "x=/no/such", "PROGRAM"), 2, "/no/such: No such file"),
        (("--arch", "arm64", "-a", f"x={LIBRARY}", "PROGRAM"), 2, "is for x86-64, and the guest is arm64"),
        (("--arch", "arm64", "true"), 2, "is for x86-64, and the guest is arm64"),
        (("--arch", "arm64", "--accel", "kvm", "PROGRAM"), 1, "architecture is not this machine's"),
        (("-a", "glibc", "PROGRAM"), 2, "is for arm64, and the guest is x86-64: --arch arm64 "),
    ],
)
def test_what_a_foreign_guest_cannot_have(
    lab: Lab, fake: Fake, cross_build: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    if "calm-probe" in message:
        (cross_build / "calm-probe").unlink()
    result = lab("-n", "1", *(word.replace("PROGRAM", f"{cross_build}/program") for word in arguments))
    assert (result.returncode, result.stderr.count("\n")) == (code, 1), result.stderr
    assert message in result.stderr
    assert fake.started() == []


@needs_x86_64
def test_the_package_of_a_missing_qemu_is_named(fake: Fake, lab: Lab, cross_build: Path) -> None:
    (fake.folder / "tools" / ARM64.qemu).unlink()
    fake.environment["PATH"] = str(fake.folder / "tools")
    result = lab("--arch", "arm64", "-n", "1", "--", cross_build / "program")
    assert result.stderr == (
        "calm: qemu-system-aarch64 is not installed: it is in the Debian package qemu-system-arm\n"
    )


@pytest.mark.parametrize(
    ("here", "architecture"), [("aarch64", ARM64), ("x86_64", X86_64), ("s390x", X86_64)]
)
def test_the_guest_is_like_this_machine(
    monkeypatch: pytest.MonkeyPatch, here: str, architecture: Architecture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: here)
    assert host() is architecture
    assert architecture.foreign == (here == "s390x")


def _fetched(architecture: Architecture) -> Path:
    """The cache, with all that a real boot takes."""
    if not shutil.which(architecture.qemu):
        pytest.skip(f"there is no {architecture.qemu}")
    cache = packages.default_cache() / (architecture.debian if architecture.foreign else "")
    try:
        packages.fetch(cache, lambda _: None, architecture=architecture)
    except CalmError as error:
        pytest.skip(str(error))
    return cache


@pytest.fixture(scope="module")
def real() -> Path:
    return _fetched(X86_64)


def test_a_real_guest(real: Path, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(
        f"#!/bin/sh\nset -e\n{ROOT}/build/release/listing1 --threads 4 --rounds 1\n"
        'cat data; nproc; echo "$COLOR" "${LD_PRELOAD##*/}"; pwd; pidof sleep || echo alone\n'
        'sleep 1000 &\n[ -z "$LD_PRELOAD" ] && exit\n[ ! -e /tmp/ran ] || exit 3\ntouch /tmp/ran\n'
    )
    script.chmod(0o755)
    (tmp_path / "data").write_text("carried\n")
    machine_options = ["--accel", "tcg", "--cpus", "4", "--sockets", "2", "-n", "2", "--pin", "0,2-3"]
    carried = ["--add", ROOT / "build/release/listing1", "--add", "data", "--env", "COLOR=red"]
    result = subprocess.run(
        [sys.executable, "-m", "calm", "lab", *machine_options, *carried, "--json", "--", "./script"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout, result.stderr
    told = json.loads(result.stdout)
    assert told["machine"]["nodes"] == 2
    glibc, calmalloc = told["allocators"]
    run, again = glibc["runs"]
    printed = {(each["label"], each["round"]): each["printed"].splitlines() for each in told["output"]}
    for number in (1, 2):
        lines = printed["glibc", number]
        assert json.loads(lines[0])["threads"] == 4
        # What one run leaves behind is gone in the next.
        assert lines[1:] == ["carried", "3", "red ", str(tmp_path), "alone"]
    assert run["interrupts_system_wide"] > 0
    # Under calmalloc the script fails in the second round.
    (other,) = calmalloc["runs"]
    assert calmalloc["failure"] == "exit code 3"
    assert printed["calmalloc", 2][3] == "red libcalmalloc.so"
    begun, fewer = (each["counters"]["shootdowns"]["value"] for each in (run, other))
    assert begun > 50
    assert fewer < begun / 5
    assert again["minor_faults"] > 100


@pytest.mark.long
@pytest.mark.timeout(8000)
def test_sixteen_cpus_in_four_sockets(real: Path) -> None:
    asked = "--cpus 16 --sockets 4 -n 3 --json -a glibc,calmalloc -- build/release/listing1 --rounds 2"
    result = subprocess.run(
        [sys.executable, "-m", "calm", "lab", *asked.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["machine"]["cpus"], told["machine"]["nodes"]) == (16, 4)
    assert told["allocators"][1]["ratio"]["interrupts_system_wide"]["value"] < 0.1


@needs_x86_64
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("architecture", "page_kib"), [("arm64", 4), ("arm64-16k", 16)])
def test_a_real_guest_of_arm64(tmp_path: Path, architecture: str, page_kib: int) -> None:
    build = ROOT / "build" / ARM64.machine
    for name in ("calm-probe", "libcalmalloc.so", "listing1"):
        if not (build / name).exists():
            pytest.skip(f"{name} is not built for arm64")
    _fetched(ARCHITECTURES[architecture])
    script = tmp_path / "script"
    script.write_text(
        f"#!/bin/sh\nset -e\n{build}/listing1 --threads 4 --rounds 1\nuname -m\n"
        f'LD_PRELOAD="libstdc++.so.6 libgcc_s.so.1 $LD_PRELOAD" {build}/listing1 --threads 1 --rounds 1\n'
    )
    script.chmod(0o755)
    options = ["--arch", architecture, "--cpus", "4", "--sockets", "2", "-n", "1", "--syscalls", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "calm", "lab", *options, "--add", build / "listing1", "--", "./script"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["machine"]["architecture"] == "aarch64"
    assert (told["machine"]["nodes"], told["machine"]["page_size_kib"]) == (2, page_kib)
    for output in told["output"]:
        assert json.loads(output["printed"].splitlines()[0])["threads"] == 4
        assert output["printed"].splitlines()[1] == "aarch64"
        assert output["errors"] == ""
    glibc, calmalloc = (side["median"] for side in told["allocators"])
    assert "interrupts_system_wide" not in glibc
    assert calmalloc["madvise"] < glibc["madvise"] / 5
    assert glibc["minor_faults"] > 100
