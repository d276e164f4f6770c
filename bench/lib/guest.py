"""A machine of 16 CPUs in QEMU, with nothing in it but what is measured.

That is Debian's kernel for clouds, busybox for /init, and the programs with the libraries that they need.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPUS, SOCKETS = 16, 4
BINARIES = "/bench"
STATS = "/tmp/stats"
KERNEL_PACKAGE = "linux-image-cloud-amd64"

# Lines that start with @@ are for the host; the kernel may print between them. What a program prints waits in
# files, so that no two lines mix.
INIT = """#!/bin/busybox sh
set -f
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t tmpfs tmp /tmp
exec </dev/console >/dev/console 2>&1
say() {{ echo; echo "@@ $*"; }}
tlb() {{ /bin/busybox grep '^ *TLB:' /proc/interrupts; }}
say kernel $(/bin/busybox uname -r)
say cpus $(/bin/busybox nproc) sockets $(/bin/busybox grep '^physical id' /proc/cpuinfo | \
/bin/busybox sort -u | /bin/busybox wc -l)
run() {{
    name=$1
    shift
    : >{stats}
    say before $name $(tlb)
    /bin/busybox env "$@" >/tmp/printed 2>/tmp/errors
    say status $name $?
    say after $name $(tlb)
    say printed $name $(/bin/busybox cat /tmp/printed)
    say errors $name $(/bin/busybox cat /tmp/errors)
    say stats $name $(/bin/busybox cat {stats})
}}
{runs}
say done
/bin/busybox poweroff -f
"""


class EmulationError(Exception):
    """Something to tell the user in one line."""


@dataclass(frozen=True)
class Turn:
    """A program to run: its file's name, its arguments, and variables as NAME=VALUE."""

    name: str
    command: tuple[str, ...]
    environment: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """TLB shootdown interrupts received by all CPUs in a run of a program, and what it left, lines joined."""

    name: str
    interrupts: int
    printed: str
    errors: str
    stats: str


def output_of(*command: str, cwd: Path | None = None) -> str:
    """What a command prints; its complaint, if it fails, becomes ours."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        raise EmulationError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def unpack(package: str, cache: Path) -> Path:
    """A Debian package's files, downloaded once."""
    folder = cache / package
    if not folder.is_dir():
        downloads = cache / "downloads"
        shutil.rmtree(downloads, ignore_errors=True)
        downloads.mkdir(parents=True)
        # apt's download user may have no access to this folder.
        output_of("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package, cwd=downloads)
        partial = cache / f".{package}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        (deb,) = downloads.glob("*.deb")
        output_of("dpkg", "-x", str(deb), str(partial))
        (partial / "version").write_text(output_of("dpkg-deb", "--field", str(deb), "Version"))
        partial.rename(folder)
        shutil.rmtree(downloads)
    return folder


def find_kernel(cache: Path) -> tuple[Path, str]:
    """The kernel's image, and its package with the version."""
    unpacked = sorted(cache.glob("linux-image-*/boot/vmlinuz-*"))
    if not unpacked:
        depends = output_of("apt-cache", "depends", KERNEL_PACKAGE)
        names = re.findall(r"Depends: (linux-image-\S+)", depends)
        if not names:
            raise EmulationError(f"apt knows no {KERNEL_PACKAGE}; run apt-get update first")
        unpacked = sorted((unpack(names[0], cache) / "boot").glob("vmlinuz-*"))
    package = unpacked[-1].parents[1]
    return unpacked[-1], f"{package.name} {(package / 'version').read_text().strip()}"


def shared_objects(binary: Path) -> set[Path]:
    """The loader and libraries that a program or a library needs, at the paths where it looks for them."""
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", output_of("ldd", str(binary)))}


@dataclass
class Initramfs:
    """A cpio archive (newc), which the kernel unpacks as the root; writing it here needs no other program."""

    data: bytearray

    def add(self, name: str, mode: int, content: bytes) -> None:
        """Appends one entry: header, name and content, each padded to four bytes."""
        path = name.encode() + b"\0"
        fields = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0]
        self.data += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        self.data += bytes(-len(self.data) % 4) + content
        self.data += bytes(-len(self.data) % 4)

    def add_file(self, name: str, content: bytes) -> None:
        """Appends an executable file, after the folders that it lies in."""
        for parent in list(reversed(Path(name).parents))[1:]:
            self.add(str(parent), stat.S_IFDIR | 0o755, b"")
        self.add(name, stat.S_IFREG | 0o755, content)

    def finish(self) -> bytes:
        """The whole archive, with the entry that ends it."""
        self.add("TRAILER!!!", 0, b"")
        return bytes(self.data)


