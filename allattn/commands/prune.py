"""Prune heads from a pretrained model: allattn prune checkpoint=PATH [setting=value ...]."""

from typing import Any

from allattn.commands.run_command import Command
from allattn.settings import PruneSettings, prune_settings


def prune(settings: PruneSettings) -> dict[str, Any]:
    """Gates, fit, removal, fit, score, summary (see `allattn.stages.prune`)."""
    from allattn import stages  # after the settings are checked: torch takes seconds to import

    return stages.prune(settings)


COMMAND = Command("prune", PruneSettings, prune, prune_settings, in_files=True)
