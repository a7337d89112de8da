"""Every environment variable of W&B is decided on, and does what the table says."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml

from allattn.errors import InputError
from allattn.training.config import LoggerConfig, WandbMode
from allattn.training.wandb_run import WandbRun
from allattn.training.wandb_variables import RULES, Rule, agents_id, hidden, with_variables

DOCS = Path(__file__).parents[2] / "docs" / "wandb-variables.md"
# In W&B's documentation but not among the client's constants.
DOCUMENTED = {"WANDB_CONSOLE", "WANDB_FORK_FROM", "WANDB_LAUNCH", "WANDB_REINIT", "WANDB_RESUME_FROM"}
# Values that the client would believe, where any text is not one.
BELIEVABLE = {
    "WANDB_RESUME": "must",
    "WANDB_RESUME_FROM": "intruder?_step=1",
    "WANDB_FORK_FROM": "intruder?_step=1",
    "WANDB_REINIT": "create_new",
    "WANDB_LAUNCH": "true",
    "WANDB_SILENT": "false",
    "WANDB_QUIET": "false",
    "WANDB_INIT_TIMEOUT": "1",
    "WANDB_SHOW_RUN": "true",
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    yield
    wandb.teardown()


def of(*rules: Rule) -> list[str]:
    return [name for name, (rule, _) in RULES.items() if rule in rules]


def recorded(folder: Path) -> WandbRun:
    folder.mkdir(exist_ok=True)
    config = LoggerConfig(project="ours")
    return WandbRun(config, folder, "name", "prune", ["tag"], {"a": 1}, offline=True)


def test_every_variable_of_the_client_is_decided_on() -> None:
    known = {value for value in vars(wandb.env).values() if isinstance(value, str)}
    known = {value for value in known if re.fullmatch(r"WANDB_\w+", value)} | DOCUMENTED
    assert known <= RULES.keys()


def test_the_docs_show_the_table() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {rule.value} | {text} |" for name, (rule, text) in RULES.items()]


def test_what_is_kept_out_does_not_reach_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once; the agent's variables without an agent's run, as an id that was exported is."""
    unheard = [name for name in of(Rule.kept_out, Rule.agent) if name != "WANDB_SWEEP_ID"]
    unheard.remove("WANDB_LAUNCH")
    for name in unheard:
        monkeypatch.setenv(name, BELIEVABLE.get(name, "intruder"))
    one, two = (recorded(tmp_path / name) for name in ("one", "two"))
    settings = two.run.settings
    two.finish(failed=False)
    assert one.run.id != two.run.id == (tmp_path / "two" / "wandb_run_id").read_text()
    assert (two.run.name, two.run.job_type, two.run.project) == ("name", "prune", "ours")
    assert dict(two.run.config) == {"a": 1}
    assert (settings.resume, settings.fork_from, settings.resume_from) == (None, None, None)
    assert "intruder" not in str(settings)
    assert all(os.environ[name] == BELIEVABLE.get(name, "intruder") for name in unheard), "given back"


def test_an_agents_variables_alone_are_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in of(Rule.kept_out, Rule.agent, Rule.client, Rule.setting):
        monkeypatch.setenv(name, "value")
    with hidden(agents_run=False):
        assert {name for name in RULES if name in os.environ} == set(of(Rule.client, Rule.setting))
    with hidden(agents_run=True):
        assert {name for name in RULES if name in os.environ} == set(RULES) - set(of(Rule.kept_out))


def test_the_run_of_a_sweep_agent_is_the_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_SWEEP_ID": "sweep", "WANDB_RUN_ID": "first"}.items():
        monkeypatch.setenv(name, value)
    run = recorded(tmp_path / "run")
    assert (run.run.id, run.run.settings.sweep_id) == ("first", "sweep")
    run.finish(failed=False)
    monkeypatch.setenv("WANDB_RUN_ID", "second")  # the agent's next one, in the same folder by mistake
    run = recorded(tmp_path / "run")
    assert (run.run.id, run.run.settings.sweep_id) == ("first", None)
    run.finish(failed=False)


def test_an_id_without_an_agent_is_nobodys() -> None:
    assert agents_id({"WANDB_RUN_ID": "a"}) is None
    assert agents_id({"WANDB_SWEEP_ID": "s"}) is None
    assert agents_id({"WANDB_RUN_ID": "a", "WANDB_LAUNCH": "true"}) == "a"


def test_variables_give_what_no_setting_does() -> None:
    given = {
        "WANDB_PROJECT": "project",
        "WANDB_ENTITY": "lab",
        "WANDB_RUN_GROUP": "group",
        "WANDB_TAGS": "a, b,,a",
        "WANDB_MODE": "offline",
    }
    found = with_variables(LoggerConfig(tags=["b", "c"]), given)
    assert found == LoggerConfig(WandbMode.offline, "project", "lab", "group", ["b", "c", "a"])
    own = LoggerConfig(WandbMode.none, "own", "me", "mine", [])
    assert with_variables(own, given | {"WANDB_TAGS": ""}) == own
    assert with_variables(LoggerConfig(), {}).project == "allattn"
    assert with_variables(LoggerConfig(WandbMode.online), {"WANDB_MODE": "disabled"}).wandb is WandbMode.none


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"WANDB_TAGS": "a," + "b" * 65}, r"logger\.tags .*1 to 64 characters, and 'bbb.* has 65"),
        ({"WANDB_PROJECT": "p" * 129}, r"logger\.project .*at most 128 characters"),
        ({"WANDB_RUN_GROUP": "g" * 129}, r"logger\.group .*at most 128 characters"),
        ({"WANDB_PROJECT": "lab/own"}, r"logger\.project=lab/own .* takes no / in it"),
    ],
)
def test_names_that_wandb_does_not_take_are_refused_before_training(
    given: dict[str, str], named: str
) -> None:
    """Offline as online; where W&B is off they do not matter. The client's own rules are no looser."""
    for mode in (WandbMode.online, WandbMode.offline):
        with pytest.raises(InputError, match=named):
            with_variables(LoggerConfig(mode), given)
    with_variables(LoggerConfig(WandbMode.none), given)
    longest = {"WANDB_TAGS": "b" * 64, "WANDB_PROJECT": "p" * 128, "WANDB_RUN_GROUP": "g" * 128}
    taken = with_variables(LoggerConfig(), longest)
    wandb.Settings(project=taken.project, run_tags=taken.tags, run_group=taken.group)


@pytest.mark.parametrize(
    ("mode", "named"), [("offline", "contradicts WANDB_MODE=offline"), ("shared", "must be online")]
)
def test_a_mode_that_cannot_be_obeyed_is_refused(mode: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        with_variables(LoggerConfig(WandbMode.online), {"WANDB_MODE": mode})


def test_a_run_says_and_does_what_the_variables_gave(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "records"
    records.mkdir()
    given = {
        "WANDB_PROJECT": "theirs",
        "WANDB_TAGS": "tag",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(records),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = runs.pretraining("run", schedule__steps=3, logger__wandb=WandbMode.auto)
    folder = runs.run(settings)
    logger = yaml.safe_load(folder.config.read_text())["logger"]
    assert (logger["project"], logger["tags"], logger["wandb"]) == ("theirs", ["tag"], "offline")
    (record,) = records.glob("wandb/offline-run-*/*.wandb")
    assert b"theirs" in record.read_bytes()
    assert not (folder.path / "wandb").exists()
