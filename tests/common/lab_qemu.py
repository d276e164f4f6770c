"""Stands for QEMU: reads the archive that it is given, and says what a guest with it would say.

What goes wrong is told by FAKE_QEMU, a JSON file: {"by label": {...}, ...}; see `main`.
"""

import base64
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

SYSCALLS = ("madvise", "process_madvise", "munmap", "mprotect", "brk", "mremap", "membarrier")
VERSION = "QEMU emulator version 9.9.9 (fake)"


def archive(path: Path) -> dict[str, tuple[int, bytes]]:
    """The modes and contents of a cpio archive."""
    data, at, files = path.read_bytes(), 0, {}
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        size, length = fields[6], fields[11]
        name = data[at + 110 : at + 110 + length - 1].decode()
        begin = (at + 110 + length + 3) & ~3
        at = (begin + size + 3) & ~3
        if name == "TRAILER!!!":
            assert at == len(data)
            return files
        assert name not in files
        parent = name.rpartition("/")[0]
        assert not parent or parent in files, f"{name} comes before its folder"
        files[name] = (fields[1], data[begin : begin + size])


def report(interrupts: int | None, code: int | None = 0, number: int | None = None) -> str:
    """The probe's. Without interrupts: of a kernel that counts none."""
    value = {"value": (interrupts or 0) // 2, "reason": None, "scaled": False, "user_only": False}
    names = ("interrupts", "interrupts_received", "threads_started", *SYSCALLS)
    counters = {name: {"value": None, "reason": "not asked for"} for name in names}
    return json.dumps(
        {
            "error": None,
            "end": {"code": code, "signal": number},
            "wall_ns": 5_000_000_000,
            **{"user_us": 1, "system_us": 1, "minor_faults": 77, "major_faults": 0},
            "memory": {
                **{"peak_kib": 2048, "average_kib": None, "largest_process_kib": 2048, "floor_kib": 500},
                **{"samples": 1, "interval_ns": 100_000_000, "processes": 1},
            },
            "counters": {"shootdowns": value, **counters},
            "interrupts_system_wide": interrupts,
            "own": {
                **{"cpu_ns": 1, "counted_call_ns": None, "other_call_ns": None, "flush_ns": None},
                **{"task_ns": None, "system_wide_tasks_started": 0},
            },
        }
    )


def main() -> int:
    if sys.argv[1:] == ["--version"]:
        print(VERSION)
        return 0
    options = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    plan: dict[str, Any] = json.loads(Path(os.environ["FAKE_QEMU"]).read_text())
    with Path(plan["log"]).open("a+") as log:
        log.seek(0)
        if log.read():
            plan |= plan.get("then", {})
        log.write(json.dumps({"arguments": sys.argv[1:], "pid": os.getpid()}) + "\n")
    console = Path(next(word[5:] for word in sys.argv if word.startswith("file:")))
    if options["-accel"] == "kvm" and plan.get("kvm") != "works":
        print(f"{sys.argv[0]}: error: failed to set MSR 0x10a\nkvm.c: Assertion failed", file=sys.stderr)
        return 134
    if words := plan.get("complains"):
        print(f"qemu-system-x86_64: warning: never mind\nqemu-system-x86_64: {words}", file=sys.stderr)
        return 1
    if words := plan.get("boots into"):
        console.write_text(words)
        return 0
    time.sleep(plan.get("boots in", 0))
    files = archive(Path(options["-initrd"]))
    if keep := plan.get("keep"):
        Path(keep).write_bytes(Path(options["-initrd"]).read_bytes())
    cpus, sockets = re.match(r"(\d+),sockets=(\d+)", options["-smp"]).groups()  # type: ignore[union-attr]
    nodes = max(1, sys.argv.count("-numa"))
    say = f"@@ ready {plan.get('cpus', cpus)} {sockets} {nodes} {plan.get('page_kib', 4)} 6.1.0-fake\r\n"
    # In pieces, as a serial port would.
    for piece in (say[:9], say[9:]):
        print(piece, end="", flush=True)
    failed: set[str] = set()
    for line in files["init"][1].decode().splitlines():
        if not line.startswith("run l"):
            continue
        words = shlex.split(line)
        label, number = words[1], words[2]
        preload = next(
            (Path(word.partition("=")[2]).name for word in words if word.startswith("LD_PRELOAD=")), ""
        )
        act = plan["acts"].get(preload, {})
        if label in failed:
            continue
        print(f"@@ begin {number}", flush=True)
        if "console" in act:
            console.write_text(act["console"])
        while "waits_for" in act and not Path(act["waits_for"], number).exists():
            time.sleep(0.01)
        if act.get("hangs"):
            Path(plan["log"]).with_name("hangs").touch()
            time.sleep(10_000)
        time.sleep(act.get("seconds", 0))
        if act.get("dies"):
            return 0
        code, killed = act.get("code", 0), act.get("signal")
        counted = act.get("interrupts", [0])
        told = report(counted[int(number) % len(counted)], None if killed else code, killed)
        texts = (base64.b64encode(act.get(name, "").encode()).decode() for name in ("printed", "errors"))
        print("@@ end", number, 0, *texts, told, flush=True)
        if act.get("dies_after"):
            return 0
        if code or killed:
            failed.add(label)
    print("@@ done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
