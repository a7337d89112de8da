"""The comparison as a run of its own in W&B: the same table and pictures, in the group of the runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allattn.comparison.side_by_side import Comparison
from allattn.comparison.tables import run_cells, run_columns, text_tables
from allattn.comparison.text_tables import TextTable
from allattn.errors import InputError
from allattn.training.config import WandbMode
from allattn.training.loggers import has_login, is_offline

JOB_TYPE = "compare"


@dataclass(frozen=True)
class Destination:
    """Where a summary run goes."""

    entity: str | None  # None = the login's own
    project: str
    group: str | None  # the study


def check_can_log(mode: WandbMode) -> None:
    """Refuse what cannot be logged, before any work.

    Raises:
        InputError: W&B is off, or is to be online and there is no login.
    """
    if mode is WandbMode.none:
        raise InputError("upload=true with logger=none: choose logger=auto, online or offline")
    if mode is WandbMode.online and not has_login():
        raise InputError("logger=online needs a W&B login: run `wandb login`, or use logger=auto or offline")


def destination_of(comparison: Comparison) -> Destination:
    """Where the compared runs went themselves; their group where they share one.

    Raises:
        InputError: they went to several projects.
    """
    names = ("logger.entity", "logger.project", "logger.group")
    entities, projects, groups = ({run.settings.get(name) for run in comparison.runs} for name in names)
    if len(entities) > 1 or len(projects) > 1 or None in projects:
        raise InputError("upload=true: the runs are not of one W&B project; choose them by runs=[FOLDER,...]")
    return Destination(entities.pop(), str(projects.pop()), groups.pop() if len(groups) == 1 else None)


def log_summary_run(
    comparison: Comparison, pictures: dict[str, Path], folder: Path, mode: WandbMode, destination: Destination
) -> str:
    """Log tables and pictures of a comparison; one line that says where they are.

    Args:
        comparison: what to log.
        pictures: PNG files by name.
        folder: W&B writes its files below it.
        mode: where the records go.
        destination: project and group.

    Raises:
        InputError: W&B does not take the run.
    """
    group = destination.group
    runs = TextTable("runs", "Runs", run_columns(comparison), run_cells(comparison))
    return log_report(
        JOB_TYPE,
        "comparison" if group is None else f"comparison of {group}",
        {"runs": [run.where for run in comparison.runs], "reference": comparison.reference},
        [*text_tables(comparison), runs],
        pictures,
        {f"test_perplexity/{row.label}": row.test.mean for row in comparison.rows}
        | {"warnings": comparison.warnings}
        | {"left_out": [f"{left.where}: {left.why}" for left in comparison.left_out]},
        folder,
        mode,
        destination,
    )


def log_report(
    job_type: str,
    name: str,
    config: Mapping[str, Any],
    tables: Sequence[TextTable],
    pictures: Mapping[str, Path],
    summary: Mapping[str, Any],
    folder: Path,
    mode: WandbMode,
    destination: Destination,
) -> str:
    """Log tables and pictures as a run of their own; one line that says where they are.

    Args:
        job_type: of the run.
        name: of the run.
        config: of the run.
        tables: each under its name.
        pictures: PNG files by name.
        summary: of the run.
        folder: W&B writes its files below it.
        mode: where the records go.
        destination: project and group.

    Raises:
        InputError: W&B does not take the run.
    """
    import wandb
    from wandb.errors import Error

    offline = is_offline(mode)
    try:
        with wandb.init(
            entity=destination.entity,
            project=destination.project,
            group=destination.group,
            job_type=job_type,
            name=name,
            dir=folder,
            mode="offline" if offline else "online",
            config=dict(config),
        ) as run:
            run.log(
                {
                    **{table.name: wandb.Table(list(table.columns), table.rows) for table in tables},
                    **{f"pictures/{name}": wandb.Image(str(path)) for name, path in pictures.items()},
                }
            )
            run.summary.update(dict(summary))
            where = str(Path(run.dir).parent if offline else run.url)
    except (Error, OSError) as error:
        raise InputError(f"upload=true: W&B did not take the {job_type} ({error})") from None
    return f"W&B {job_type} run on disk: wandb sync {where}" if offline else f"W&B {job_type} run: {where}"
