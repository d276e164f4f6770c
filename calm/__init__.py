"""calm: measures what a memory allocator costs a program in time, memory and TLB shootdowns."""

__version__ = "0.1.0"
