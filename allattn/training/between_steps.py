"""What happens between optimizer steps: log, evaluate, save, stop. Always in that order."""

import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from allattn.errors import InputError
from allattn.files import copy_atomically
from allattn.training.language_task import LanguageTask
from allattn.training.run_folder import RunFolder
from allattn.training.scoring import Score
from allattn.training.sharding import is_finite
from allattn.training.signals import StopSignals
from allattn.training.utilization import utilization

MOST_SKIPPED = 24  # in a row: fp16's loss scale begins at 2**16 and is halved each time


class BetweenSteps(Callback):
    """Logs every `log_interval` steps, scores the validation split, and keeps last.ckpt and best.ckpt.

    Args:
        signals: that tell the run to stop.
        folder: the run folder.
        evaluate: scores the validation split with the task's model as it is.
        last_step: optimizer step at which this fit ends; it is always evaluated and saved.
        log_interval: optimizer steps between rows of metrics.
        evaluation_interval: optimizer steps between scorings; 0 = only at the end.
        checkpoint_interval: optimizer steps between checkpoints.
        tokens_per_step: B * T.
        peak: FLOP/s of all devices together; None = unknown, and no mfu in the rows.
    """

    def __init__(
        self,
        signals: StopSignals,
        folder: RunFolder,
        evaluate: Callable[[LanguageTask], Score],
        last_step: int,
        log_interval: int,
        evaluation_interval: int,
        checkpoint_interval: int,
        tokens_per_step: int,
        peak: float | None = None,
    ) -> None:
        self.signals = signals
        self.folder = folder
        self.evaluate = evaluate
        self.last_step = last_step
        self.log_interval = log_interval
        self.evaluation_interval = evaluation_interval
        self.checkpoint_interval = checkpoint_interval
        self.tokens_per_step = tokens_per_step
        self.peak = peak
        self._step = -1
        self._skipped = 0  # updates in a row whose gradient was not finite
        self._timed_from = (0.0, 0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count steps and time from here."""
        self._step = trainer.global_step
        self._timed_from = (time.perf_counter(), self._step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After each optimizer step: log, evaluate, save, stop."""
        assert isinstance(pl_module, LanguageTask)
        step = trainer.global_step
        if step == self._step:
            return  # between the micro-batches of one step
        self._step = step
        ends = step == self.last_step
        logs = step % self.log_interval == 0 or ends
        evaluates = ends or (self.evaluation_interval and step % self.evaluation_interval == 0)
        stopping = self._stopping(trainer)
        saves = ends or stopping or step % self.checkpoint_interval == 0
        if logs or evaluates or saves or _reading_is_free(trainer):
            self._check_finite(trainer, pl_module, step)
        row: dict[str, Any] = self._training_row(pl_module, step) if logs else {}
        improved = False
        if evaluates:
            score = self.evaluate(pl_module)
            row |= {"valid_loss": score.loss, "valid_perplexity": score.perplexity}
            row |= pl_module.gates.scoring_metrics()
            improved = score.loss < pl_module.best
            pl_module.best = min(pl_module.best, score.loss)
        if row:
            for logger in trainer.loggers:
                logger.log_metrics(row, step)
        if saves or improved:
            self._check_weights(pl_module, step)
            # The best first: a kill in between leaves an older last.ckpt, from which the best comes again.
            trainer.save_checkpoint(self.folder.best if improved else self.folder.last)
            if improved:
                if trainer.is_global_zero:
                    copy_atomically(self.folder.best, self.folder.last)
                trainer.strategy.barrier()  # the others read last.ckpt at the freeze
        if evaluates:
            self._timed_from = (time.perf_counter(), step)
        if stopping:
            self.signals.received = self.signals.received or signal.SIGTERM  # another process was told
            trainer.should_stop = True

    def _training_row(self, task: LanguageTask, step: int) -> dict[str, float]:
        row = task.step_metrics()
        began, first = self._timed_from
        now = time.perf_counter()
        row["tokens_seen"] = task.tokens_seen()
        row["tokens_per_second"] = (step - first) * self.tokens_per_step / (now - began)
        if self.peak:
            config, length = task.model.config, task.schedule.segment_length
            row["mfu"] = utilization(config, length, row["tokens_per_second"], self.peak)
        row["peak_memory_gib"] = _peak_memory(task.device) / 2**30
        self._timed_from = (now, step)
        speed = f"{row['tokens_per_second']:,.0f} tok/s"
        perplexity = f"{row['perplexity']:{'.1f' if row['perplexity'] < 1e5 else '.1e'}}"
        task.shown = f"loss {row['loss']:.3f}  ppl {perplexity}  {speed}"
        return row

    def _stopping(self, trainer: L.Trainer) -> bool:
        """Whether any process was told to stop."""
        told = self.signals.received is not None
        return bool(trainer.strategy.reduce_boolean_decision(told, all=False))

    def _check_finite(self, trainer: L.Trainer, task: LanguageTask, step: int) -> None:
        """Stop at a loss or a gradient that is not finite, before anything is saved of it.

        Under fp16 a few such gradients are expected: their updates are skipped and the loss scale is halved.
        """
        finite = {name: is_finite(task.last[name]) for name in ("loss", "gradient_norm")}
        self._skipped = 0 if finite["gradient_norm"] else self._skipped + 1
        skipped = trainer.precision == "16-mixed" and self._skipped <= MOST_SKIPPED
        if not finite["loss"]:
            self._stop("the loss", task, step)
        if not finite["gradient_norm"] and not skipped:
            self._stop("the gradient", task, step)

    def _check_weights(self, task: LanguageTask, step: int) -> None:
        for name, parameter in task.named_parameters():
            if not is_finite(parameter):
                self._stop(f"the weight {name}", task, step)

    def _stop(self, what: str, task: LanguageTask, step: int) -> NoReturn:
        raise InputError(
            f"{what} is not finite at step {step} (learning rate {task.last['learning_rate']:.3g}); "
            f"{self.folder.last_saved()}; lower optimizer.learning_rate or optimizer.gradient_clip"
        )


def _reading_is_free(trainer: L.Trainer) -> bool:
    """Whether a number of this step is at hand; on a GPU asking for it waits for the step's end."""
    return trainer.strategy.root_device.type == "cpu" or trainer.precision == "16-mixed"


def _peak_memory(device: torch.device) -> int:
    """Most bytes held so far: by tensors on a GPU, by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kib_or_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib_or_bytes * (1 if sys.platform == "darwin" else 1024)
