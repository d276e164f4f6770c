"""What a call of malloc or free executes if a CPU cache has what it needs, read from the library's code.

The compiler knows which branches are likely: this path goes straight on from the entry to the first return.
Reading the code works where running it step by step does not: a restartable sequence that a debugger
interrupts starts over, and valgrind does not support them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import capstone  # type: ignore[import-untyped]
from elftools.elf.constants import P_FLAGS

from calm.core import elf
from calm.core.errors import CalmError

_LONGEST = 200
_MAX_BYTES = 15  # of an instruction


@dataclass(frozen=True)
class Kinds:
    """Numbers of instructions; one that both loads and stores counts as each."""

    instructions: int
    loads: int
    stores: int
    branches: int


def hit_path(library: Path, function: str) -> list[capstone.CsInsn]:
    """The instructions up to the first return, that included: no conditional jump but to avoid a call.

    Raises CalmError if the library has no such function, or calls are on all its paths.
    """
    with elf.opened(library) as file:
        symbols = file.get_section_by_name(".dynsym").get_symbol_by_name(function) or []
        address = symbols[0].entry.st_value if symbols else 0
        code, base = next(
            (part.data(), part.header.p_vaddr)
            for part in file.iter_segments("PT_LOAD")
            if part.header.p_flags & P_FLAGS.PF_X
        )
        reader = _reader(file.header.e_machine)
    if not address:
        raise CalmError(f"{library} exports no function {function}")
    path: list[capstone.CsInsn] = []
    taken: list[tuple[int, int]] = []  # where else to go on from a conditional jump, and the length until it
    while len(path) < _LONGEST:
        at = address - base
        instruction = next(reader.disasm(code[at : at + _MAX_BYTES], address, 1))
        path.append(instruction)
        if instruction.group(capstone.CS_GRP_RET):
            return path
        address += instruction.size
        target = _target(instruction)
        if instruction.mnemonic in ("jmp", "b") and target is not None:
            address = target
        elif target is not None and not instruction.group(capstone.CS_GRP_CALL):
            taken.append((target, len(path)))
        elif instruction.group(capstone.CS_GRP_CALL) or instruction.group(capstone.CS_GRP_JUMP):
            if not taken:
                break
            address, length = taken.pop()
            del path[length:]
    raise CalmError(f"{function} of {library} has no path to a return that is free of calls")


def is_straight(path: Sequence[capstone.CsInsn]) -> bool:
    """Whether no conditional jump is taken."""
    return all(
        one.address + one.size == other.address or one.mnemonic in ("jmp", "b")
        for one, other in pairwise(path)
    )


def _target(instruction: capstone.CsInsn) -> int | None:
    """Of a direct jump or call."""
    if not instruction.group(capstone.CS_GRP_JUMP) and not instruction.group(capstone.CS_GRP_CALL):
        return None
    found = re.search(r"(?:^|[ #])0x([0-9a-f]+)$", instruction.op_str)
    return int(found[1], 16) if found and "*" not in instruction.op_str else None


def _reader(machine: str) -> capstone.Cs:
    if machine == "EM_X86_64":
        reader = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        reader.syntax = capstone.CS_OPT_SYNTAX_ATT
    else:
        reader = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
    reader.detail = True
    return reader


def _accesses(instruction: capstone.CsInsn, kind: int) -> bool:
    if instruction.mnemonic.startswith(("lea", "nop")):
        return False
    memory = (each for each in instruction.operands if each.type == capstone.CS_OP_MEM)
    return any(each.access & kind for each in memory)


def kinds(path: Sequence[capstone.CsInsn]) -> Kinds:
    """How many of each kind; the return, and what push and pop do with the stack, count as neither."""
    return Kinds(
        len(path),
        sum(_accesses(each, capstone.CS_AC_READ) for each in path),
        sum(_accesses(each, capstone.CS_AC_WRITE) for each in path),
        sum(each.group(capstone.CS_GRP_JUMP) for each in path),
    )


def text(path: Sequence[capstone.CsInsn]) -> str:
    """As assembly (of x86-64: AT&T syntax), a line each."""
    return "\n".join(f"{each.mnemonic} {each.op_str}".rstrip() for each in path)


def machine_code(path: Sequence[capstone.CsInsn]) -> str:
    """As assembly that llvm-mca reads: without the return, and with no jump that is taken."""
    lines = text([each for each in path if not each.group(capstone.CS_GRP_RET)]).splitlines()
    jumps = re.compile(r"^(j\w+|b\.\w+|cbn?z \w+,|tbn?z \w+, #\w+,)(\s+)#?0x[0-9a-f]+$")
    return "\n".join(jumps.sub(r"\1\2.", each) for each in lines if not re.match(r"(jmp|b) ", each))
