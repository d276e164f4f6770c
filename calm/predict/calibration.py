"""What `calm calibrate` found, its file, and whether it is of this machine."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from calm import machine, places, report, topology
from calm.errors import CalmError
from calm.predict.fit import Costs, Residual, Sample

VERSION = 1


def identity() -> dict[str, str | int | bool]:
    """What the cost of an interrupt depends on, and a file of results is recognised by."""
    described = machine.describe()
    sockets = topology.sockets(range(os.cpu_count() or 1))
    return {
        "cpu": described["cpu"],
        "architecture": described["architecture"],
        "cpus": sum(map(len, sockets)),
        "sockets": len(sockets),
        "virtual": bool(topology.is_virtual()),
        "kernel": described["kernel"],
    }


@dataclass(frozen=True)
class Calibration:
    """Costs, and all that they rest on."""

    machine: Mapping[str, str | int | bool]
    date: str
    rounds: int
    costs: Costs
    local_low_ns: float | None
    local_high_ns: float | None
    reference_mhz: float | None
    exact: bool
    """Interrupts were the program's own; otherwise all of the system's."""
    busy_cpus: float
    """How many CPUs other programs used meanwhile."""
    residuals: list[Residual]
    samples: list[Sample]
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"calm_calibration": VERSION} | asdict(self)


def default_path() -> Path:
    """Where this user's is kept."""
    return places.user_cache() / "calibration.json"


def read(path: Path, mark: str, version: int, command: str) -> dict[str, Any]:
    """What a file of that mark and version holds. command: what writes such files."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise CalmError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CalmError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or mark not in data:
        raise CalmError(f"{path} is not what `{command}` wrote")
    if data.pop(mark) != version:
        raise CalmError(f"{path} was written by another version of calm: run `{command}` again")
    return data


def load(path: Path) -> Calibration:
    """Reads such a file."""
    data = read(path, "calm_calibration", VERSION, "calm calibrate")
    try:
        data["costs"] = Costs(**data["costs"])
        data["residuals"] = [Residual(**each) for each in data["residuals"]]
        data["samples"] = [Sample(**each) for each in data["samples"]]
        found = Calibration(**data)
        if not found.costs.local_ns > 0 or not isinstance(found.machine, dict):
            raise ValueError("it has no cost of an interrupt, or no machine")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CalmError(f"{path} is not a whole calibration: {error}") from error
    return found


def difference(found: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """What tells its machine from this one: "cpu Xeon, and here EPYC"; None where it is the same."""
    for key, value in here.items():
        if found.get(key) != value:
            return f"{key} {found.get(key, 'unknown')}, and here {value}"
    return None


def load_of_this_machine(path: Path) -> Calibration:
    """The same; refused where it is of another machine."""
    found = load(path)
    if other := difference(found.machine, identity()):
        raise CalmError(f"{path} is of another machine ({other}): run `calm calibrate` on this one")
    return found


def save(path: Path, calibration: Calibration) -> None:
    """Writes it where predict looks."""
    save_text(path, json.dumps(calibration.as_dict(), indent=1) + "\n")


def save_text(path: Path, text: str) -> None:
    """Writes a file of the cache, at once or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalmError(f"cannot write {path}: {error.strerror}") from error
    report.write(str(path), text)
