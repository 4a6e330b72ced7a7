"""Pictures that matplotlib draws, written as text files are: whole, or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cxl_offload.files.text import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120
"""Dots an inch of pictures of dots."""


def save_figure(figure: Figure, path: str | os.PathLike[str], **options: Any) -> None:
    """Draws a figure in the format that the ending of ``path`` names, PNG where it has none.

    matplotlib writes to a file piece by piece, and takes a full drive for a picture that is done.

    Parameters
    ----------
    options
        As ``Figure.savefig`` takes them.

    Raises
    ------
    OSError
        The file cannot be written.
    ValueError
        matplotlib knows no such format.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix[1:] or "png", **options)
    write_bytes(path, drawn.getvalue())
