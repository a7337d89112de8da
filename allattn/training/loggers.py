"""Where metrics go: always metrics.csv, and W&B unless it is none."""

import netrc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger

from allattn.training.config import LoggerConfig, WandbMode
from allattn.training.metrics import CsvMetrics
from allattn.training.run_folder import RunFolder
from allattn.training.wandb_run import WandbRun, check_login
from allattn.training.world import is_first_process


def make_loggers(
    config: LoggerConfig,
    folder: Path,
    name: str,
    job_type: str,
    tags: list[str],
    run_config: dict[str, Any],
    keep_until: int,
) -> list[Logger]:
    """metrics.csv and, unless none, a W&B run that a resumed job continues.

    Args:
        config: the logger settings.
        folder: run folder; W&B writes below it.
        name: the run's name.
        job_type: pretrain or prune.
        tags: of the W&B run.
        run_config: the resolved configuration and what else identifies the run.
        keep_until: optimizer step that the run goes on from; later rows of metrics.csv are dropped.

    Raises:
        InputError: W&B is to be online and there is no login.
    """
    if not is_first_process():
        return []
    check_login(config, has_login())
    metrics = CsvMetrics(folder / "metrics.csv", keep_until)
    loggers: list[Logger] = [metrics]
    if config.wandb is not WandbMode.none:
        offline = is_offline(config.wandb)
        rows = metrics.typed_rows()
        loggers.append(WandbRun(config, folder, name, job_type, tags, run_config, offline, rows))
    return loggers


def wandb_runs(loggers: list[Logger]) -> list[WandbRun]:
    """The W&B run among the loggers, if there is one."""
    return [logger for logger in loggers if isinstance(logger, WandbRun)]


def log_result(loggers: list[Logger], result: dict[str, Any], folder: RunFolder) -> None:
    """Put the run's result into the W&B run's summary, nested names joined by slashes, and its files up."""
    for run in wandb_runs(loggers):
        run.conclude(result, folder)


@contextmanager
def finish_loggers(loggers: list[Logger]) -> Iterator[None]:
    """End the W&B run whatever happens (failed where the block failed): the next job begins its own."""
    failed = True
    try:
        yield
        failed = False
    finally:
        for run in wandb_runs(loggers):
            run.finish(failed)


def is_offline(mode: WandbMode) -> bool:
    """Whether W&B keeps its records on disk; `auto` does so where there is no login, so nothing prompts."""
    return mode is WandbMode.offline or not has_login()


def has_login() -> bool:
    """Whether a W&B API key is in the environment or in the netrc file."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return False
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
