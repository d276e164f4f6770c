"""The readers of allocators, in the order in which their libraries would answer malloc."""

from __future__ import annotations

from calm.commands.explain import calmalloc, glibc, jemalloc, mimalloc
from calm.commands.explain.model import Reader

READERS: tuple[Reader, ...] = (calmalloc.read, jemalloc.read, mimalloc.read, glibc.read)
