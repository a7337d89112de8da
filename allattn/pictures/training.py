"""What was measured over optimizer steps, a line per run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from allattn.pictures.drawing import Looks, new_figure, plain_text

Line = tuple[list[float], list[float]]  # steps, values
Mark = tuple[int, str, Literal[":", "--"]]  # a step, what happens there, how its line is drawn


@dataclass(frozen=True)
class TrainingLines:
    """One run's."""

    name: str  # of its kind
    loss: Line
    valid_loss: Line
    sparsity: Line


def draw_training(runs: Sequence[TrainingLines], marks: Sequence[Mark], looks: Looks) -> Figure:
    """Training loss, validation loss and sparsity, one above the other.

    Args:
        runs: in the legend's order.
        marks: steps to mark.
        looks: of the runs' names.
    """
    figure = new_figure(11, 9)
    panels = figure.subplots(3, 1, sharex=True)
    for run in runs:
        look = looks.line(run.name) | {"linewidth": 1.1, "alpha": 0.7}
        panels[0].plot(*run.loss, **look)
        panels[1].plot(*run.valid_loss, **look, marker="o", markersize=4)
        panels[2].plot(*run.sparsity, **look)
    panels[0].set(title="one line per run", ylabel="training loss\n(nats per token)")
    panels[1].set_ylabel("validation loss\n(nats per token)")
    panels[2].set(xlabel="optimizer step", ylabel="sparsity\n(share of heads closed)")
    panels[2].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    highest = max(max(run.sparsity[1]) for run in runs)
    panels[2].set_ylim(-0.03, 1.03 if highest > 0.9 else None)
    for panel in panels:
        panel.grid(alpha=0.3)
        for step, _, line in marks:
            panel.axvline(step, color="0.3", linestyle=line, linewidth=1)
    names = dict.fromkeys(run.name for run in runs)
    keys = [Line2D([], [], label=name, **looks.line(name)) for name in names]
    keys += [
        Line2D([], [], color="0.3", linewidth=1, linestyle=line, label=f"{words} (step {step:,})")
        for step, words, line in marks
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return plain_text(figure)
