"""Real programs and servers of the suite."""

from calm.bench.cases import Case

CASES: tuple[Case, ...] = ()
