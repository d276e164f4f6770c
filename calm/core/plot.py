"""Pictures, by matplotlib."""

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from calm.core.errors import CalmError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png")


def pyplot() -> ModuleType:
    """Matplotlib, for files. Imported here, because it takes longer than most of what calm does."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "calm"  # the same figures give the same file
    from matplotlib import pyplot

    return pyplot


def save(figure: "Figure", path: Path) -> None:
    """Writes a picture and lets go of it; the ending tells the format."""
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise CalmError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot().close(figure)
