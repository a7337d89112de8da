"""Command lines, run in this process."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from allattn.commands.command_line import main


@dataclass(frozen=True)
class Ended:
    """What a command left: exit status, both outputs, and the settings of each job that was only noted."""

    status: int
    out: str
    err: str
    seen: list[Any]


CommandLine = Callable[..., Ended]


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
