"""What a model loses as more and more of its heads are zeroed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from allattn.pictures.drawing import Looks, new_figure, plain_text


@dataclass(frozen=True)
class ShareCurve:
    """One score's."""

    name: str
    points: list[tuple[float, float, float]]  # share really zeroed, mean value, deviation (0 of one)


def draw_shares(panels: Mapping[str, Sequence[ShareCurve]], value: str, log: bool) -> Figure:
    """A pair of axes per panel, a line per score.

    Args:
        panels: curves by title.
        value: what is measured.
        log: whether the values' axis is logarithmic.
    """
    figure = new_figure(1 + 5.5 * len(panels), 6.5)
    names = dict.fromkeys(curve.name for curves in panels.values() for curve in curves)
    looks = Looks(names)
    shown = {}
    for axes, (title, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels.items(), strict=True
    ):
        for curve in curves:
            shares, values, spreads = zip(*curve.points, strict=True)
            look = looks.line(curve.name)
            (shown[curve.name],) = axes.plot(
                shares, values, **look, marker=looks.marker(curve.name)["marker"], markersize=4
            )
            low, high = ([v + sign * s for v, s in zip(values, spreads, strict=True)] for sign in (-1, 1))
            axes.fill_between(shares, low, high, color=look["color"], alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel="share of heads zeroed", ylabel=value)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        if log:
            axes.set_yscale("log")
            for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                set_formatter(StrMethodFormatter("{x:g}"))
        axes.grid(alpha=0.3, which="both")
    figure.legend(
        handles=list(shown.values()),
        labels=list(shown),
        loc="outside lower center",
        ncols=5,
        fontsize="small",
        frameon=False,
    )
    return plain_text(figure)
