"""The comparison's pictures: its numbers as plain values, drawn by the room of pictures."""

import math
import statistics
from collections.abc import Sequence

from allattn.comparison.compared_run import ComparedRun
from allattn.comparison.curves import SIZE_NAMES, At, reached_by_all, size
from allattn.comparison.doubt import mean
from allattn.comparison.published import PAPER_DENSE, PAPER_DIFFERENCES, PAPER_FULL
from allattn.comparison.rows import Row
from allattn.comparison.side_by_side import Comparison
from allattn.comparison.variants import FULL
from allattn.pictures.drawing import Figure, Looks
from allattn.pictures.kept import draw_kept
from allattn.pictures.sizes import Panel, Points, SizeCurve, draw_curves, draw_points
from allattn.pictures.training import Line, Mark, TrainingLines, draw_training

_PARAMETERS = "parameters of the layers, without the embedding side"

CAPTIONS = {
    "curves": "Test perplexity against size, a curve per method: single runs, and mean and standard "
    "deviation over seeds at the sizes that all of a method's seeds reach. Dotted: the size of the table "
    "at equal size.",
    "perplexity": "Test perplexity against the layers' parameters and measured time, by family, dense and "
    "pruned: these runs, and the published ones on axes of their own (another text, a larger model).",
    "heads": "Heads kept in each layer, for each run.",
    "training": "Loss and sparsity over the pruning run, with the end of lambda's warm-up and the freeze.",
}


def draw_pictures(comparison: Comparison) -> dict[str, Figure]:
    """All pictures by file name, without ending; the curves first."""
    dense = [row.label for row in comparison.rows if not row.pruned]
    looks = Looks(dict.fromkeys([*comparison.labels(), *dense, FULL, *PAPER_DIFFERENCES]))
    asked = {row.asked for row in comparison.equal if row.asked is not None}
    return {
        "curves": draw_curves(
            _size_curves(comparison),
            SIZE_NAMES[comparison.at],
            sorted(asked),
            Looks([row.label for row in comparison.equal]),
        ),
        "perplexity": draw_points(_panels(comparison), looks),
        "heads": draw_kept(
            [[len(layer) for layer in run.pruned.heads_kept] for run in comparison.runs],
            [f"{each.label}, seed {each.run.seed}" for each in comparison.placed],
            [each.label for each in comparison.placed],
            max(run.pruned.heads_total // len(run.pruned.heads_kept) for run in comparison.runs),
        ),
        "training": draw_training(
            [_training_lines(each.label, each.run) for each in comparison.placed],
            _marks(comparison.runs),
            looks,
        ),
    }


def _size_curves(comparison: Comparison) -> list[SizeCurve]:
    drawn = []
    for row in comparison.equal:
        curves = list(row.curves.values())
        if not curves:
            continue
        middles = [(size, mean(values)) for size, values in reached_by_all(curves)]
        drawn.append(
            SizeCurve(
                row.label,
                [(size, model.perplexity) for each in curves for size, model in each.models],
                [
                    (size, over.mean, 0 if math.isnan(over.deviation) else over.deviation)
                    for size, over in middles
                ],
            )
        )
    return drawn


def _panels(comparison: Comparison) -> list[Panel]:
    """Against parameters; against time, where it was measured; and the paper's, of which no time is known."""
    own = "these runs (small: one run; open: mean over seeds)"
    panels = [Panel(own, _PARAMETERS, [_points(row, At.parameters) for row in comparison.rows])]
    timed = [_points(row, At.layer_time) for row in comparison.rows if row.layer_microseconds is not None]
    if timed:
        panels.append(Panel(own, "layers' time, microseconds per token", timed))
    return [*panels, _published_panel(comparison)]


def _points(row: Row, at: At) -> Points:
    """A row's models; of a variant the mean beside them."""
    runs = [(found, model.perplexity) for model in row.models if (found := size(model, at)) is not None]
    middle = (statistics.fmean(x for x, _ in runs), statistics.fmean(y for _, y in runs))
    kind = [row.models[0].family, "pruned" if row.pruned else "dense"]
    unsaid = ", ".join(word for word in kind if word not in row.label)
    return Points(
        row.label,
        f"{row.label} ({unsaid})" if unsaid else row.label,
        runs,
        middle if row.pruned else None,
        star=not row.pruned,
    )


def _published_panel(comparison: Comparison) -> Panel:
    full = PAPER_FULL[1]
    dense = next(row.label for row in comparison.rows if not row.pruned)
    return Panel(
        "published: WikiText-103, a larger model",
        f"{_PARAMETERS}\n* parameters not published: drawn at the full method's",
        [
            Points(dense, "dense", [PAPER_DENSE], star=True),
            Points(FULL, FULL, [PAPER_FULL]),
            *(
                Points(name, f"{name} *", [(PAPER_FULL[0], full + difference)])
                for name, difference in PAPER_DIFFERENCES.items()
            ),
        ],
    )


def _training_lines(label: str, run: ComparedRun) -> TrainingLines:
    return TrainingLines(label, _line(run, "loss"), _line(run, "valid_loss"), _sparsity_line(run))


def _line(run: ComparedRun, metric: str) -> Line:
    points = [(row["step"], row[metric]) for row in run.history if metric in row]
    return [step for step, _ in points], [value for _, value in points]


def _sparsity_line(run: ComparedRun) -> Line:
    """Decided sparsity; after the freeze it is the pruned model's, to the last step."""
    steps, values = _line(run, "sparsity")
    before = [place for place, step in enumerate(steps) if step <= run.freeze_step]
    ends = [float(run.freeze_step), max(row["step"] for row in run.history)]
    steps = [steps[place] for place in before] + ends
    return steps, [values[place] for place in before] + [run.pruned.sparsity] * 2


def _marks(runs: Sequence[ComparedRun]) -> list[Mark]:
    learned = [run for run in runs if run.settings["gates.selection"] == "l0"]
    warm_ups = {int(run.settings.get("gates.lambda_warmup_steps", 0)) for run in learned} - {0}
    freezes = {run.freeze_step for run in learned}
    ends: list[Mark] = [(step, "lambda's warm-up ends", ":") for step in sorted(warm_ups)]
    return [*ends, *((step, "freeze: closed heads go", "--") for step in sorted(freezes))]
