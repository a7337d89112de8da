"""A model as a folder that loads without unpickling: allattn export checkpoint=PATH folder=OUT."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from allattn.commands.opened import SavedSettings, open_saved
from allattn.commands.run_command import Command
from allattn.errors import InputError
from allattn.model.counts import count_parameters
from allattn.training.exports import write_export


@dataclass
class ExportSettings(SavedSettings):
    """Settings of the command."""

    folder: str = MISSING  # is created


def export(settings: ExportSettings) -> Path:
    """Write the export and say what is in it.

    Raises:
        InputError: the checkpoint cannot be used, or the folder exists or cannot be written.
    """
    folder = Path(settings.folder)
    opened = open_saved(settings.checkpoint, settings.device, settings.progress)
    if opened.path.is_dir():
        raise InputError(f"{opened.path}: is an export already; copy the folder, or give a checkpoint")
    model = write_export(opened.model, opened.meta, opened.tokenizer(), folder)
    config = model.config
    print(
        f"{folder}: {config.heads_kept_total} of {config.heads_total} heads, "
        f"{count_parameters(model).total:,} parameters, s_g inside WO"
    )
    return folder


COMMAND = Command("export", ExportSettings, export)
