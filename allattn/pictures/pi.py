"""pi and which heads are kept, as pictures, layers x heads."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from allattn.pictures.drawing import new_figure

Grid = Sequence[Sequence[float]]  # layers x heads


def pi_pixels(pi: Grid, title: str) -> npt.NDArray[np.uint8]:
    """pi as colour, as (height, width, 4) bytes; NaN (no gate) is grey."""
    figure, axes = _cells(len(pi), len(pi[0]))
    _colour_by_pi(figure, axes, pi)
    axes.set_title(title)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())  # type: ignore[attr-defined]


def draw_pi_and_kept(pi: Grid, kept: Sequence[Sequence[bool]], title: str) -> Figure:
    """pi as colour where any is known, removed heads crossed out.

    Args:
        pi: NaN where a head had no gate.
        kept: layers x heads.
        title: above the picture.
    """
    figure, axes = _cells(len(pi), len(pi[0]))
    axes.set_title(title)
    keys: list[Any] = []
    unknown = [math.isnan(value) for row in pi for value in row]
    if not all(unknown):
        _colour_by_pi(figure, axes, pi)
        if any(unknown):
            keys.append(Patch(facecolor="0.85", edgecolor="0.5", label="pi not known"))
    else:
        colours = ListedColormap(["0.85", "tab:blue"])
        axes.imshow(np.array(kept, float), cmap=colours, vmin=0, vmax=1, aspect="auto")
        keys.append(Patch(facecolor="tab:blue", label="kept"))
    gone = [(layer, head) for layer, row in enumerate(kept) for head, here in enumerate(row) if not here]
    axes.plot([head for _, head in gone], [layer for layer, _ in gone], "kx", label="removed")
    keys.append(Line2D([], [], marker="x", color="k", linestyle="none", label="removed"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    return figure


def _cells(layers: int, heads: int) -> tuple[Figure, Axes]:
    """One pair of axes with a cell per head, with labels."""
    figure = new_figure(3.5 + 0.4 * heads, 2.2 + 0.3 * layers)
    axes = figure.add_subplot()
    axes.set(xlabel="head (original index)", ylabel="layer")
    axes.set_xticks(range(heads))
    axes.set_yticks(range(layers))
    return figure, axes


def _colour_by_pi(figure: Figure, axes: Axes, pi: Grid) -> None:
    """White at 0."""
    axes.set_facecolor("0.85")
    image = axes.imshow(pi, cmap="RdBu", norm=CenteredNorm(), aspect="auto")
    figure.colorbar(image, ax=axes, label="gate parameter pi (open: pi > 0)")
