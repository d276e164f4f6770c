"""Virtual machines, which manage their own heaps and use malloc for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from preload import Runner, program

SOURCES = Path(__file__).parent


def test_java_starts(preloaded: Runner, tmp_path: Path) -> None:
    preloaded.run([program("java", "default-jre-headless"), "-Xmx256m", "-version"], tmp_path)
    assert "Runtime Environment" in preloaded.log.read_text()
    preloaded.assert_active()


def test_java(plain: Runner, preloaded: Runner, tmp_path: Path) -> None:
    java = [
        program("java", "default-jre-headless"),
        "-Xmx256m",
        "-XX:+UseParallelGC",
        "-XX:ParallelGCThreads=2",
    ]
    if "jdk.compiler" not in plain.run([java[0], "--list-modules"], tmp_path):
        pytest.skip("there is no Java compiler: it is in the Debian package default-jdk-headless")
    command = [*java, str(SOURCES / "Churn.java")]
    expected = plain.run(command, tmp_path)
    assert expected.count("\n") == 3
    assert preloaded.run(command, tmp_path) == expected
    preloaded.assert_active()


def test_node(plain: Runner, preloaded: Runner, tmp_path: Path) -> None:
    command = [program("node", "nodejs"), str(SOURCES / "churn.js")]
    expected = plain.run(command, tmp_path)
    assert expected.count("\n") == 3
    assert preloaded.run(command, tmp_path) == expected
    preloaded.assert_active()