def build_initramfs(init: str, busybox: Path, binaries: Iterable[Path]) -> bytes:
    """Everything the guest has: /init, busybox, and what is measured with the libraries it needs."""
    initramfs = Initramfs(bytearray())
    files = {"init": init.encode(), "bin/busybox": busybox.read_bytes()}
    for binary in binaries:
        files[f"{BINARIES.lstrip('/')}/{binary.name}"] = binary.read_bytes()
        files |= {str(needed).lstrip("/"): needed.read_bytes() for needed in shared_objects(binary)}
    for name, content in files.items():
        initramfs.add_file(name, content)
    return initramfs.finish()


def boot(command: list[str], log: Path, timeout: float) -> str:
    """Runs the machine to its end, and returns what it printed on the console."""
    with log.open("wb") as console:
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise EmulationError(f"the machine did not finish in {timeout:.0f} s: see {log}") from None
    text = log.read_text(errors="replace").replace("\r", "")
    if "\n@@ done" not in text:
        raise EmulationError(f"the machine stopped before the end: see {log}")
    return text


def said(console: str, what: str) -> list[str]:
    """The rest of each line that the guest printed for us about one thing."""
    return re.findall(rf"^@@ {what} (.*)$", console, re.MULTILINE)


def parse(console: str, log: Path) -> list[Run]:
    """All runs, in order."""
    kinds = ("before", "status", "after", "printed", "errors", "stats")
    texts = [[line.partition(" ") for line in said(console, kind)] for kind in kinds]
    runs = []
    for lines in zip(*texts, strict=True):
        names, _, (before, status, after, printed, errors, stats) = zip(*lines, strict=True)
        if status != "0":
            raise EmulationError(f"a run of {names[0]} ended with status {status}: {errors}; see {log}")
        first, last = (sum(int(word) for word in row.split() if word.isdigit()) for row in (before, after))
        runs.append(Run(names[0], last - first, printed, errors, stats))
    return runs


def measure(
    turns: Sequence[Turn], rounds: int, binaries: Sequence[Path], cache: Path, timeout: float
) -> tuple[dict[str, Any], list[Run]]:
    """Boots the machine and runs all the turns, rounds times. Returns what machine it was, and the runs."""
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None:
        raise EmulationError(
            "qemu-system-x86_64 is not installed: it is in the Debian package qemu-system-x86"
        )
    if platform.machine() != "x86_64":
        raise EmulationError("the guest takes this machine's C library, so it must be an x86-64 one")
    for built in binaries:
        if not built.is_file():
            raise EmulationError(f"{built} is not built: run make")
    cache.mkdir(parents=True, exist_ok=True)
    kernel, kernel_package = find_kernel(cache)
    busybox = unpack("busybox-static", cache)

    lines = [
        shlex.join(["run", turn.name, *turn.environment, f"{BINARIES}/{turn.command[0]}", *turn.command[1:]])
        for turn in turns
    ]
    initrd = cache / "initramfs.cpio"
    init = INIT.format(stats=STATS, runs="\n".join(lines * rounds))
    initrd.write_bytes(build_initramfs(init, busybox / "bin/busybox", binaries))

    # Emulated CPUs' TSCs disagree, which the kernel would otherwise find out by long checks.
    cmdline = "console=ttyS0 quiet panic=-1 mitigations=off tsc=unstable"
    command = [qemu, "-accel", "tcg,thread=multi", "-cpu", "max", "-m", "4G"]
    command += ["-smp", f"{CPUS},sockets={SOCKETS},cores={CPUS // SOCKETS}"]
    command += ["-nographic", "-nic", "none", "-no-reboot"]
    command += ["-kernel", str(kernel), "-initrd", str(initrd), "-append", cmdline]
    log = cache / "console.log"
    console = boot(command, log, timeout)

    cpus, _, sockets = said(console, "cpus")[0].split()
    if (int(cpus), int(sockets)) != (CPUS, SOCKETS):
        raise EmulationError(f"the machine came up with {cpus} CPUs in {sockets} sockets")
    named = {str(kernel): kernel.name, str(initrd): initrd.name, qemu: "qemu-system-x86_64"}
    machine = {
        "machine": {"cpus": CPUS, "sockets": SOCKETS, "emulated": True},
        "kernel": said(console, "kernel")[0],
        "kernel_package": kernel_package,
        "qemu": output_of(qemu, "--version").splitlines()[0],
        "glibc": platform.libc_ver()[1],
        "qemu_command": [named.get(word, word) for word in command],
    }
    return machine, parse(console, log)
