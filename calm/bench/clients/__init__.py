"""The clients that drive the suite's servers: standard library only, run as modules of their own."""
