"""The parts of `bench/figures`: what is measured, each way of measuring, and the tables."""
