"""The examples for containers: the files that they name exist, and the build stage makes a working library.

Without a container engine, the build stage's commands run here, on the files that it copies and no others.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging_helpers import REPOSITORY, run

EXAMPLES = REPOSITORY / "examples/containers"
DOCKERFILE = EXAMPLES / "Dockerfile"
MANIFEST = EXAMPLES / "deployment.yaml"
PAGE = REPOSITORY / "docs/containers.md"
PRELOAD = "LD_PRELOAD"
OPTIONS = "CALM_OPTIONS"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions: name and arguments, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r" *\\\n *", " ", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in text.splitlines() if line]
    return [(name, arguments) for name, arguments in found]


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage, without those before the first."""
    found: list[list[tuple[str, str]]] = []
    for instruction in instructions():
        if instruction[0] == "FROM":
            found.append([])
        elif found:
            found[-1].append(instruction)
    return found


def container() -> dict[str, Any]:
    """The manifest's only container."""
    manifest = yaml.safe_load(MANIFEST.read_text())
    (found,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(found)


def variables() -> dict[str, str]:
    """The container's environment."""
    return {each["name"]: each["value"] for each in container()["env"]}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the build stage copies to the image, made by its commands."""
    root = tmp_path_factory.mktemp("image")
    source = root / "src"
    for name, arguments in stages()[0]:
        if name == "COPY":
            *paths, target = arguments.split()
            for path in paths:
                place = source / target / Path(path).name if target.endswith("/") else source / target
                place.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (REPOSITORY / path).is_dir() else shutil.copy
                copy(REPOSITORY / path, place)
        elif name == "RUN" and not arguments.startswith("apt-get "):
            run("sh", "-ec", arguments.replace("DESTDIR=/out", f"DESTDIR={root / 'out'}"), cwd=source)
    return root / "out"


def test_the_manifest_is_a_deployment() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("apps/v1", "Deployment")
    template = manifest["spec"]["template"]
    assert manifest["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container()["resources"]["limits"]["memory"]


def test_one_path_everywhere() -> None:
    preloads = {
        "Dockerfile": [
            arguments.partition("=")[2]
            for name, arguments in stages()[-1]
            if name == "ENV" and arguments.startswith(f"{PRELOAD}=")
        ],
        "manifest": [variables()[PRELOAD]],
        "page": re.findall(r"/\w[\w/]*/libcalmalloc\.so", PAGE.read_text()),
    }
    paths = {path for found in preloads.values() for path in found}
    assert all(preloads.values()), preloads
    assert len(paths) == 1, preloads
    prefix = re.search(r"^PREFIX \?= (\S+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert prefix is not None
    assert paths == {f"{prefix[1]}/lib/libcalmalloc.so"}


def test_options_exist() -> None:
    table = (REPOSITORY / "src/api/options.def").read_text()
    known = set(re.findall(r"^(?:TEXT_)?OPTION\((\w+),", table, re.MULTILINE))
    texts = [variables()[OPTIONS], *re.findall(rf"{OPTIONS}=([\w=,]+)", PAGE.read_text())]
    named = {each.partition("=")[0] for text in texts for each in text.split(",")}
    assert named
    assert named <= known


def test_cmake_options_exist() -> None:
    named = set(re.findall(r"-D(CALMALLOC_\w+)", DOCKERFILE.read_text()))
    known = set(re.findall(r"^option\((\w+)", (REPOSITORY / "CMakeLists.txt").read_text(), re.MULTILINE))
    assert named
    assert named <= known


def test_the_library_lies_where_it_is_preloaded_from(image: Path) -> None:
    path = image / variables()[PRELOAD].removeprefix("/")
    assert path.resolve().is_relative_to(image)
    report = run("ls", LD_PRELOAD=str(path), CALM_OPTIONS=variables()[OPTIONS]).stderr
    assert report.startswith('{"allocator": "calmalloc"')
    assert len(report.splitlines()) == 1, report


def test_the_image_builds() -> None:
    """With docker or podman, if it works and has, or can fetch, the base images."""
    engine = shutil.which("docker") or shutil.which("podman")
    if engine is None:
        pytest.skip("neither docker nor podman is installed")
    if subprocess.run([engine, "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{engine} is installed, but `{engine} info` fails: there is no daemon that answers")
    for base in ("debian:12", "debian:12-slim"):
        command = [engine, "pull", "--quiet", base]
        have = subprocess.run([engine, "image", "inspect", base], capture_output=True, check=False)
        if have.returncode != 0 and subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip(f"{base} is not here, and cannot be fetched")
    tag = "calmalloc-example-test"
    run(engine, "build", "-f", DOCKERFILE, "-t", tag, REPOSITORY)
    try:
        maps = run(engine, "run", "--rm", tag, "cat", "/proc/self/maps").stdout
    finally:
        run(engine, "image", "rm", tag)
    assert "libcalmalloc.so" in maps
