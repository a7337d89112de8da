"""What a run shows on standard error: a bar on a terminal, lines where the output is a file or a pipe."""

import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from operator import length_hint
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)
from rich.table import Column

from allattn.training.language_task import LanguageTask

LINE_SECONDS = 30.0  # between lines about work that has no steps

Item = TypeVar("Item")


def step_display(first: int, last_step: int, log_interval: int) -> Callback:
    """A bar, or lines where standard error is no terminal.

    Args:
        first: optimizer step from which the fit starts.
        last_step: optimizer step at which it ends.
        log_interval: optimizer steps between lines.
    """
    return StepBar(first, last_step) if sys.stderr.isatty() else StepLines(last_step, log_interval)


def watched(items: Iterable[Item], what: str, progress: bool) -> Iterator[Item]:
    """The items one by one, shown as they pass.

    Args:
        items: whose length is shown where it has one.
        what: is done with them.
        progress: show anything at all.
    """
    if not progress:
        yield from items
    elif sys.stderr.isatty():
        yield from track(items, what, console=Console(stderr=True), transient=True)
    else:
        total, last = length_hint(items), time.monotonic()
        for number, item in enumerate(items, 1):
            yield item
            if time.monotonic() - last >= LINE_SECONDS:
                _print(f"{what} {number}/{total}" if total else f"{what} {number}")
                last = time.monotonic()


class StepLines(Callback):
    """A line every `log_interval` optimizer steps with loss, perplexity, tokens/s and the time left."""

    def __init__(self, last_step: int, log_interval: int) -> None:
        self.last_step = last_step
        self.log_interval = log_interval
        self._began = (0.0, 0)
        self._shown = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Time runs from here."""
        self._shown = trainer.global_step
        self._began = (time.monotonic(), trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print where the step is one that is logged."""
        assert isinstance(pl_module, LanguageTask)
        step = trainer.global_step
        if step == self._shown or (step % self.log_interval and step != self.last_step):
            return
        self._shown = step
        if trainer.is_global_zero:
            began, first = self._began
            seconds = (time.monotonic() - began) / (step - first) * (self.last_step - step)
            left = timedelta(seconds=round(seconds))
            _print(f"{pl_module.phase.value} {step}/{self.last_step}  {pl_module.shown}  {left} left")


class StepBar(Callback):
    """One bar over the run's optimizer steps with loss, perplexity, tokens/s and the time left."""

    def __init__(self, first: int, last_step: int) -> None:
        self.columns = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # takes what the rest leaves
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            expand=True,
        )
        self.task = self.columns.add_task("training", total=last_step, completed=first, shown="")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bar in the first process."""
        assert isinstance(pl_module, LanguageTask)
        self.columns.update(self.task, description=pl_module.phase.value)
        if trainer.is_global_zero:
            self.columns.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on with every optimizer step."""
        assert isinstance(pl_module, LanguageTask)
        self.columns.update(self.task, completed=trainer.global_step, shown=pl_module.shown)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the finished bar on the screen."""
        self.columns.stop()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Give the terminal back before the error is printed."""
        self.columns.stop()


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
