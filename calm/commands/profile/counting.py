"""Counts shootdowns by cause, exactly: bpftrace counts the kernel's stacks within the kernel.

Samples of a program that begins some thousand shootdowns are some tens in the worst case; a count by stack
costs less than they do. It needs bpftrace, root, and process ids that are those of the kernel (not those of a
container's own). Where it fails, shares rest on samples alone.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence

from calm.commands.profile.causes import classify
from calm.core import processes
from calm.core.events import EVENTS

_START_S, _STOP_S = 15.0, 15.0
# A process is known by its first thread, so new threads are passed over. What BEGIN prints is read once all
# probes are attached; "attached_probes" comes before.
_PROGRAM = """
BEGIN {{ {roots} printf("{attached}"); }}
tracepoint:task:task_newtask /@ours[pid] && !(args->clone_flags & 0x10000)/ {{ @ours[args->pid] = 1; }}
tracepoint:sched:sched_process_exit /@ours[pid] && pid == tid/ {{ delete(@ours[pid]); }}
tracepoint:{group}:{name} /args->{condition} && @ours[pid]/ {{ @found[kstack(perf, 64)] = count(); }}
END {{ clear(@ours); }}
"""
_ATTACHED = "attached here"
_FUNCTION = re.compile(r"^\s*[0-9a-f]+ ([^\s+]+)", re.MULTILINE)


def parse(text: str) -> dict[str, int]:
    """The shootdowns of each cause, in what bpftrace prints as JSON."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.startswith('{"type": "map"'):
            continue
        stacks = json.loads(line)["data"].get("@found", {})
        for stack, count in stacks.items():
            found[classify(_FUNCTION.findall(stack))] += count
    return dict(found)


class ShootdownCounts:
    """One bpftrace process, from start to stop."""

    def __init__(self) -> None:
        self.why = ""
        """The reason for there being no counts."""
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - kept until it is read

    def start(self, roots: Sequence[int]) -> None:
        """Returns once it counts what these processes and their descendants do, or cannot."""
        bpftrace = shutil.which("bpftrace")
        if bpftrace is None or os.geteuid() != 0:
            self.why = "there is no bpftrace in PATH" if bpftrace is None else "bpftrace needs root"
            return
        event = EVENTS["shootdowns"]
        program = _PROGRAM.format(
            roots=" ".join(f"@ours[{root}] = 1;" for root in roots),
            group=event.group,
            name=event.name,
            condition=event.condition,
            attached=_ATTACHED,
        )
        try:
            self._process = subprocess.Popen(
                [bpftrace, "-f", "json", "-e", program],
                start_new_session=True,
                preexec_fn=lambda: processes.end_with_parent(signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self.why = f"bpftrace: {error.strerror}"
            return
        assert self._process.stdout is not None
        output, deadline, begun = self._process.stdout.fileno(), time.monotonic() + _START_S, b""
        while _ATTACHED.encode() not in begun:
            left = deadline - time.monotonic()
            data = os.read(output, 4096) if left > 0 and select.select([output], [], [], left)[0] else b""
            if not data:
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").split("\n")
                self.close()
                self.why = f"bpftrace: {lines[0][:200] or 'it did not begin in time'}"
                return
            begun += data

    def stop(self) -> dict[str, int]:
        """The shootdowns of each cause since the start; empty where `why` says so, and at a second call."""
        if self._process is None:
            return {}
        self._process.send_signal(signal.SIGINT)
        try:
            text, _ = self._process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self.why, text = "bpftrace did not end", b""
        self.close()
        return parse(text.decode(errors="replace"))

    def close(self) -> None:
        """Ends it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        self._errors.close()
