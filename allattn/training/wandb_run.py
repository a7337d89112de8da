"""The W&B run of one job. Whatever happens to W&B, training goes on and what was recorded stays on disk."""

import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch.loggers import Logger

from allattn.errors import InputError, first_line
from allattn.files import PARTIAL, write_atomically
from allattn.pictures.pi import pi_pixels
from allattn.training.artifacts import artifact_source, note_artifact, to_be_uploaded
from allattn.training.config import LoggerConfig, WandbMode
from allattn.training.exports import save_export
from allattn.training.flat_names import flat
from allattn.training.run_folder import RunFolder
from allattn.training.wandb_variables import agents_id, hidden

INIT_SECONDS = 30  # then the run goes on offline
UPLOAD_SECONDS = 1800  # of one artifact, and of the rest at a run's end
_PI = re.compile(r"pi/layer_(\d+)/head_(\d+)")


class WandbRun(Logger):
    """Sends each row of metrics to W&B under the names of metrics.csv, at the optimizer step.

    A resumed job continues its run: rows that W&B has already are not sent twice, and those of earlier starts
    that it lacks (it was off, or a kill cut its record off) are sent first.

    Args:
        config: the logger settings.
        folder: run folder; W&B writes below it unless WANDB_DIR is set; `wandb_run_id` there names the run.
        name: the run's name.
        job_type: pretrain or prune.
        tags: of the run.
        run_config: the resolved configuration and what else identifies the run.
        offline: keep everything on disk.
        earlier: rows of metrics.csv that earlier starts wrote.
    """

    def __init__(
        self,
        config: LoggerConfig,
        folder: Path,
        name: str,
        job_type: str,
        tags: list[str],
        run_config: dict[str, Any],
        offline: bool,
        earlier: Sequence[dict[str, Any]] = (),
    ) -> None:
        super().__init__()
        self.upload = config.upload and not offline
        self.offline = offline
        self._broken = False
        self._next_step = 0  # W&B has the rows before it
        about = {"name": name, "job_type": job_type, "tags": tags, "config": run_config}
        records = os.environ.get("WANDB_DIR") or folder
        place = {"project": config.project, "entity": config.entity, "group": config.group, "dir": records}
        identity = _run_id(folder)
        with hidden(agents_run=identity == agents_id(os.environ)):
            self.run: Any = self._start(about | place | {"id": identity})
        if earlier:
            self._safely(lambda: self._catch_up(earlier))

    def _catch_up(self, earlier: Sequence[dict[str, Any]]) -> None:
        self._next_step = self.run.step
        for row in earlier:
            self.log_metrics(row, row["step"])

    def _start(self, settings: dict[str, Any]) -> Any:
        """The run, online if it can be reached, else offline, else none."""
        import wandb

        with suppress(Exception):
            if wandb.run is not None:
                wandb.run.finish()  # of a job that never ended it
            wandb.teardown()  # what it has read of the environment, for checkpoint=wandb:... perhaps
        quiet = wandb.Settings(
            silent=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=UPLOAD_SECONDS,
            reinit="finish_previous",  # never the run of the job before
        )
        if not self.offline:
            try:
                run = wandb.init(**settings, mode="online", resume="allow", settings=quiet)
            except Exception as error:
                print(f"W&B cannot be reached ({first_line(error)}): its records stay on disk")
                self.offline, self.upload = True, False
                wandb.teardown()  # lets go of the run's id
            else:
                print(f"W&B: {run.url}")
                return run
        try:
            return wandb.init(**settings, mode="offline", settings=quiet)
        except Exception as error:
            print(f"W&B keeps no record of this run ({first_line(error)}); metrics.csv has it all")
            self._broken = True
            return None

    @property
    def name(self) -> str:
        """Lightning's name of the logger."""
        return "wandb"

    @property
    def version(self) -> str:
        """Lightning's version of the logger."""
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The configuration was given at the start."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log one row, and pi as a picture and a table where the row has it."""
        assert step is not None
        if step < self._next_step:
            return
        self._safely(lambda: self.run.log(self._row(metrics, step), step=step, commit=True))

    def _row(self, metrics: dict[str, Any], step: int) -> dict[str, Any]:
        import wandb

        row = metrics | {"step": step}
        pi = {m.groups(): value for name, value in metrics.items() if (m := _PI.fullmatch(name))}
        if pi:
            gates = [(int(layer), int(head), value) for (layer, head), value in pi.items()]
            row["pi_table"] = wandb.Table(
                columns=["layer", "head", "pi"], data=[list(gate) for gate in gates]
            )
            row["pi_picture"] = wandb.Image(_pixels(gates, step))
        return row

    def conclude(self, result: dict[str, Any], folder: RunFolder) -> None:
        """The result becomes the run's summary, articles.json a file of the run, and, where uploads are on,
        the checkpoint an artifact."""
        self._safely(lambda: self.run.summary.update(dict(flat(result, "/"))))
        self._safely(lambda: self._keep(folder.articles))
        if self.upload:
            self._safely(lambda: self._put_up(result, folder.last, folder.tokenizer))

    def _keep(self, file: Path) -> None:
        """A file of the run, as a copy among its records: these may be moved before they are synced."""
        place = self.run.dir
        copy = shutil.copyfile(file, Path(place) / file.name)
        self.run.save(str(copy), base_path=place, policy="now")

    def _put_up(self, result: dict[str, Any], checkpoint: Path, tokenizer: Path) -> None:
        """The checkpoint, to go on from, beside the model as an export, to use."""
        with TemporaryDirectory(dir=checkpoint.parent, prefix="artifact.", suffix=PARTIAL) as place:
            try:
                save_export(checkpoint, Path(place) / self.run.name.replace("/", "-"), result)
                files = [checkpoint, *sorted(Path(place).glob("*/*"))]
            except InputError as error:
                print(f"the artifact has no export, but the checkpoint alone ({error})")
                files = [checkpoint, tokenizer]
            artifact = self.run.log_artifact(to_be_uploaded(self.run.name, result, files))
            artifact.wait(timeout=UPLOAD_SECONDS)
        note_artifact(checkpoint, f"{artifact.qualified_name.rpartition(':')[0]}:{artifact.version}")

    def uses(self, checkpoint: str) -> None:
        """Record which artifact the run started from, if the checkpoint is one."""
        source = artifact_source(checkpoint)
        if source is None or self.offline or self._broken:
            return
        try:
            self.run.use_artifact(source)
        except Exception as error:  # deleted since, or another account's: no reason to record nothing
            print(f"W&B does not give {source} ({first_line(error)}): the run is recorded without its origin")

    def finish(self, failed: bool) -> None:
        """End the run, so that the next job begins its own; one line says how to sync what stayed here."""
        if self.run is None:
            return
        # Even where W&B has failed: a run that is not ended would take the next job's rows.
        failed_before, self._broken = self._broken, False
        self._safely(lambda: self.run.finish(exit_code=int(failed)))
        if self.offline or self._broken or failed_before:
            # This start's alone: it has all that W&B lacked, and a record that a kill cut off stops the sync.
            record = Path(self.run.dir).parent
            print(f"W&B records are on disk; to sync them: wandb sync --include-online {record}")

    def _safely(self, call: Callable[[], Any]) -> None:
        """Do it, unless W&B has failed before; its first failure, of whatever kind, is the last attempt."""
        if self._broken:
            return
        try:
            call()
        except Exception as error:
            self._broken = True
            print(f"W&B failed ({first_line(error)}): the run goes on without it; metrics.csv has every row")


def _pixels(gates: list[tuple[int, int, float]], step: int) -> Any:
    """The picture of pi as an (height, width, 4) array of bytes."""
    layers, heads = 1 + max(layer for layer, _, _ in gates), 1 + max(head for _, head, _ in gates)
    pi = [[math.nan] * heads for _ in range(layers)]
    for layer, head, value in gates:
        pi[layer][head] = value
    return pi_pixels(pi, f"pi at step {step}")


def check_login(config: LoggerConfig, logged_in: bool) -> None:
    """Refuse an online run that has nobody to be online as.

    Raises:
        InputError: there is no login.
    """
    if config.wandb is WandbMode.online and not logged_in:
        raise InputError("logger=online needs a W&B login: run `wandb login`, or use logger=auto or offline")


def _run_id(folder: Path) -> str:
    """The id under which a resumed job finds its run; a W&B agent gives its own."""
    path = folder / "wandb_run_id"
    if not path.exists():
        write_atomically(path, agents_id(os.environ) or uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8")
