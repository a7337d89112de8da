"""A model as a Hugging Face folder: allattn export checkpoint=PATH folder=OUT."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from allattn.commands.opened import SavedSettings, open_saved
from allattn.commands.run_command import Command
from allattn.errors import InputError
from allattn.families import all_attention
from allattn.model.counts import count_parameters
from allattn.training.exports import EXPORT_VERSION, write_export
from allattn.training.model_card import CardLabels, record_in, result_of


@dataclass
class ExportSettings(SavedSettings):
    """Settings of the command."""

    folder: str = MISSING  # is created
    license: str = "unknown"  # for the model card: an identifier of the hub, such as apache-2.0
    language: str | None = None  # for the model card, such as en; null = the text's, where it is a known one


def export(settings: ExportSettings) -> Path:
    """Write the export and say what is in it.

    Raises:
        InputError: the checkpoint cannot be used, or the folder exists or cannot be written.
    """
    folder = Path(settings.folder)
    opened = open_saved(settings.checkpoint, settings.device, settings.progress)
    if opened.path.is_dir() and opened.meta["format_version"] == EXPORT_VERSION:
        raise InputError(f"{opened.path}: is an export already; copy the folder, or give a checkpoint")
    record = record_in(result_of(opened.path), opened.model, opened.meta)
    labels = CardLabels(settings.license, settings.language)
    ours = all_attention(opened.model, "export")
    model = write_export(ours, opened.meta, opened.tokenizer(), folder, labels, record)
    config = model.config
    print(
        f"{folder}: {config.heads_kept_total} of {config.heads_total} heads, "
        f"{count_parameters(model).total:,} parameters, s_g inside WO"
    )
    return folder


COMMAND = Command("export", ExportSettings, export)
