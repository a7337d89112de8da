"""The comparison's pictures, each as PNG and SVG."""

import io
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from allattn.comparison.compared_run import ComparedRun
from allattn.comparison.comparison import DENSE, PAPER_DENSE, PAPER_DIFFERENCES, PAPER_FULL, Comparison
from allattn.comparison.variants import FULL

# Okabe and Ito's colours, told apart with any colour vision; without yellow, which is faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")  # one more than colours: no pair comes back early
_DENSE_LOOK = {"color": "0.35", "marker": "*", "linestyle": "none", "markersize": 12}
_DOTS_PER_INCH = 150


class Styles:
    """Colour, line and marker of every variant, the same in all pictures."""

    def __init__(self, variants: Sequence[str]) -> None:
        looks = cycle(product(_LINES, _COLOURS))
        markers = cycle(_MARKERS)
        self._of = {name: (*next(looks), next(markers)) for name in variants}

    def line(self, variant: str) -> dict[str, Any]:
        """For a curve."""
        line, colour, _ = self._of[variant]
        return {"color": colour, "linestyle": line}

    def marker(self, variant: str) -> dict[str, Any]:
        """For a point."""
        _, colour, marker = self._of[variant]
        return {"color": colour, "marker": marker, "linestyle": "none"}


def draw_pictures(comparison: Comparison) -> dict[str, Figure]:
    """All pictures by file name, without ending."""
    styles = Styles(comparison.names())
    return {
        "perplexity": draw_perplexity(comparison, styles),
        "heads": draw_heads(comparison),
        "training": draw_training(comparison, styles),
    }


CAPTIONS = {
    "perplexity": "Test perplexity against the layers' parameters: these runs, and the published ones on "
    "axes of their own (another text, a larger model).",
    "heads": "Heads kept in each layer, for each run.",
    "training": "Loss and sparsity over the pruning run, with the end of lambda's warm-up and the freeze.",
}


def draw_perplexity(comparison: Comparison, styles: Styles) -> Figure:
    """Test perplexity against parameters of the layers: these runs, and the paper's beside them.

    The paper's text and model are others, so its points have axes of their own.
    """
    figure = _figure(11, 5.6)
    own, paper = figure.subplots(1, 2)
    dense = sorted({(run.dense.layer_parameters, run.dense.perplexity) for run in comparison.runs})
    _points(own, dense, _DENSE_LOOK, DENSE)
    rows = {row.variant: row for row in comparison.rows}
    for name in comparison.names():
        runs = [(run.pruned.layer_parameters, run.pruned.perplexity) for run in comparison.of(name)]
        _points(own, runs, styles.marker(name) | {"markersize": 4, "alpha": 0.8}, None)
        mean = [(rows[name].layer_parameters, rows[name].test.mean)]
        _points(own, mean, styles.marker(name) | {"fillstyle": "none"}, name)
    own.set_title("these runs (small: one run; open: mean over seeds)")
    own.set_xlabel("parameters of the layers, without the embedding side")

    published = Styles([FULL, *PAPER_DIFFERENCES])
    _points(paper, [PAPER_DENSE], _DENSE_LOOK, "dense")
    _points(paper, [PAPER_FULL], published.marker(FULL), FULL)
    for name, difference in PAPER_DIFFERENCES.items():
        if name != DENSE:
            look = (styles if name in rows else published).marker(name) | {"fillstyle": "none"}
            _points(paper, [(PAPER_FULL[0], PAPER_FULL[1] + difference)], look, f"{name} *")
    paper.set_title("published: WikiText-103, a larger model")
    paper.set_xlabel(
        "parameters of the layers, without the embedding side\n"
        "* parameters not published: drawn at the full method's"
    )
    for axes in (own, paper):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_ylabel("test perplexity (lower is better)")
        axes.margins(0.12)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return _plain_text(figure)


