"""The readers of heaps: calmalloc's own, and those of plug-ins.

A plug-in is an entry point of the group `calm.heap_readers`: a sequence of readers. The wheel and the other
packages come with one, calm_heap_readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points

from calm.commands.explain import calmalloc
from calm.commands.explain.model import UNKNOWN, Heap, Process, Reader
from calm.core import proc_maps
from calm.core.allocators import OWN

_GROUP = "calm.heap_readers"
_MISSING = "calm's plug-in calm_heap_readers, which reads the heaps of other allocators, is not installed."


@cache
def readers() -> Sequence[Reader]:
    """All that are installed, in the order in which their allocators' libraries would answer malloc."""
    plugins = {each.value: each for each in entry_points(group=_GROUP)}
    found = [reader for plugin in plugins.values() for reader in plugin.load()]
    return (calmalloc.heaps, *(found or [_by_mappings]))


def _by_mappings(process: Process) -> Sequence[Heap]:
    """Without a plug-in: which allocator the process has, whose memory is then that of no other part."""
    paths = [each.path for each in process.mappings if each.path.startswith("/")]
    name = proc_maps.allocator(paths)
    return () if name is None or name in OWN else (Heap(name, "", UNKNOWN, UNKNOWN, notes=(_MISSING,)),)
