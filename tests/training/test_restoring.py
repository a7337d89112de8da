"""Damaged sections of a checkpoint that a run would go on from: named in one line, nothing saved is lost."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allattn.errors import InputError
from allattn.model.language_model import AllAttentionLM
from allattn.training.checkpoints import read_resumable
from allattn.training.config import OptimizerConfig, OptimizerName
from allattn.training.optimizers import lacks_moments, make_optimizer, moment_names, parameter_groups
from allattn.training.run_folder import RunFolder

Edit = Callable[[dict[str, Any]], Any]
JUNK = [None, 7, "x", [7], {"x": 7}, [{}], torch.zeros(2)]


def saved(checkpoint: dict[str, Any], path: Path) -> Path:
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize("section", ["optimizer_states", "loops", "lr_schedulers", "callbacks"])
def test_junk_in_any_section_names_the_section(dense_run: RunFolder, tmp_path: Path, section: str) -> None:
    good = torch.load(dense_run.last)
    read_resumable(saved(good, tmp_path / "good.ckpt"))
    for junk in JUNK:
        if section == "callbacks" and isinstance(junk, dict):
            continue  # of callbacks that this run does not have
        path = saved({**good, section: junk}, tmp_path / "last.ckpt")
        with pytest.raises(InputError) as refusal:
            read_resumable(path)
        assert f"last.ckpt: is damaged: no run can go on from its {section}" in str(refusal.value), junk
        assert "\n" not in str(refusal.value)


def _optimizer(checkpoint: dict[str, Any]) -> Any:
    return checkpoint["optimizer_states"][0]


def _progress(checkpoint: dict[str, Any]) -> Any:
    return checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]


INSIDE: dict[str, tuple[Edit, str]] = {
    "moment of another shape": (
        lambda c: _optimizer(c)["state"][0].update(exp_avg=torch.zeros(1)),
        "optimizer_states",
    ),
    "moment that is no number": (
        lambda c: _optimizer(c)["state"][0]["exp_avg"].view(-1)[0].fill_(torch.nan),
        "optimizer_states",
    ),
    "moment of integers": (
        lambda c: _optimizer(c)["state"][0].update(exp_avg=_optimizer(c)["state"][0]["exp_avg"].int()),
        "optimizer_states",
    ),
    "moment of text": (lambda c: _optimizer(c)["state"][0].update(exp_avg="x"), "optimizer_states"),
    "moments of no parameter": (lambda c: _optimizer(c)["state"].update({999: {}}), "optimizer_states"),
    "no groups": (lambda c: _optimizer(c).pop("param_groups"), "optimizer_states"),
    "no names": (lambda c: _optimizer(c)["param_groups"][0].pop("param_names"), "optimizer_states"),
    "two optimizers": (lambda c: c["optimizer_states"].append(_optimizer(c)), "optimizer_states"),
    "another step": (lambda c: c["allattn"].update(step=c["allattn"]["step"] - 1), "loops"),
    "no batches": (lambda c: c["loops"]["fit_loop"].pop("epoch_loop.batch_progress"), "loops"),
    "a count of text": (lambda c: _progress(c)["total"].update(ready="x"), "loops"),
    "a count less": (lambda c: _progress(c)["current"].pop("ready"), "loops"),
    "memory that is no number": (
        lambda c: c["allattn"]["memory"][0].view(-1)[0].fill_(torch.inf),
        "segment memory",
    ),
}


@pytest.mark.parametrize(("edit", "section"), INSIDE.values(), ids=INSIDE)
def test_damage_inside_a_section_names_it(
    dense_run: RunFolder, tmp_path: Path, edit: Edit, section: str
) -> None:
    checkpoint = torch.load(dense_run.last)
    edit(checkpoint)
    with pytest.raises(InputError, match=f"no run can go on from its {section}"):
        read_resumable(saved(checkpoint, tmp_path / "last.ckpt"))


WHILE_RESTORING: dict[str, tuple[Edit, str]] = {
    "first moments gone": (
        lambda c: [entries.pop("exp_avg") for entries in _optimizer(c)["state"].values()],
        "optimizer_states",
    ),
    "group gone": (lambda c: _optimizer(c)["param_groups"].pop(), "optimizer_states"),
    "progress of another kind": (lambda c: c["loops"]["fit_loop"].update(epoch_progress=7), "loops"),
}


def test_damage_found_while_restoring_names_it_and_loses_nothing(runs: Any, stop: Any) -> None:
    """What only Lightning or the optimizer can know; then the whole checkpoint goes on."""
    settings = runs.pretraining("stopped")
    stop.by_signal(lambda: runs.run(settings), 2)
    last = runs.at(settings).last
    good = last.read_bytes()
    for kind, (edit, section) in WHILE_RESTORING.items():
        checkpoint = torch.load(last)
        edit(checkpoint)
        saved(checkpoint, last)
        damaged = last.read_bytes()
        with pytest.raises(InputError) as refusal:
            runs.run(settings)
        assert f"no run can go on from its {section}" in str(refusal.value), kind
        assert "\n" not in str(refusal.value)
        assert last.read_bytes() == damaged
        last.write_bytes(good)
    assert runs.run(settings).result.exists()


@pytest.mark.parametrize("name", OptimizerName)
def test_each_optimizer_needs_the_moments_that_it_keeps(
    random_model: Callable[..., AllAttentionLM], name: OptimizerName
) -> None:
    """Of a real state, nothing is missed; without any one of its moments, something is."""
    model, config = random_model(torch.float32), OptimizerConfig(name=name)
    optimizer = make_optimizer(parameter_groups(model, None, config), config)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    needed = moment_names(parameter_groups(model, None, config), config)
    state = optimizer.state_dict()
    assert not lacks_moments(state, needed)
    for number, entries in state["state"].items():
        for moment in (key for key, value in entries.items() if torch.is_tensor(value) and value.ndim):
            less = copy.deepcopy(state)
            del less["state"][number][moment]
            assert lacks_moments(less, needed)
