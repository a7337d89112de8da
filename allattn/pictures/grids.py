"""Numbers on a grid as colours: layers x heads, rows and columns of a matrix."""

import math
from collections.abc import Sequence

from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from allattn.pictures.drawing import new_figure, plain_text

_LARGEST = 14.0  # inches, to either side
_WRITTEN = 16  # rows or columns up to which every number is written out


def draw_grid(
    values: Sequence[Sequence[float]],
    title: str,
    across: str,
    down: str,
    label: str,
    lines: Sequence[int] = (),
    names: Sequence[str] = (),
    signed: bool = False,
) -> Figure:
    """A cell per number; what is missing (NaN, or a shorter row) is grey.

    Args:
        values: rows, which may differ in length.
        title: above the picture.
        across: what the columns are.
        down: what the rows are.
        label: what the numbers are.
        lines: rows above which a line is drawn.
        names: of rows and columns both; none = their numbers.
        signed: white is 0, and the sides have two colours.
    """
    columns = max(map(len, values), default=0)
    grid = [[*row, *[math.nan] * (columns - len(row))] for row in values]
    size = [min(_LARGEST, base + 0.42 * count) for base, count in ((3.5, columns), (2.0, len(grid)))]
    figure = new_figure(*size)
    axes = figure.add_subplot()
    axes.set_facecolor("0.85")
    norm = CenteredNorm() if signed else Normalize()
    image = axes.imshow(
        grid, cmap="RdBu" if signed else "viridis", norm=norm, aspect="auto", interpolation="none"
    )
    if max(columns, len(grid)) <= _WRITTEN:
        for place, row in enumerate(grid):
            for column, value in enumerate(row):
                if not math.isnan(value):
                    dark = not signed and norm(value) < 0.5
                    colour = "white" if dark else "black"
                    axes.text(
                        column,
                        place,
                        f"{value:.2g}",
                        ha="center",
                        va="center",
                        color=colour,
                        fontsize="x-small",
                    )
    for line in lines:
        axes.axhline(line - 0.5, color="white", linewidth=1)
    if names:
        axes.set_xticks(range(columns), names, rotation=90)
        axes.set_yticks(range(len(grid)), names)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(title=title, xlabel=across, ylabel=down)
    figure.colorbar(image, ax=axes, label=label)
    return plain_text(figure)
