"""Real runs of the commands, each in its own process that may be killed.

A process is forked from a server that has imported the libraries, so a start takes one second, not six; it
runs train.py, prune.py or `-m allattn` as `python` would, from the first line on. A process may be told to
end itself by SIGKILL inside a named function, which makes moments of microseconds reachable.
"""

import importlib
import io
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

from allattn.training.metrics import read_metrics
from allattn.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
MEASURED = ("tokens_per_second", "peak_memory_gib")  # columns that no two runs share
KILLED = -signal.SIGKILL
PATIENCE = 120.0  # seconds

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(
    ["allattn.stages", "allattn.settings", "allattn.commands.evaluate", "pytorch_optimizer"]
)


@dataclass(frozen=True)
class KillIn:
    """Where a process ends itself: in the `nth` call of `target` ("package.module:name.of.function").

    `middle` is for functions that write a file: it is truncated, or half written, at that moment.
    """

    target: str
    nth: int
    when: Literal["before", "middle", "after"] = "before"
    number: signal.Signals = signal.SIGKILL


class Started:
    """A process that runs one command."""

    def __init__(self, process: BaseProcess, output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    @property
    def output(self) -> str:
        """Standard output and standard error so far."""
        return self._output.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        """Exit status; minus the signal's number where one ended the process."""
        self._process.join(PATIENCE)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"the process did not end:\n{self.output}")
        return self._process.exitcode

    def wait_for(self, seconds: float) -> bool:
        """Wait until the process has ended, but not longer than that; whether it has."""
        self._process.join(seconds)
        return not self.running

    @property
    def reached_the_moment(self) -> bool:
        """Whether the process came where its `KillIn` acts."""
        return _mark(self._output).exists()

    def wait_for_moment(self) -> None:
        """Wait until the process is where its `KillIn` acts."""
        until = time.monotonic() + PATIENCE
        while not self.reached_the_moment:
            assert self.running, f"the run ended before the moment came:\n{self.output}"
            assert time.monotonic() < until
            time.sleep(0.01)

    def send_when(self, number: signal.Signals, moment: Callable[[], bool]) -> None:
        """Send a signal as soon as `moment` is true."""
        until = time.monotonic() + PATIENCE
        while not moment():
            assert self.running, f"the run ended before the moment came:\n{self.output}"
            assert time.monotonic() < until
            time.sleep(0.0005)
        self.send(number)


def start(
    output: Path,
    script: str,
    *arguments: str,
    kill_in: KillIn | None = None,
    environment: dict[str, str] | None = None,
) -> Started:
    """Start `python script arguments`; `script` is train.py, prune.py or allattn."""
    process = forks.Process(target=_run, args=(output, script, arguments, kill_in, environment or {}))
    process.start()
    return Started(process, output)


def run(output: Path, script: str, *arguments: str, kill_in: KillIn | None = None) -> Started:
    """Start a command and wait; it must succeed, or be killed where that is wanted."""
    started = start(output, script, *arguments, kill_in=kill_in)
    status = started.wait()
    assert status == (KILLED if kill_in else 0), started.output
    return started


def start_two(
    folder: Path,
    script: str,
    *arguments: str,
    kill_in: tuple[KillIn | None, KillIn | None] = (None, None),
    nodes: int = 1,
) -> list[Started]:
    """Start a command in two processes that find each other as torchrun's do; outputs go to `folder`.

    With two `nodes` each process believes to be alone on its machine.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": str(2 // nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }
    return [
        start(
            folder / f"output_{rank}",
            script,
            *arguments,
            kill_in=kill_in[rank],
            environment=shared | _place(rank, nodes),
        )
        for rank in range(2)
    ]


def _place(rank: int, nodes: int) -> dict[str, str]:
    node, local = (rank, 0) if nodes == 2 else (0, rank)
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)}


def wait_for_both(started: list[Started]) -> list[int]:
    """Exit statuses of two processes that work together; where one fails, the other is ended soon."""
    until = time.monotonic() + PATIENCE
    while all(one.running for one in started) and time.monotonic() < until:
        time.sleep(0.01)
    for one in started:
        if not one.wait_for(10):
            one.send(signal.SIGKILL)
    return [one.wait() for one in started]


def _run(
    output: Path,
    script: str,
    arguments: tuple[str, ...],
    kill_in: KillIn | None,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.chdir(ROOT)
    sys.argv = [script, *arguments]
    if kill_in is not None:
        _prepare_kill(kill_in, _mark(output))
    try:
        if script.endswith(".py"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # as python ends, not as multiprocessing does
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _mark(output: Path) -> Path:
    """The file that says that a process is where its `KillIn` acts."""
    return output.with_name(f"{output.name}.moment")


def _prepare_kill(kill_in: KillIn, mark: Path) -> None:
    module, path = kill_in.target.split(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), itertools.count(1)

    def killing(*args: Any, **kwargs: Any) -> Any:
        is_the_one = next(calls) == kill_in.nth
        if is_the_one and kill_in.when == "middle":
            _write_half(*args)
        if is_the_one and kill_in.when != "after":
            mark.touch()
            os.kill(os.getpid(), kill_in.number)
        result = original(*args, **kwargs)
        if is_the_one and kill_in.when == "after":
            mark.touch()
            os.kill(os.getpid(), kill_in.number)
        return result

    setattr(owner, name, killing)


def _write_half(content: Any, file: Any) -> None:
    """What the first half of torch.save(content, file) or of Path.write_text(file, text) leaves on disk."""
    if isinstance(content, Path):
        content.open("w").close()
        return
    whole = io.BytesIO()
    torch.serialization.save(content, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()


def rows(folder: RunFolder) -> list[dict[str, str]]:
    """What metrics.csv holds, without measured times."""
    return [
        {name: value for name, value in row.items() if name not in MEASURED}
        for row in read_metrics(folder.metrics)
    ]


def numbers(folder: RunFolder, name: str) -> list[float]:
    """One column of metrics.csv, in order of steps."""
    return [float(row[name]) for row in read_metrics(folder.metrics) if name in row]


def last_step(folder: RunFolder) -> int:
    """The last step that metrics.csv holds a whole row of."""
    if not folder.metrics.exists():
        return 0
    lines = folder.metrics.read_text().split("\n")[1:-1]
    return int(lines[-1].split(",")[0]) if lines else 0