def draw_heads(comparison: Comparison) -> Figure:
    """Runs x layers: how many heads are kept."""
    counts = [[len(layer) for layer in run.pruned.heads_kept] for run in comparison.runs]
    layers = max(map(len, counts))
    heads = max(run.pruned.heads_total // len(run.pruned.heads_kept) for run in comparison.runs)
    figure = _figure(5.5 + 0.42 * layers, 1.6 + 0.32 * len(counts))
    axes = figure.subplots()
    grid = [row + [float("nan")] * (layers - len(row)) for row in counts]
    image = axes.imshow(grid, cmap="Blues", vmin=0, vmax=heads, aspect="auto")
    for place, row in enumerate(counts):
        for layer, count in enumerate(row):
            colour = "white" if count > 0.6 * heads else "black"
            axes.text(layer, place, str(count), ha="center", va="center", color=colour, fontsize="small")
    labels = [
        f"{name}, seed {run.seed}" for run, name in zip(comparison.runs, comparison.variants, strict=True)
    ]
    axes.set_yticks(range(len(counts)), labels)
    axes.set_xticks(range(layers))
    axes.set(xlabel="layer", title=f"heads kept per layer (dense: {heads})")
    starts = [i for i in range(1, len(counts)) if comparison.variants[i] != comparison.variants[i - 1]]
    for start in starts:
        axes.axhline(start - 0.5, color="black", linewidth=1)
    figure.colorbar(image, ax=axes, label="heads kept", ticks=range(0, heads + 1, max(1, heads // 4)))
    return _plain_text(figure)


def draw_training(comparison: Comparison, styles: Styles) -> Figure:
    """Training loss, validation loss and sparsity over steps, one line per run."""
    figure = _figure(11, 9)
    panels = figure.subplots(3, 1, sharex=True)
    for run, name in zip(comparison.runs, comparison.variants, strict=True):
        look = styles.line(name) | {"linewidth": 1.1, "alpha": 0.7}
        panels[0].plot(*_curve(run, "loss"), **look)
        panels[1].plot(*_curve(run, "valid_loss"), **look, marker="o", markersize=4)
        panels[2].plot(*_sparsity_curve(run), **look)
    panels[0].set_ylabel("training loss\n(nats per token)")
    panels[1].set_ylabel("validation loss\n(nats per token)")
    panels[2].set_ylabel("sparsity\n(share of heads closed)")
    panels[2].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panels[2].set_ylim(-0.03, 1.03 if _highest_sparsity(comparison) > 0.9 else None)
    panels[2].set_xlabel("optimizer step")
    keys = [Line2D([], [], label=name, **styles.line(name)) for name in comparison.names()]
    marks = _marks(comparison.runs)
    for panel in panels:
        panel.grid(alpha=0.3)
        for step, (_, line) in marks:
            panel.axvline(step, color="0.3", linestyle=line, linewidth=1)
    keys += [
        Line2D([], [], color="0.3", linewidth=1, linestyle=line, label=f"{words} (step {step:,})")
        for step, (words, line) in marks
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    panels[0].set_title("one line per run")
    return _plain_text(figure)


def png(figure: Figure) -> bytes:
    """The picture as PNG."""
    data = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(data, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
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


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _points(
    axes: Axes, points: Sequence[tuple[float, float]], look: dict[str, Any], label: str | None
) -> None:
    x, y = zip(*points, strict=True)
    axes.plot(x, y, **{"markersize": 9, "label": label} | look)


def _curve(run: ComparedRun, metric: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[metric]) for row in run.history if metric in row]
    return [step for step, _ in points], [value for _, value in points]


def _sparsity_curve(run: ComparedRun) -> tuple[list[float], list[float]]:
    """Decided sparsity; after the freeze it is the pruned model's, to the last step."""
    steps, values = _curve(run, "sparsity")
    before = [place for place, step in enumerate(steps) if step <= run.freeze_step]
    ends = [float(run.freeze_step), max(row["step"] for row in run.history)]
    steps = [steps[place] for place in before] + ends
    return steps, [values[place] for place in before] + [run.pruned.sparsity] * 2


def _highest_sparsity(comparison: Comparison) -> float:
    return max(max(_sparsity_curve(run)[1]) for run in comparison.runs)


def _marks(runs: Sequence[ComparedRun]) -> list[tuple[int, tuple[str, Any]]]:
    """Steps to mark: words and line style of each."""
    learned = [run for run in runs if run.settings["gates.selection"] == "l0"]
    warm_ups = {int(run.settings.get("gates.lambda_warmup_steps", 0)) for run in learned} - {0}
    freezes = {run.freeze_step for run in learned}
    marks = [(step, ("lambda's warm-up ends", ":")) for step in sorted(warm_ups)]
    return marks + [(step, ("freeze: closed heads go", "--")) for step in sorted(freezes)]


def _plain_text(figure: Figure) -> Figure:
    """Show every text as it is; a dollar sign in a setting is no formula."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    return figure
