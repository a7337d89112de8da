"""Exports made as the command makes them."""

from pathlib import Path
from typing import Any

from allattn.commands.export import ExportSettings, export
from allattn.model.language_model import AllAttentionLM
from allattn.training.exports import load_export


def save_export(checkpoint: Path, folder: Path, **labels: Any) -> AllAttentionLM:
    """Export a checkpoint; the exported model."""
    return load_export(export(ExportSettings(str(checkpoint), "cpu", folder=str(folder), **labels)))
