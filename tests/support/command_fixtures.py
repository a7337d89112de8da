"""Command lines, run in this process."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from allattn.commands.command_line import main
from allattn.settings import register

CONF = Path(__file__).resolve().parents[2] / "conf"


@dataclass(frozen=True)
class Ended:
    """What a command left: exit status, both outputs, and the settings of each job that was only noted."""

    status: int
    out: str
    err: str
    seen: list[Any]


CommandLine = Callable[..., Ended]


@cache
def _composed_settings(command: str) -> DictConfig:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(command, ["checkpoint=last.ckpt"] if command == "prune" else [])


def changed_settings(command: str, *overrides: str) -> DictConfig:
    """A command's own settings, composed once, with some changed (`a.b=value`, no groups)."""
    config = _composed_settings(command).copy()
    config.merge_with_dotlist(list(overrides))
    return config


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hydra's state and files belong to one test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    register()
    yield
    GlobalHydra.instance().clear()


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[CommandLine]:
    """`allattn WORDS` in the test's own folder; `do` takes the place of what the command does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # run_command sets it; it does not outlive the test

    def run(*words: str, do: Callable[[Any], Any] | None = None) -> Ended:
        monkeypatch.setattr(sys, "argv", ["allattn", *words])
        status, seen = 0, []
        with monkeypatch.context() as patch:
            if do is not None:
                module = import_module(f"allattn.commands.{words[0]}")
                noting = replace(module.COMMAND, do=lambda settings: (seen.append(settings), do(settings)))
                patch.setattr(module, "COMMAND", noting)
            try:
                main()
            except SystemExit as end:
                status = int(end.code or 0)
        return Ended(status, *capsys.readouterr(), seen)

    yield run
    GlobalHydra.instance().clear()


@pytest.fixture
def composed(command_line: CommandLine) -> CommandLine:
    """`allattn WORDS` up to the checked settings of each job, which are noted in `seen`."""
    return lambda *words: command_line(*words, do=lambda settings: None)
