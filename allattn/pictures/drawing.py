"""A figure, and its bytes as PNG and SVG. matplotlib is imported in this room alone."""

import io
from collections.abc import Iterable
from itertools import cycle, product
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

# Okabe and Ito's colours, told apart with any colour vision; without yellow, which is faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")  # one more than colours: no pair comes back early
_DOTS_PER_INCH = 150


class Looks:
    """Colour, line and marker of every name, the same in all pictures."""

    def __init__(self, names: Iterable[str]) -> None:
        looks = cycle(product(_LINES, _COLOURS))
        markers = cycle(_MARKERS)
        self._of = {name: (*next(looks), next(markers)) for name in names}

    def line(self, name: str) -> dict[str, Any]:
        """For a curve."""
        line, colour, _ = self._of[name]
        return {"color": colour, "linestyle": line}

    def marker(self, name: str) -> dict[str, Any]:
        """For a point."""
        _, colour, marker = self._of[name]
        return {"color": colour, "marker": marker, "linestyle": "none"}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain_text(figure: Figure) -> Figure:
    """Show every text as it is; a dollar sign in a name is no formula."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    return figure


def png(figure: Figure) -> bytes:
    """The picture as PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def svg(figure: Figure, name: str) -> bytes:
    """The picture as SVG, the same bytes for the same picture.

    Args:
        figure: what to write.
        name: makes the ids inside differ from those of other pictures.
    """
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": f"allattn {name}"}):
        figure.savefig(data, format="svg", metadata={"Date": None, "Creator": None})
    return data.getvalue()
