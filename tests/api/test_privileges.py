"""The allocator's thread gives up privileges with the program, and makes no such call fail."""

from __future__ import annotations

import itertools
import os

import pytest
from api_helpers import GLIBC, LINKED, OFFLOAD, OURS, PRELOAD, Programs

SHARED = [PRELOAD, LINKED]
EVERYWHERE = [(GLIBC, ""), *itertools.product(OURS, ["", "test_cache=locked", OFFLOAD])]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has what is given up")


@as_root
@pytest.mark.parametrize("case", ["drop-user", "drop-user-early", "drop-user-unseen", "new-namespace"])
@pytest.mark.parametrize("options", ["", OFFLOAD])
@pytest.mark.parametrize("way", [GLIBC, *SHARED])
def test_users_and_namespaces(programs: Programs, way: str, options: str, case: str) -> None:
    programs.run(way, "privileges", case, options=options)


@pytest.mark.parametrize("options", ["", OFFLOAD])
@pytest.mark.parametrize("way", [GLIBC, *OURS])
def test_no_new_privileges(programs: Programs, way: str, options: str) -> None:
    programs.run(way, "privileges", "no-new-privileges", options=options)


@pytest.mark.parametrize("case", ["alone-again", "unprivileged", "scheduling", "contained", "exit-as-thread"])
@pytest.mark.parametrize("way", OURS)
def test_own_thread(programs: Programs, way: str, case: str) -> None:
    programs.run(way, "privileges", case)


@pytest.mark.parametrize(("way", "options"), EVERYWHERE)
def test_in_a_signal_handler(programs: Programs, way: str, options: str) -> None:
    """setuid works there, whatever the signal interrupted."""
    programs.run(way, "privileges", "in-handler", options=options)


@pytest.mark.parametrize("how", ["prctl", "seccomp"])
@pytest.mark.parametrize(("way", "options"), EVERYWHERE)
def test_filter_that_kills(programs: Programs, way: str, options: str, how: str) -> None:
    programs.run(way, "privileges", "filtered", how, options=options)


@pytest.mark.parametrize("how", ["prctl", "seccomp"])
@pytest.mark.parametrize(("way", "options"), EVERYWHERE)
def test_filter_alone(programs: Programs, way: str, options: str, how: str) -> None:
    programs.run(way, "privileges", "filtered-alone", how, options=options)


@pytest.mark.parametrize("options", ["", "test_cache=locked", OFFLOAD])
@pytest.mark.parametrize("way", OURS)
def test_filter_at_once(programs: Programs, way: str, options: str) -> None:
    """Before the allocator has a thread. (glibc then queries the CPUs, and is killed.)"""
    programs.run(way, "privileges", "filtered", "at-once", options=options)
