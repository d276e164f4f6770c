"""In which order allocators take their turns in a round."""

import random
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


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


def orders(items: Sequence[_T], rounds: int, seed: int, case: str) -> list[list[_T]]:
    """An order for each round: rows of the square, drawn without putting back as long as there are any."""
    draw = random.Random(f"{seed} {case}")
    rows: list[list[int]] = []
    drawn: list[list[_T]] = []
    for _ in range(rounds):
        if not rows:
            rows = williams_square(len(items))
            draw.shuffle(rows)
        drawn.append([items[index] for index in rows.pop()])
    return drawn
