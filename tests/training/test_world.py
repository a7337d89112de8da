"""Which processes are one run's, and that nothing but the command decides what a run does."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from allattn.errors import InputError
from allattn.training.config import TrainerConfig
from allattn.training.run_folder import RunFolder
from allattn.training.world import is_first_process, joined, launch_variables, rank_of

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}
OWN_CHILD = {
    "NODE_RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
# What a shell, a scheduler or another program may leave behind, with what Lightning would make of it.
LEFT_BEHIND = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_PORT"), "1"),
    **STEP,
    "SLURM_JOB_NAME": "train",
    "LSB_JOBID": "5",
    "LSB_DJOB_RANKFILE": "/nowhere",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "PL_TRAINER_FAST_DEV_RUN": "1",
    "PL_TRAINER_LIMIT_TRAIN_BATCHES": "1",
}
ADDRESS = {"MASTER_ADDR": "first", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "rank", "address"),
    [
        (TORCHRUN, 3, "first"),
        (OWN_CHILD, 3, "first"),
        ({**STEP, **OWN_CHILD}, 3, "first"),
        (STEP, 3, "node07"),
        ({"NODE_RANK": "1", **ADDRESS}, 2, "first"),
    ],
    ids=["torchrun", "started by a first process", "the same in Slurm", "srun", "one command per node"],
)
def test_places_on_two_nodes_of_two_devices(given: dict[str, str], rank: int, address: str) -> None:
    found = launch_variables(2, 2, given)
    assert rank_of(2, found) == rank
    assert found["MASTER_ADDR"] == address
    assert "RANK" not in found, "Lightning's own environment goes by node and device"


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "WORLD_SIZE"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_single_leftover_decides_nothing(name: str, devices: int) -> None:
    assert launch_variables(devices, 1, {name: "1"}) == {}


def test_tasks_of_a_step_that_are_not_the_runs_are_runs_of_their_own() -> None:
    assert launch_variables(1, 1, STEP) == launch_variables(2, 1, STEP) == {}
    batch_script = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert launch_variables(4, 1, batch_script) == {}, "no srun: the run starts its processes"


def test_tasks_of_one_step_agree_where_to_meet() -> None:
    step = STEP | {"MASTER_ADDR": "of another day"}
    places = [
        launch_variables(
            4, 1, step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NODEID": "0"}
        )
        for task in range(4)
    ]
    assert [rank_of(4, place) for place in places] == [0, 1, 2, 3]
    assert {(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in places} == {("127.0.0.1", "17342")}


@pytest.mark.parametrize(
    ("devices", "nodes", "given", "named"),
    [
        (1, 1, TORCHRUN, r"4 processes .*trainer.devices=1 \* trainer.num_nodes=1 asks for 1"),
        (4, 2, TORCHRUN, "asks for 8"),
        (4, 1, TORCHRUN | {"RANK": "3"}, "LOCAL_RANK=1 do not fit trainer.devices=4"),
        (4, 1, TORCHRUN | {"RANK": "first"}, "RANK='first' is not a number"),
        (2, 2, TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
        (
            4,
            1,
            STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "batch"},
            "SLURM_STEP_ID='batch' is not a number",
        ),
        (2, 2, TORCHRUN | {"RANK": "5"}, "NODE_RANK=2 is not below trainer.num_nodes=2"),
        (1, 2, {}, "trainer.num_nodes=2: nothing starts"),
    ],
)
def test_contradictory_worlds_are_refused(
    devices: int, nodes: int, given: dict[str, str], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        launch_variables(devices, nodes, given)


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with joined(TrainerConfig(devices=2, num_nodes=2)):
        assert not is_first_process()
        assert os.environ["NODE_RANK"] == "1"
        assert "RANK" not in os.environ
        os.environ["WORLD_SIZE"] = "7"
    assert is_first_process()
    assert dict(os.environ) == before


def test_what_is_left_behind_changes_nothing(
    runs: Any,
    stop: Any,
    rows: Any,
    dense_run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole run under all of it, stopped by the signal at which Lightning would queue it again itself."""
    expected = rows(runs.run(runs.pretraining("plain", seed=5)))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(dense_run.last, elsewhere / "hpc_ckpt_1.ckpt")  # another run's
    monkeypatch.chdir(elsewhere)
    for name, value in LEFT_BEHIND.items():
        monkeypatch.setenv(name, value)
    settings = runs.pretraining("run", seed=5)
    stop.by_signal(lambda: runs.run(settings), 4, signal.SIGUSR1)
    folder = runs.run(settings)
    assert rows(folder) == expected
    for path in (folder.config, folder.result, folder.tokenizer, folder.best):
        assert path.is_file()
    assert [path.name for path in elsewhere.iterdir()] == ["hpc_ckpt_1.ckpt"]
    assert {path.name for path in folder.path.iterdir()} == {
        ".lock",
        "articles.json",
        "checkpoints",
        "config.yaml",
        "metrics.csv",
        "result.json",
    }
