"""How many CPUs a program may use here: its affinity mask, and the quotas of its control groups."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Cpus:
    """The CPUs in the mask, and how many of them the quota lets run at a time."""

    mask: int
    quota: float | None = None
    """None: there is none."""

    @property
    def available(self) -> float:
        """CPUs that can be busy at once, on average."""
        return min(float(self.mask), self.quota if self.quota is not None else float(self.mask))


def _numbers(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (OSError, ValueError):
        return []


def _share(quota: str, period: str) -> float | None:
    """Of what a file says; None for "max", for -1, and for nonsense."""
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) > 0 else None


def _folders(root: Path, path: str) -> Iterator[Path]:
    """The group's, and those above it, whose limits hold for it as well."""
    # Seen from within a container, the group may be a path that leads out of it.
    inside = PurePosixPath("/", *(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
    for folder in (inside, *inside.parents):
        yield root / str(folder).lstrip("/")


def quota(own: Path = _OWN, root: Path = _CGROUPS) -> float | None:
    """The least quota of CPU time, in CPUs, of this process's control group and those above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found: list[float | None] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for folder in _folders(root, path):
                found.append(_share(*[*_numbers(folder / "cpu.max"), "", ""][:2]))
        elif "cpu" in controllers.split(","):
            for name in dict.fromkeys((controllers, "cpu")):
                for folder in _folders(root / name, path):
                    files = (folder / f"cpu.cfs_{what}_us" for what in ("quota", "period"))
                    found.append(_share(*(" ".join(_numbers(file)) for file in files)))
    return min((each for each in found if each is not None), default=None)


def here() -> Cpus:
    """Those of this process, and of what it starts."""
    return Cpus(len(os.sched_getaffinity(0)), quota())
