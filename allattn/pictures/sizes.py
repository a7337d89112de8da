"""Perplexity against size: single models, means over seeds, and curves with their spread."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from allattn.pictures.drawing import Looks, new_figure, plain_text

Point = tuple[float, float]  # size, perplexity


@dataclass(frozen=True)
class Points:
    """Models of one kind."""

    look: str  # the name whose look they have
    label: str
    runs: list[Point]
    mean: Point | None = None
    star: bool = False  # instead of the look's marker


@dataclass(frozen=True)
class Panel:
    """A pair of axes."""

    title: str
    size: str  # what is drawn to the right
    points: list[Points]


@dataclass(frozen=True)
class SizeCurve:
    """Runs of one kind, and the middle over seeds at the sizes that all seeds reach."""

    name: str
    runs: list[Point]
    band: list[tuple[float, float, float]]  # size, mean, deviation (0 of one seed)


def draw_points(panels: Sequence[Panel], looks: Looks) -> Figure:
    """A pair of axes per panel: every run as a small point, a mean as an open one."""
    figure = new_figure(1 + 5 * len(panels), 6.2)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for each in panel.points:
            large = looks.marker(each.look) | {"label": each.label, "markersize": 9}
            large |= {"marker": "*", "markersize": 12} if each.star else {}
            small = large | {"label": None, "markersize": 4, "alpha": 0.8}
            axes.plot(*zip(*each.runs, strict=True), **large if each.mean is None else small)
            if each.mean is not None:
                axes.plot(*each.mean, **large, fillstyle="none")
        axes.set_title(panel.title)
        _size_axes(axes, panel.size)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return plain_text(figure)


def draw_curves(curves: Sequence[SizeCurve], size: str, asked: Sequence[float], looks: Looks) -> Figure:
    """A line per kind through the means over seeds, its band one standard deviation to each side.

    Args:
        curves: what to draw.
        size: in words.
        asked: sizes to mark.
        looks: of the curves' names.
    """
    figure = new_figure(8, 6)
    axes = figure.subplots()
    for each in curves:
        line = looks.line(each.name)
        axes.plot(*zip(*each.runs, strict=True), **looks.marker(each.name) | {"markersize": 5, "alpha": 0.8})
        sizes, means, spreads = zip(*each.band, strict=True) if each.band else ((), (), ())
        axes.plot(sizes, means, **line, label=each.name)
        low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axes.fill_between(sizes, low, high, color=line["color"], alpha=0.15, linewidth=0)
    for place in asked:
        axes.axvline(place, color="0.3", linestyle=":", linewidth=1)
    axes.set_title("points: single runs; lines and bands: mean ± standard deviation over seeds")
    _size_axes(axes, size)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    return plain_text(figure)


def _size_axes(axes: Axes, size: str) -> None:
    axes.set(xlabel=size, ylabel="test perplexity (lower is better)")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.margins(0.12)
    axes.grid(alpha=0.3)
