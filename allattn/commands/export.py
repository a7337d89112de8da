"""A model as a Hugging Face folder: allattn export checkpoint=PATH folder=OUT."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from allattn.commands.opened import Opened, SavedSettings, open_saved
from allattn.commands.run_command import Command
from allattn.errors import InputError
from allattn.families import all_attention
from allattn.model.counts import count_parameters
from allattn.pretrained.language_model import PretrainedLM
from allattn.training.exports import EXPORT_VERSION, write_export
from allattn.training.model_card import CardLabels, record_in, result_of


@dataclass
class ExportSettings(SavedSettings):
    """Settings of the command."""

    folder: str = MISSING  # is created
    license: str = "unknown"  # for the model card: an identifier of the hub, such as apache-2.0
    language: str | None = None  # for the model card, such as en; null = the text's, where it is a known one
    form: str | None = None  # of a pretrained model: uniform, per_layer or masked; see docs/pretrained.md


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
    if isinstance(opened.model, PretrainedLM):
        return _export_pretrained(settings, opened, opened.model, folder)
    if settings.form is not None:
        raise InputError(f"form={settings.form}: is for pretrained models; ours have one form")
    labels = CardLabels(settings.license, settings.language)
    ours = all_attention(opened.model, "export")
    model = write_export(ours, opened.meta, opened.tokenizer(), folder, labels, record)
    config = model.config
    print(
        f"{folder}: {config.heads_kept_total} of {config.heads_total} heads, "
        f"{count_parameters(model).total:,} parameters, s_g inside WO"
    )
    return folder


def _export_pretrained(settings: ExportSettings, opened: Opened, model: PretrainedLM, folder: Path) -> Path:
    """Write a pretrained model without its closed heads in one of the forms of a removal."""
    from allattn.huggingface.pruned import pruned_card, write_pruned
    from allattn.huggingface.removal import Form

    if settings.form not in [form.value for form in Form]:
        raise InputError(
            f"form={settings.form}: a pretrained model is written as one of "
            f"{', '.join(form.value for form in Form)}"
        )
    card = pruned_card(folder.name, model, settings.form, settings.license, result_of(opened.path))
    network = write_pruned(model.cpu(), opened.tokenizer(), folder, Form(settings.form), card)
    sizes = model.config
    print(
        f"{folder}: {sizes.heads_kept_total} of {sizes.heads_total} heads, form {settings.form}, "
        f"{sum(p.numel() for p in network.parameters()):,} parameters, s_g inside WO"
    )
    return folder


COMMAND = Command("export", ExportSettings, export)
