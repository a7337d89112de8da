"""Finished runs of a W&B project, for a comparison."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from allattn.comparison.compared_run import Damaged, FinishedRun, LeftOut, finished_run, is_pruning_run
from allattn.comparison.records import is_of_a_stage, read_each, read_json
from allattn.errors import InputError
from allattn.training.loggers import has_login

PAGE = 50  # runs per request
ARTICLES = "articles.json"  # file of a run
_BESIDE_SETTINGS = ("environment", "corpus")  # in a run's W&B config; its result holds them too


def read_wandb_runs(path: str, group: str | None = None) -> tuple[list[FinishedRun], list[LeftOut]]:
    """Finished runs of a project, pruned and dense, and the others with the reason why they take no part.

    Every row of a run's history is read: the API's other call gives a random sample of it, and asking it
    for chosen metrics drops the rows that lack one of them.

    Args:
        path: ENTITY/PROJECT.
        group: only runs of this group; None = all.

    Raises:
        InputError: no login, no such project, or W&B does not answer.
    """
    entity, _, project = path.partition("/")
    if not entity or not project or "/" in project:
        raise InputError(f"wandb={path}: give ENTITY/PROJECT")
    if not has_login():
        raise InputError(
            "no W&B login: run `wandb login` (and leave WANDB_MODE unset), or compare local folders with "
            "runs=[FOLDER,...]"
        )
    with one_line_errors(path, "did not give the runs"):
        import wandb

        api = wandb.Api(overrides={"entity": entity, "project": project})
        filters = {} if group is None else {"group": group}
        found = api.runs(path, filters=filters, order="+created_at", per_page=PAGE, lazy=False)
        return read_each((f"{path}/{run.id} ({run.name})", partial(_read_run, run, path)) for run in found)


def _read_run(run: Any, path: str) -> FinishedRun | None:
    config = {name: value for name, value in run.config.items() if name not in _BESIDE_SETTINGS}
    if run.job_type != "prune" and not is_of_a_stage(config):
        return None
    if run.state != "finished":
        raise Damaged(str(run.state))
    if run.job_type == "prune" and not is_pruning_run(config):
        raise Damaged("its settings lack the gates")
    return finished_run(
        run.name or run.id,
        f"{path}/{run.id}",
        config,
        dict(run.summary_metrics),
        run.scan_history(),
        _articles(run),
    )


def _articles(run: Any) -> dict[str, Any] | None:
    """What the run's file holds; None where the run has no such file."""
    with TemporaryDirectory() as place:
        for file in run.files(names=[ARTICLES]):
            if file.size:  # the service may list what it was asked for and does not have
                file.download(root=place, replace=True).close()
                return read_json(Path(place) / ARTICLES)
    return None


@contextmanager
def one_line_errors(path: str, failed: str) -> Iterator[None]:
    """Turn what W&B's client raises into one line.

    Args:
        path: ENTITY/PROJECT.
        failed: what W&B did not do.

    Raises:
        InputError: W&B does not answer, or refuses.
    """
    from wandb.errors import Error

    try:
        yield
    except (InputError, Damaged):
        raise
    except (Error, OSError, ValueError, RuntimeError) as error:
        raise _refusal(path, failed, error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("wandb", "requests"):
            raise
        raise _refusal(path, failed, error) from None  # errors of the client's service are no wandb Error


def _refusal(path: str, failed: str, error: Exception) -> InputError:
    text = " ".join(str(error).split()) or type(error).__name__
    if "Could not find project" in text:
        return InputError(f"wandb={path}: there is no such project, or this login may not read it")
    return InputError(f"wandb={path}: W&B {failed} ({text})")
