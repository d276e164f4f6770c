"""Interleaved rounds: every side takes its turn in each round, so that drift meets all of them alike.

Rows are what is run, as the programs of a suite; sides are what each is run under, as allocators. Round 0
warms up files, memory and CPUs, and its runs are dropped.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from calm.core.errors import CalmError
from calm.core.progress import RoundsBar
from calm.core.statistics import SEED

Run = TypeVar("Run")
_Item = TypeVar("_Item")


class RunFailedError(CalmError):
    """A run has failed. Its side takes no more turns in this row; the others go on."""


class StoppedError(Exception):
    """A signal to calm ended a run. The round's runs of this row are dropped, and all rounds end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


@dataclass
class Side(Generic[Run]):
    """One side of a row: its runs, with the number of the round of each."""

    label: str
    runs: list[tuple[int, Run]] = field(default_factory=list)
    failure: str | None = None
    failed_round: int | None = None


@dataclass
class Row(Generic[Run]):
    """What all sides run."""

    name: str
    sides: list[Side[Run]]


def _zigzag(n: int) -> list[int]:
    """0, 1, n-1, 2, n-2, …: the differences of neighbours are all different."""
    return [(index + 1) // 2 if index % 2 else -(index // 2) % n for index in range(n)]


def williams_square(n: int) -> list[list[int]]:
    """Orders in which each of n takes each place equally often, and follows each other one equally often.

    n orders for an even n, 2 n for an odd one (Williams 1949). What runs second finds the caches, the free
    memory and the CPU's clock as the first left them. With a fixed order, or one that only rotates, that
    would always fall on the same one.
    """
    rows = [[(place + shift) % n for place in _zigzag(n)] for shift in range(n)]
    return rows if n % 2 == 0 else rows + [row[::-1] for row in rows]


def orders(items: Sequence[_Item], rounds: int, seed: int, case: str) -> list[list[_Item]]:
    """An order for each round: rows of the square, drawn without putting back as long as there are any."""
    draw = random.Random(f"{seed} {case}")
    rows: list[list[int]] = []
    drawn: list[list[_Item]] = []
    for _ in range(rounds):
        if not rows:
            rows = williams_square(len(items))
            draw.shuffle(rows)
        drawn.append([items[index] for index in rows.pop()])
    return drawn


def run(
    rows: Sequence[Row[Run]],
    rounds: int,
    once: Callable[[Row[Run], Side[Run], int], Run],
    bar: RoundsBar | None = None,
    *,
    after: Callable[[int], None] = lambda number: None,
    rows_of: Callable[[int], Sequence[Row[Run]]] | None = None,
    warm_up: bool = True,
) -> int | None:
    """Runs the warm-up and all rounds; returns the signal that stopped them, if one did.

    once runs a side in a round; it raises RunFailedError or StoppedError. after is called at the end of each
    round that counts. rows_of gives the rows of a round in another order, or some of them; without any, the
    rounds end. Other exceptions of once pass.
    """
    order = {row.name: orders(row.sides, rounds + 1, SEED, row.name) for row in rows}
    numbers = range(0 if warm_up else 1, rounds + 1)
    if bar:
        bar.begin([(row.name, side.label) for row in rows for side in row.sides], len(numbers))
    try:
        for number in numbers:
            for row in (current := rows_of(number) if rows_of else rows):
                _run_row(row, order[row.name][number], number, once, bar)
            if not current:
                break
            if number > 0:
                after(number)
            if all(side.failure for row in rows for side in row.sides):
                break
    except StoppedError as stopped:
        return stopped.signal
    except KeyboardInterrupt:
        return signal.SIGINT
    return None


def _run_row(
    row: Row[Run],
    order: Sequence[Side[Run]],
    number: int,
    once: Callable[[Row[Run], Side[Run], int], Run],
    bar: RoundsBar | None,
) -> None:
    finished = []
    for side in order:
        if side.failure is not None:
            continue
        if bar:
            bar.turn(number, row.name, side.label)
        begin = time.monotonic()
        try:
            finished.append((side, once(row, side, number)))
        except RunFailedError as error:
            side.failure, side.failed_round = str(error), number
            if bar:
                bar.failed(row.name, side.label, str(error))
        if bar:
            bar.done(row.name, side.label, time.monotonic() - begin)
    if number > 0:
        for side, found in finished:
            side.runs.append((number, found))
    if bar:
        bar.row_done()
