"""A saved model as a command works on it: of a checkpoint, an export's folder, or an artifact of W&B."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from rich.console import Console

from allattn.errors import InputError, first_line
from allattn.model.gated import GatedLM
from allattn.training.artifacts import local_checkpoint
from allattn.training.checkpoints import read_checkpoint
from allattn.training.exports import export_record, load_export
from allattn.training.loading import checked_tokenizer, rebuild
from allattn.training.run_folder import RunFolder
from allattn.training.weight_files import WEIGHTS_FILE


@dataclass
class SavedSettings:
    """What every command on a saved model takes."""

    checkpoint: str = MISSING  # of any phase; an export's folder; wandb:...; huggingface:ORG/NAME
    device: str = "auto"  # cpu, cuda or cuda:N; auto = a GPU if there is one
    progress: bool = True  # say on a terminal what takes long


@dataclass(frozen=True)
class Opened:
    """A saved model, and what is known of it."""

    path: Path  # the checkpoint, or the export's folder
    model: GatedLM  # in evaluation mode; of the gate phase, without its closed heads
    meta: dict[str, Any]  # what a checkpoint's entry `allattn` says about such a model
    checkpoint: dict[str, Any]  # as it was read; an export's has no weights, its phase is "export"

    def tokenizer(self) -> Path:
        """Its vocabulary's file.

        Raises:
            InputError: it is missing, or it belongs to another vocabulary.
        """
        weights = self.path / WEIGHTS_FILE if self.path.is_dir() else self.path
        return checked_tokenizer(weights, self.checkpoint)


def open_saved(checkpoint: str, device: str, progress: bool) -> Opened:
    """Open what `SavedSettings` name.

    Raises:
        InputError: the device cannot be used, or there is no such model, or it is damaged.
    """
    where = device_named(device)
    shown = progress and sys.stderr.isatty()
    with Console(stderr=True, quiet=not shown).status(f"reading {checkpoint}"):
        path = local_checkpoint(checkpoint)
        if (last := RunFolder(path).last).exists():
            raise InputError(f"{path}: is a run's folder; give its checkpoint, {last}")
        if path.is_dir():
            model = load_export(path)
            meta = {**export_record(path), "phase": "export", "step": None}
            opened = Opened(path, model, meta, {"allattn": meta})
        else:
            read = read_checkpoint(path)
            loaded = rebuild(read, path)
            opened = Opened(path, loaded.model.eval(), loaded.meta, read)
        try:
            opened.model.to(where)
        except RuntimeError as error:
            raise InputError(f"device={device}: does not take the model ({first_line(error)})") from None
    return opened


def device_named(name: str) -> torch.device:
    """The device that a setting names.

    Raises:
        InputError: there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device={name} cannot be used here ({first_line(error)}); give auto, cpu, cuda or cuda:N"
        ) from None
    return device
