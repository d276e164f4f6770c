"""Finding and ending what a program leaves behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

from waiting import TIMEOUT_S

from calm.core import proc, processes

# Fifteen bytes are what the kernel keeps of a name: this one is cut within its last character.
RENAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, "ended here: ) é".encode()[:15], 0, 0, 0)
print("ready", flush=True)
time.sleep(60)
"""


def command_line(process: int) -> bytes:
    """Nothing of one that has ended, whether it is waited for or not."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_process_with_an_odd_name_is_seen_and_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", RENAMED], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert b"\xc3\n" in Path(f"/proc/{child.pid}/comm").read_bytes()
        assert child.pid in proc.descendants(os.getpid())
        assert processes.kill_descendants(child.pid) == []
        child.kill()


def test_the_nearest_come_first_and_all_are_ended() -> None:
    script = "sh -c 'sleep 60 & echo $!; wait' & wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as top:
        assert top.stdout is not None
        leaf = int(top.stdout.readline())
        below = proc.descendants(top.pid)
        assert len(below) == 2
        assert below[-1] == leaf
        assert processes.kill_descendants(top.pid) == below
        top.kill()
    # The signal is sent, and the process ends when it next gets to run.
    deadline = time.monotonic() + TIMEOUT_S
    while (left := command_line(leaf)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
