"""Prune heads from a pretrained model: python prune.py checkpoint=PATH [setting=value ...]."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from allattn.commands.run_command import run_command
from allattn.settings import PruneSettings, prune_settings, register


def main(config: DictConfig) -> dict[str, Any]:
    """Check the settings, then gates, fit, removal, fit, score, summary (see `allattn.stages.prune`)."""
    settings = prune_settings(config)
    from allattn.stages import prune  # after the check: torch and lightning take seconds to import

    return prune(settings)


if __name__ == "__main__":
    register()
    run_command(main, "prune", Path(__file__).parent / "conf", PruneSettings)
