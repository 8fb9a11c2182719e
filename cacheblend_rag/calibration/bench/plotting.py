"""Pyplot for benchmarks and evaluation; matplotlib comes with the extra ``plots``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError, MissingExtraError


def import_pyplot() -> Any:
    """Pyplot of matplotlib, drawing into files.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def pyplot_for(path: str | Path | None) -> Any:
    """Pyplot for a file drawn after long work, which is checked now; None if none is named.

    Raises
    ------
    ConfigError
        If matplotlib draws no such kind of file, or its folder does not exist.
    MissingExtraError
        If matplotlib is not installed.
    """
    if not path:
        return None
    pyplot = import_pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    wanted = Path(path)
    if wanted.suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError("plot", str(path), "use a file name that ends in .svg, .png or .pdf")
    if not wanted.parent.is_dir():
        raise ConfigError("plot", str(path), "use a folder that exists")
    return pyplot


def save_figure(pyplot: Any, figure: Any, path: str | Path) -> None:
    """Write a figure into a file and let go of it; the same figure gives the same file."""
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix.lower())
    with pyplot.rc_context({"svg.hashsalt": "cacheblend-rag"}):  # ids that do not change
        figure.savefig(path, dpi=150, metadata=undated)
    pyplot.close(figure)
