"""A plug-in of `calm explain`: reads the heaps of other allocators from their private structures."""

from __future__ import annotations

from calm.commands.explain.model import Reader
from calm_heap_readers import glibc, jemalloc, mimalloc, pymalloc

# In the order in which their libraries would answer malloc.
READERS: tuple[Reader, ...] = (jemalloc.heaps, mimalloc.heaps, glibc.heaps, pymalloc.heaps)
