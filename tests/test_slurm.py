"""The Slurm launcher's settings are ones that the submitit plugin knows."""

from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from allattn.settings import register

CONF = Path(__file__).parents[1] / "conf"


def test_slurm_launcher_composes() -> None:
    pytest.importorskip(
        "hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed"
    )
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", ["hydra/launcher=slurm", "trainer.devices=8"], return_hydra_config=True)
    launcher = config.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.gpus_per_node, launcher.tasks_per_node) == (8, 8)


def test_slurm_file_names_its_plugin() -> None:
    settings = yaml.safe_load((CONF / "hydra/launcher/slurm.yaml").read_text())
    assert settings["defaults"] == ["submitit_slurm"]
    assert settings["tasks_per_node"] == settings["gpus_per_node"] == "${trainer.devices}"
