"""The processes of one run: devices times nodes, whoever started them, and which of them this one is.

A variable that an earlier command, a shell or a scheduler left behind decides nothing. A launcher counts
where all that it tells its processes is there: torchrun's variables, whoever sets them, or those of a Slurm
step with as many tasks as the run has processes. Else this process starts the others of its node itself; so
four trainings on one device each, in one Slurm step, are four runs.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only

from allattn.errors import InputError
from allattn.training.config import TrainerConfig

_READ = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK")
_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_LIGHTNING: Any = rank_zero_only  # holds this process's number among all, which Lightning's messages go by
_TRAINER = "PL_TRAINER_"  # variables from which Lightning would take settings that nobody gave


@contextmanager
def joined(trainer: TrainerConfig) -> Iterator[None]:
    """Take this process's place among the run's processes; inside, `is_first_process` knows it.

    Inside, the environment says what was decided and nothing else, for Lightning's default environment and
    the processes that it starts; afterwards it is as before, so a next run starts processes of its own.

    Raises:
        InputError: a launcher started another number of processes than the settings say.
    """
    decided = launch_variables(trainer.devices, trainer.num_nodes, os.environ)
    names = [*_READ, *(name for name in os.environ if name.startswith(_TRAINER))]
    before = {name: os.environ.get(name) for name in names}
    rank_before = _LIGHTNING.rank
    _put(dict.fromkeys(names) | decided)
    _LIGHTNING.rank = rank_of(trainer.devices, decided)
    try:
        yield
    finally:
        _put(before)
        _LIGHTNING.rank = rank_before
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def is_first_process() -> bool:
    """Whether this process writes the run's files; asked inside `joined`."""
    return bool(_LIGHTNING.rank == 0)


def rank_of(devices: int, decided: Mapping[str, str]) -> int:
    """This process's number among all of the run, from what `launch_variables` gives."""
    return int(decided.get("NODE_RANK", 0)) * devices + int(decided.get("LOCAL_RANK", 0))


def launch_variables(devices: int, nodes: int, given: Mapping[str, str]) -> dict[str, str]:
    """What the environment must say for a run of `nodes` times `devices` processes.

    Args:
        devices: processes per node.
        nodes: machines.
        given: the environment as it is.

    Returns:
        LOCAL_RANK only where all processes are there already; without it this one starts those of its node.

    Raises:
        InputError: a launcher started another number of processes, or other nodes have nobody to start them.
    """
    size = devices * nodes
    if _from_torchrun(given):
        return _place_in_torchrun(devices, nodes, given)
    if size == 1:
        return {}
    if all(name in given for name in _STEP) and _number(given, "SLURM_STEP_NUM_TASKS") == size:
        return _place_in_step(devices, nodes, given)
    if nodes == 1:
        return {}
    own = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in given for name in own):
        raise InputError(
            f"trainer.num_nodes={nodes}: nothing starts the processes of the other nodes; use torchrun, srun "
            f"with {size} tasks, or one command per node with {', '.join(own)} set"
        )
    return _checked(devices, nodes, {name: given[name] for name in own})


def _from_torchrun(given: Mapping[str, str]) -> bool:
    """Whether torchrun, or another launcher that sets its variables, started this process."""
    shared = all(name in given for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return shared and ("RANK" in given or {"LOCAL_RANK", "NODE_RANK"} <= given.keys())


def _place_in_torchrun(devices: int, nodes: int, given: Mapping[str, str]) -> dict[str, str]:
    started = _number(given, "WORLD_SIZE")
    if started != devices * nodes:
        raise InputError(
            f"a launcher started {started} processes of one run (WORLD_SIZE), but trainer.devices={devices} "
            f"* trainer.num_nodes={nodes} asks for {devices * nodes}: give the launcher's numbers"
        )
    if started == 1:
        return {}
    if "RANK" in given:
        node, local = divmod(_number(given, "RANK"), devices)
    else:
        node, local = _number(given, "NODE_RANK"), _number(given, "LOCAL_RANK")
    if "LOCAL_RANK" in given and _number(given, "LOCAL_RANK") != local:
        raise InputError(
            f"RANK={given['RANK']} and LOCAL_RANK={given['LOCAL_RANK']} do not fit trainer.devices={devices}:"
            " give the launcher's processes per node"
        )
    place = {"NODE_RANK": str(node), "LOCAL_RANK": str(local)}
    return _checked(devices, nodes, place | {name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT")})


def _place_in_step(devices: int, nodes: int, given: Mapping[str, str]) -> dict[str, str]:
    """A place among the tasks of a Slurm step, which all compute the same address and port."""
    address = "127.0.0.1"
    if nodes > 1:
        names = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_NODELIST", address)
        address = given.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(names)
    job, step = (_number(given, name) if given.get(name) else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    place = {
        "NODE_RANK": given["SLURM_NODEID"],
        "LOCAL_RANK": given["SLURM_LOCALID"],
        "MASTER_ADDR": address,
        "MASTER_PORT": given.get("MASTER_PORT") or str(15_000 + (10 * job + step) % 10_000),
    }
    return _checked(devices, nodes, place)


def _checked(devices: int, nodes: int, place: dict[str, str]) -> dict[str, str]:
    for name, count, setting in (
        ("NODE_RANK", nodes, "num_nodes"),
        ("LOCAL_RANK", devices, "devices"),
    ):
        if name in place and not 0 <= _number(place, name) < count:
            raise InputError(f"{name}={place[name]} is not below trainer.{setting}={count}")
    _number(place, "MASTER_PORT")
    return place


def _number(given: Mapping[str, str], name: str) -> int:
    try:
        return int(given[name])
    except ValueError:
        raise InputError(f"the environment's {name}={given[name]!r} is not a number: unset it") from None


def _put(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
