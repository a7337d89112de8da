"""The comparison as a run of its own in W&B: the same table and pictures, in the group of the runs."""

from pathlib import Path

from allattn.errors import InputError
from allattn.report.comparison import Comparison
from allattn.report.tables import COLUMNS, RUN_COLUMNS, cells, run_cells
from allattn.training.config import WandbMode
from allattn.training.loggers import has_login, is_offline

JOB_TYPE = "compare"


def log_summary_run(
    comparison: Comparison,
    pictures: dict[str, Path],
    folder: Path,
    mode: WandbMode,
    destination: tuple[str | None, str],
    group: str | None,
) -> str:
    """Log tables and pictures with the W&B client; one line that says where they are.

    Args:
        comparison: what to log.
        pictures: PNG files by name.
        folder: W&B writes its files below it.
        mode: where the records go.
        destination: entity (None = the login's own) and project.
        group: the study.

    Raises:
        InputError: there is no login but must be, or W&B does not take the run.
    """
    if mode is WandbMode.none:
        raise InputError("upload=true with logger=none: choose logger=auto, online or offline")
    if mode is WandbMode.online and not has_login():
        raise InputError("logger=online needs a W&B login: run `wandb login`, or use logger=auto or offline")
    import wandb
    from wandb.errors import Error

    offline = is_offline(mode)
    entity, project = destination
    try:
        with wandb.init(
            entity=entity,
            project=project,
            group=group,
            job_type=JOB_TYPE,
            name="comparison" if group is None else f"comparison of {group}",
            dir=folder,
            mode="offline" if offline else "online",
            config={"runs": [run.where for run in comparison.runs], "reference": comparison.reference},
        ) as run:
            run.log(
                {
                    "variants": wandb.Table(list(COLUMNS), cells(comparison)),
                    "runs": wandb.Table(list(RUN_COLUMNS), run_cells(comparison)),
                    **{f"pictures/{name}": wandb.Image(str(path)) for name, path in pictures.items()},
                }
            )
            run.summary.update(
                {f"test_perplexity/{row.variant}": row.test.mean for row in comparison.rows}
                | {"warnings": comparison.warnings}
                | {"left_out": [f"{run.where}: {run.why}" for run in comparison.left_out]}
            )
            where = str(Path(run.dir).parent if offline else run.url)
    except (Error, OSError) as error:
        raise InputError(f"upload=true: W&B did not take the comparison ({error})") from None
    return f"W&B summary run on disk: wandb sync {where}" if offline else f"W&B summary run: {where}"


def destination_of(comparison: Comparison) -> tuple[tuple[str | None, str], str | None]:
    """Where the compared runs went themselves: (entity, project), and their group where they share one.

    Raises:
        InputError: they went to several projects.
    """
    names = ("logger.entity", "logger.project", "logger.group")
    found = [{run.settings.get(name) for run in comparison.runs} for name in names]
    entities, projects, groups = found
    if len(entities) > 1 or len(projects) > 1 or None in projects:
        raise InputError("upload=true: the runs are not of one W&B project; choose them by runs=[FOLDER,...]")
    return (entities.pop(), str(projects.pop())), groups.pop() if len(groups) == 1 else None
