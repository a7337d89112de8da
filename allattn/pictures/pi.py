"""pi as a picture, layers x heads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def grid_figure(layers: int, heads: int) -> tuple["Figure", "Axes"]:
    """A figure whose one pair of axes has a cell per head, with labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5 + 0.4 * heads, 2.2 + 0.3 * layers), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlabel="head (original index)", ylabel="layer")
    axes.set_xticks(range(heads))
    axes.set_yticks(range(layers))
    return figure, axes


def draw_pi(figure: "Figure", axes: "Axes", pi: Sequence[Sequence[float]]) -> None:
    """Colour the cells by pi, white at 0; NaN (no gate) is grey."""
    from matplotlib.colors import CenteredNorm

    axes.set_facecolor("0.85")
    image = axes.imshow(pi, cmap="RdBu", norm=CenteredNorm(), aspect="auto")
    figure.colorbar(image, ax=axes, label="gate parameter pi (open: pi > 0)")
