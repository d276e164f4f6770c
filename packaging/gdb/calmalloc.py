"""gdb's commands for calmalloc: `calm block EXPRESSION` and `calm heap`. gdb loads this file by `source`.

Both have the stopped process call a function of the library (calm_debug_block and calm_debug_heap of
calmalloc.h), which takes no lock. Meanwhile all other threads stay stopped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import gdb

WORD = 8
# Of struct rseq (linux/rseq.h): the descriptor of the restartable sequence that the thread is in.
RSEQ_CS = 8
# While the process calls the function. C is the language of the casts below.
SETTINGS = {"language": "c", "scheduler-locking": "on", "unwindonsignal": "on"}


@contextmanager
def settings() -> Iterator[None]:
    """Sets SETTINGS, and restores what they were."""
    before = {name: gdb.parameter(name) for name in SETTINGS}
    try:
        for name, value in SETTINGS.items():
            gdb.execute(f"set {name} {value}", to_string=True)
        yield
    finally:
        for name, value in before.items():
            value = {True: "on", False: "off"}.get(value, value)
            gdb.execute(f"set {name} {value}", to_string=True)


def thread_pointer() -> int | None:
    """The selected thread's, by which locks name their owners."""
    for register in ("fs_base", "tpidr"):
        try:
            return int(gdb.parse_and_eval(f"${register}"))
        except (gdb.error, TypeError, ValueError):
            continue
    return None


@contextmanager
def sequence_kept() -> Iterator[None]:
    """Keeps the restartable sequence that the selected thread stopped in.

    The kernel takes the call for the sequence's end, and drops its descriptor. Without that, the thread would
    continue in the middle of the sequence, perhaps on another CPU, instead of starting it over.
    """
    inferior, pointer = gdb.selected_inferior(), thread_pointer()
    try:
        offset = int(gdb.parse_and_eval("*(long *) &__rseq_offset"))
        assert pointer is not None
        place = pointer + offset + RSEQ_CS
        before = inferior.read_memory(place, WORD).tobytes()
    except (gdb.error, AssertionError):
        yield  # no sequences
        return
    try:
        yield
    finally:
        inferior.write_memory(place, before)


def address_of(expression: str) -> int:
    """What a pointer, an array or a number is, in the program's language."""
    try:
        value = gdb.parse_and_eval(expression)
        if value.type.strip_typedefs().code in (gdb.TYPE_CODE_REF, gdb.TYPE_CODE_RVALUE_REF):
            value = value.referenced_value()
        if value.type.strip_typedefs().code in (gdb.TYPE_CODE_ARRAY, gdb.TYPE_CODE_FUNC):
            value = value.address
        return int(value) % (1 << 8 * WORD)
    except gdb.error as error:
        raise gdb.GdbError(f"calm block: {error}") from None


def call(function: str, argument: int = 0) -> str:
    """What a function of the library says."""
    inferior = gdb.selected_inferior()
    connection = getattr(inferior, "connection", None)  # since gdb 11
    if inferior.pid == 0 or not inferior.threads():
        raise gdb.GdbError("calm: there is no process: start the program, or attach to one")
    if connection is not None and connection.type == "core":
        raise gdb.GdbError("calm: a core file cannot run the library's functions: use the process itself")
    try:
        with settings(), sequence_kept():
            # A stub for a call alone leads nowhere.
            if "@plt>" not in str(gdb.parse_and_eval(f"&{function}")):
                called = f"((const char *(*)(unsigned long)) {function})({argument}UL)"
                return gdb.parse_and_eval(called).string()
    except gdb.error as error:
        if f'"{function}"' not in str(error):
            raise gdb.GdbError(f"calm: {error}") from None
    raise gdb.GdbError(
        f"calm: this process has no {function}: it runs without calmalloc, or it is a static program"
        f" that was linked without -Wl,-u,{function}"
    )


def with_threads(text: str) -> str:
    """Names the threads that hold locks as gdb does."""
    selected = gdb.selected_thread()
    numbers = {}
    for thread in gdb.selected_inferior().threads():
        thread.switch()
        if (pointer := thread_pointer()) is not None:
            numbers[pointer] = f"thread {thread.num} (LWP {thread.ptid[1]})"
    selected.switch()
    return re.sub(r"thread (0x[0-9a-f]+)", lambda found: numbers.get(int(found[1], 16), found[0]), text)


class Calm(gdb.Command):
    """What calmalloc knows: of a pointer, and of its heap."""

    def __init__(self) -> None:
        super().__init__("calm", gdb.COMMAND_DATA, prefix=True)


class Block(gdb.Command):
    """What a pointer is to calmalloc: calm block EXPRESSION.

    A block in use or free, and where it is cached; a free page; or none of calmalloc's.
    """

    def __init__(self) -> None:
        super().__init__("calm block", gdb.COMMAND_DATA, gdb.COMPLETE_EXPRESSION)

    def invoke(self, argument: str, from_tty: bool) -> None:
        """Prints one line."""
        if not argument:
            raise gdb.GdbError("calm block EXPRESSION: a pointer or an address")
        print(call("calm_debug_block", address_of(argument)))


class Heap(gdb.Command):
    """What calmalloc's heap holds, and which threads hold its locks."""

    def __init__(self) -> None:
        super().__init__("calm heap", gdb.COMMAND_DATA)

    def invoke(self, argument: str, from_tty: bool) -> None:
        """Prints the summary."""
        frame = gdb.selected_frame() if gdb.selected_thread() else None
        print(with_threads(call("calm_debug_heap")), end="")
        if frame is not None and frame.is_valid():
            frame.select()


Calm()
Block()
Heap()
