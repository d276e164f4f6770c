"""The modules of `bench/figures`: the figures, the ways of measuring, and the tables."""
