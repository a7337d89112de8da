"""Pretrain an All-attention language model: python train.py [experiment=...] [setting=value ...]."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from allattn.commands.run_command import run_command
from allattn.settings import PretrainSettings, pretrain_settings, register


def main(config: DictConfig) -> dict[str, Any]:
    """Check the settings, then data, model, fit, score, summary (see `allattn.stages.pretrain`)."""
    settings = pretrain_settings(config)
    from allattn.stages import pretrain  # after the check: torch and lightning take seconds to import

    return pretrain(settings)


if __name__ == "__main__":
    register()
    run_command(main, "train", Path(__file__).parent / "conf", PretrainSettings)
