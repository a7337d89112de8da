"""The comparison as a run of its own in W&B: the same table and pictures, in the group of the runs."""

from dataclasses import dataclass
from pathlib import Path

from allattn.comparison.side_by_side import Comparison
from allattn.comparison.tables import run_cells, run_columns, text_tables
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
    """Log tables and pictures with the W&B client; one line that says where they are.

    Args:
        comparison: what to log.
        pictures: PNG files by name.
        folder: W&B writes its files below it.
        mode: where the records go.
        destination: project and group.

    Raises:
        InputError: W&B does not take the run.
    """
    import wandb
    from wandb.errors import Error

    offline, group = is_offline(mode), destination.group
    try:
        with wandb.init(
            entity=destination.entity,
            project=destination.project,
            group=group,
            job_type=JOB_TYPE,
            name="comparison" if group is None else f"comparison of {group}",
            dir=folder,
            mode="offline" if offline else "online",
            config={"runs": [run.where for run in comparison.runs], "reference": comparison.reference},
        ) as run:
            run.log(
                {
                    **{
                        table.name: wandb.Table(list(table.columns), table.rows)
                        for table in text_tables(comparison)
                    },
                    "runs": wandb.Table(list(run_columns(comparison)), run_cells(comparison)),
                    **{f"pictures/{name}": wandb.Image(str(path)) for name, path in pictures.items()},
                }
            )
            run.summary.update(
                {f"test_perplexity/{row.label}": row.test.mean for row in comparison.rows}
                | {"warnings": comparison.warnings}
                | {"left_out": [f"{left.where}: {left.why}" for left in comparison.left_out]}
            )
            where = str(Path(run.dir).parent if offline else run.url)
    except (Error, OSError) as error:
        raise InputError(f"upload=true: W&B did not take the comparison ({error})") from None
    return f"W&B summary run on disk: wandb sync {where}" if offline else f"W&B summary run: {where}"
