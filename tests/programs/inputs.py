"""The programs that the tests run, and words for inputs: the benchmark suite's own."""

from calm.bench.inputs import PROGRAMS, WORDS, Program

__all__ = ["PROGRAMS", "WORDS", "Program"]
