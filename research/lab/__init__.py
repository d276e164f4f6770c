"""An emulated machine of many CPUs with nothing in it but a program: what allocators do to its TLBs."""
