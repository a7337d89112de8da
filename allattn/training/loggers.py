"""Where metrics go: always metrics.csv, and W&B unless it is none."""

import netrc
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger, WandbLogger

from allattn.errors import InputError
from allattn.training.config import LoggerConfig, WandbMode
from allattn.training.metrics import CsvMetrics
from allattn.training.run_folder import is_first_process


def make_loggers(
    config: LoggerConfig, folder: Path, name: str, job_type: str, run_config: dict[str, Any], keep_until: int
) -> list[Logger]:
    """metrics.csv and, unless none, a W&B run that a resumed job continues.

    Args:
        config: the logger settings.
        folder: run folder; W&B writes below it.
        name: the run's name.
        job_type: pretrain or prune.
        run_config: the resolved configuration.
        keep_until: optimizer step that the run goes on from; later rows are dropped.

    Raises:
        InputError: W&B is to be online and there is no login.
    """
    if not is_first_process():
        return []
    if config.wandb is WandbMode.online and not has_login():
        raise InputError("logger=online needs a W&B login: run `wandb login`, or use logger=auto or offline")
    loggers: list[Logger] = [CsvMetrics(folder / "metrics.csv", keep_until)]
    if config.wandb is not WandbMode.none:
        loggers.append(
            WandbLogger(
                name=name,
                save_dir=folder,
                id=_run_id(folder),
                resume="allow",
                offline=is_offline(config.wandb),
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=list(config.tags),
                job_type=job_type,
                config=run_config,
            )
        )
    return loggers


def log_summary(loggers: list[Logger], result: dict[str, Any]) -> None:
    """Put the run's result into the W&B run's summary, nested names joined by slashes."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(dict(_flat(result)))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


@contextmanager
def finish_loggers(loggers: list[Logger]) -> Iterator[None]:
    """End the W&B run whatever happens (failed where the block failed): the next job begins its own."""
    code = 1
    try:
        yield
        code = 0
    finally:
        if any(isinstance(logger, WandbLogger) for logger in loggers):
            import wandb

            wandb.finish(exit_code=code)


def is_offline(mode: WandbMode) -> bool:
    """Whether W&B keeps its records on disk; `auto` does so where there is no login, so nothing prompts."""
    return mode is WandbMode.offline or (mode is WandbMode.auto and not has_login())


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


def _run_id(folder: Path) -> str:
    path = folder / "wandb_run_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()
