"""A model as a folder that loads without unpickling: allattn export checkpoint=PATH folder=OUT."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from allattn.commands.run_command import Command
from allattn.model.counts import count_parameters
from allattn.training.artifacts import local_checkpoint
from allattn.training.exports import save_export


@dataclass
class ExportSettings:
    """Settings of the command."""

    checkpoint: str = MISSING  # dense, cut, or of the gate phase; its tokenizer.json lies beside it
    folder: str = MISSING  # is created


def export(settings: ExportSettings) -> Path:
    """Write the export and say what is in it.

    Raises:
        InputError: the checkpoint cannot be used, or the folder exists or cannot be written.
    """
    folder = Path(settings.folder)
    model = save_export(local_checkpoint(settings.checkpoint), folder)
    config = model.config
    print(
        f"{folder}: {config.heads_kept_total} of {config.heads_total} heads, "
        f"{count_parameters(model).total:,} parameters, s_g inside WO"
    )
    return folder


COMMAND = Command("export", ExportSettings, export)
