"""The comparison as a W&B report: its tables and notes as text, beside panels of the runs' own metrics."""

from types import ModuleType
from typing import TYPE_CHECKING

from allattn.comparison.runs_wandb import one_line_errors
from allattn.comparison.side_by_side import Comparison
from allattn.comparison.tables import notes, text_tables
from allattn.comparison.text_tables import markdown_list, markdown_tables
from allattn.errors import InputError
from allattn.pictures.drawing import Looks

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import PanelGrid, Report, Runset

STEP = "step"
OVER_STEPS = {"valid_perplexity": "validation perplexity", "sparsity": "sparsity (share of heads closed)"}
OPEN_HEADS = "open_heads/layer_{:02d}"
HEADS_KEPT, PERPLEXITY = "pruned/heads_kept_total", "pruned/test/perplexity"  # of a run's summary
LONGEST_TITLE = 128  # characters that W&B takes
_WIDE, _NARROW, _HIGH = 12, 6, 8  # of a panel, in W&B's units; a grid has 24 across


def check_can_report(source: str | None) -> None:
    """Refuse what cannot become a report, before any work.

    Raises:
        InputError: the runs are not read from W&B, or the extra is not installed.
    """
    if source is None:
        raise InputError("report=true shows runs of W&B: name their project by wandb=ENTITY/PROJECT")
    _library()


def save_report(comparison: Comparison, path: str, group: str | None) -> str:
    """Put the report up; one line that says where it is.

    Raises:
        InputError: W&B does not take it.
    """
    with one_line_errors(path, "did not take the report"):
        return f"W&B report: {report_of(comparison, path, group).save().url}"


def report_of(comparison: Comparison, path: str, group: str | None) -> "Report":
    """The report, not yet saved.

    Args:
        comparison: of runs read from this project.
        path: ENTITY/PROJECT.
        group: the study, for the title.
    """
    library = _library()
    entity, project = path.split("/")
    said = {
        "To keep in mind": comparison.warnings,
        "Left out of every mean": [f"{run.where}: {run.why}" for run in comparison.left_out],
    }
    blocks = [
        library.H2("Tables"),
        library.MarkdownBlock(markdown_tables(text_tables(comparison), notes(comparison))),
    ]
    for title, lines in said.items():
        if lines:
            blocks += [library.H2(title), library.MarkdownBlock(markdown_list(lines))]
    blocks += [
        library.H2("Over the optimizer steps, mean and standard deviation over the runs of a variant"),
        _over_steps(library, comparison, path),
        library.H2("Test perplexity against heads kept, a point per run"),
        _against_heads(library, comparison, path),
    ]
    title = "Comparison" if group is None else f"Comparison of {group}"
    return library.Report(
        entity=entity, project=project, title=title[:LONGEST_TITLE], blocks=blocks, width="fluid"
    )


def _library() -> ModuleType:
    """W&B's library for reports, which nothing else needs."""
    try:
        import wandb_workspaces.reports.v2 as library
    except ImportError:
        raise InputError('report=true needs: pip install "allattn[reports]"') from None
    return library


def _over_steps(library: ModuleType, comparison: Comparison, path: str) -> "PanelGrid":
    layers = max(len(run.pruned.heads_kept) for run in comparison.runs)
    shown = {name: (title, _WIDE) for name, title in OVER_STEPS.items()}
    shown |= {OPEN_HEADS.format(layer): (f"open heads, layer {layer}", _NARROW) for layer in range(layers)}
    run_sets = _run_sets(library, comparison, path, together=True)
    panels = [
        library.LinePlot(
            title=title,
            x=STEP,
            y=[name],
            title_x="optimizer step",
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
            max_runs_to_show=len(run_sets),
            layout=library.Layout(w=width, h=_HIGH),
        )
        for name, (title, width) in shown.items()
    ]
    return library.PanelGrid(runsets=run_sets, panels=panels)


def _against_heads(library: ModuleType, comparison: Comparison, path: str) -> "PanelGrid":
    panel = library.ScatterPlot(
        title="test perplexity against heads kept",
        x=library.SummaryMetric(HEADS_KEPT),
        y=library.SummaryMetric(PERPLEXITY),
        layout=library.Layout(w=2 * _WIDE, h=2 * _HIGH),
    )
    return library.PanelGrid(runsets=_run_sets(library, comparison, path, together=False), panels=[panel])


def _run_sets(library: ModuleType, comparison: Comparison, path: str, together: bool) -> list["Runset"]:
    """A set of runs per variant; `together` = as one line, else each run in its variant's colour."""
    entity, project = path.split("/")
    looks = Looks(comparison.labels())
    found = []
    for label in comparison.labels():
        runs = [run.where.rpartition("/")[2] for run in comparison.of(label)]
        colour = library.RunSettings(color=looks.line(label)["color"])
        found.append(
            library.Runset(
                entity=entity,
                project=project,
                name=label,
                filters=f"Metric('ID') in {runs}",
                groupby=["JobType"] if together else [],  # all of them are pruning runs
                run_settings={} if together else dict.fromkeys(runs, colour),
            )
        )
    return found
