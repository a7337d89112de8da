"""Values with characters that mean something to Hydra, and `~` in paths."""

import pwd
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from support.command_fixtures import CommandLine

from allattn.commands.command_line import COMMANDS, named_command
from allattn.commands.mistakes import setting_kinds
from allattn.commands.overrides import parsed, quoted
from allattn.commands.paths import PATHS
from allattn.errors import InputError
from allattn.settings import PruneSettings

KINDS = setting_kinds(PruneSettings) | {"runs": list[str] | None}
NO_PATHS = {"ablation", "device", "entity", "group", "heads", "name", "precision", "project", "prompt"}
NO_PATHS |= {"accelerator", "core", "strategy", "tags", "vary", "wandb"}  # last parts of their names
NO_PATHS |= {"language", "license"}  # of a model card
NO_PATHS |= {"form", "projection", "score"}


def advised(typed: str) -> list[str]:
    """What the refusal of an override says to type instead, as a shell hands it on."""
    with pytest.raises(InputError) as refusal:
        parsed([typed], KINDS)
    message = str(refusal.value)
    assert message.startswith(f"{typed}: ")
    return shlex.split(message.removeprefix(f"{typed}: ").partition(": ")[2])


MARKS = [f"/texts/a{mark}b" for mark in "=()[]{}#&!'~;<>`^\""]


@pytest.mark.parametrize("value", [*MARKS, "größe", "[a]", "{a}", "a,b", "1e3", "TRUE", "f(x)"])
def test_advised_quotes_give_the_text_as_it_is(value: str) -> None:
    (override,) = parsed(advised(f"data.folder={value}"), KINDS)
    assert override.value() == value


def test_advised_list_has_quotes_around_each_part() -> None:
    (override,) = parsed(advised("runs=[~/a,b(1)]"), KINDS)
    assert override.value() == ["~/a", "b(1)"]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_quotes_protect_every_text(value: str) -> None:
    found = OverridesParser.create().parse_override(quoted(f"name={value}")).value()
    assert str(found).replace("\\${", "${") == value.replace("\\${", "${"), "OmegaConf reads \\${ as ${"


@pytest.mark.parametrize("typed", ["demo", "a b=1", "=5", "ü=1"])
def test_what_is_no_setting_is_said_to_be_none(typed: str) -> None:
    with pytest.raises(InputError, match="is no setting; settings are given as name=value"):
        parsed([typed], KINDS)


def test_several_values_without_a_multirun_are_refused() -> None:
    with pytest.raises(InputError, match=r"seed=1,2: gives several values; add -m"):
        parsed(["seed=1,2"], KINDS)
    assert len(parsed(["-m", "seed=1,2", "name=a,b"], KINDS)) == 2


def test_flags_of_hydra_and_their_values_are_left_alone() -> None:
    assert parsed(["--config-dir", "/a=(b)", "--cfg", "job", "--info", "config"], KINDS) == []


def test_advice_works_at_the_command_line(composed: CommandLine, tmp_path: Path) -> None:
    """From the refusal to the settings of the run, carriage returns of a script stripped."""
    typed = ["experiment=demo\r", "data=files", f"data.folder={tmp_path}/größe (1)\r"]
    refused = composed("train", *typed)
    assert (refused.status, refused.seen, refused.err.count("\n")) == (2, [], 1)
    (word,) = shlex.split(refused.err.rpartition("quotes: ")[2])
    done = composed("train", *typed[:2], f"{word}\r")
    assert done.status == 0, done.err
    assert done.seen[0].data.folder == f"{tmp_path}/größe (1)"


def test_a_choice_that_is_not_there_is_one_short_line(composed: CommandLine) -> None:
    done = composed("train", "experiment=dmo")
    assert (done.status, done.err) == (2, "error: there is no experiment=dmo; did you mean demo?\n")


# --- home folder


def test_every_text_setting_is_a_path_or_not() -> None:
    """A new one must be put into PATHS, or here."""
    for name in COMMANDS:
        kinds = setting_kinds(named_command(name).schema)
        for setting, kind in kinds.items():
            if "str" in str(kind):
                assert (setting in PATHS) != (setting.split(".")[-1] in NO_PATHS), setting


def test_flags_may_stand_between_settings(composed: CommandLine) -> None:
    done = composed("train", "experiment=demo", "-m", "seed=1,2", "--config-dir", ".", "name=several")
    assert done.status == 0, done.err
    assert [settings.seed for settings in done.seen] == [1, 2]


@pytest.mark.parametrize("path", ["~/a", '"~/a"'])
def test_home_is_put_into_every_path(
    composed: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("checkpoint", "runs_folder", "data.tokenizer", "data.cache_folder")
    (pruning,) = composed("prune", *(f"{name}={path}" for name in names)).seen
    files = [f"data.{split}_file={path}" for split in ("train", "valid", "test")]
    (training,) = composed("train", "data=files", *files, "data.minimum_count=1").seen
    (heads,) = composed("heads", f"checkpoint={path}", f"picture={path}").seen
    (compared,) = composed("compare", 'runs=["~/a",b]', f"folder={path}").seen
    data = training.data
    found: list[Any] = [pruning.checkpoint, pruning.runs_folder, pruning.data.tokenizer]
    found += [pruning.data.cache_folder, data.train_file, data.valid_file, data.test_file]
    found += [heads.checkpoint, heads.picture, compared.runs[0], compared.folder]
    assert set(found) == {f"{tmp_path}/a"}
    assert data.cache_folder == f"{tmp_path}/.cache/allattn", "defaults too"
    assert compared.runs[1] == "b"


def test_without_a_home_the_cache_folder_is_asked_for(
    composed: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_entry(_: int) -> Any:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    refused = composed("train", "experiment=demo")
    assert (refused.status, refused.seen) == (2, [])
    assert refused.err.count("\n") == 1
    assert refused.err.startswith("error: data.cache_folder=~/.cache/allattn: ~ stands for no folder here")
    assert composed("train", "experiment=demo", f"data.cache_folder={tmp_path}").status == 0
