"""The tests' programs and inputs: those of the benchmark suite, with less work."""

from dataclasses import replace

from research.bench import inputs
from research.bench.inputs import WORDS, Program

PYTHON = inputs.PYTHON.replace("range(20000)", "range(4000)").replace("range(200000)", "range(40000)")
SMALLER = {
    "orders.xml": lambda: inputs.xml_orders(20_000),
    "pages.ps": lambda: inputs.postscript(2),
    "rows.sql": lambda: [inputs.SQL.format(rows=250_000)],
    "big.c": lambda: inputs.c_source(40),
    "structures.py": lambda: [PYTHON],
}
assert PYTHON.count("range(4") == 3

PROGRAMS = tuple(
    replace(program, inputs={name: SMALLER.get(name, pieces) for name, pieces in program.inputs.items()})
    for program in inputs.PROGRAMS
)

__all__ = ["PROGRAMS", "WORDS", "Program"]
