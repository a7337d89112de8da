"""Pretrain an All-attention language model: allattn train [experiment=...] [setting=value ...]."""

from typing import Any

from allattn.commands.run_command import Command
from allattn.settings import PretrainSettings, pretrain_settings


def train(settings: PretrainSettings) -> dict[str, Any]:
    """Data, model, fit, score, summary (see `allattn.stages.pretrain`)."""
    from allattn.stages import pretrain  # after the settings are checked: torch takes seconds to import

    return pretrain(settings)


COMMAND = Command("train", PretrainSettings, train, pretrain_settings, in_files=True)
