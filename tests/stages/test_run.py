"""The run that both stages are: waiting for what the first process writes, and deciding once."""

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from allattn.errors import InputError
from allattn.pruning.config import Selection
from allattn.pruning.phase import Phase
from allattn.stages import run as run_module
from allattn.stages.run import Run
from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder


@pytest.fixture
def waiting(tmp_path: Path, runs: Any) -> Run[Any]:
    """A run whose first process has not written a checkpoint."""
    return Run(runs.pretraining("waiting"), RunFolder(tmp_path), (Phase.fine_tune,))


def test_no_process_waits_for_one_that_has_failed(waiting: Run[Any]) -> None:
    waiting.folder.failure.write_text("the disk is full\n")
    with pytest.raises(InputError, match=r"the first process has failed \(.*failure\.txt says why\)"):
        waiting.go_on_from(1)


def test_no_process_waits_for_one_that_was_killed(waiting: Run[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives its children to another process."""
    monkeypatch.setattr(run_module.os, "getppid", lambda: 1)
    with pytest.raises(InputError, match=r"last\.ckpt: the first process was killed; start the run again"):
        waiting.go_on_from(1)


def test_waiting_has_an_end(waiting: Run[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "WAIT", timedelta(seconds=0))
    monkeypatch.setattr(run_module, "LOOK_AGAIN_SECONDS", 0.001)
    with pytest.raises(InputError, match=r"last\.ckpt: the first process has not written it for 0:00:00"):
        waiting.go_on_from(1)


def test_heads_are_decided_once(
    runs: Any,
    stop: Any,
    rows: Callable[[RunFolder], list[dict[str, str]]],
    dense_run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a crash in the first step the run goes on from the cut model, which no optimizer has touched."""
    changes = {"gates__selection": Selection.magnitude, "gates__target_sparsity": 0.5}
    whole = runs.run(runs.pruning("whole", dense_run.last, **changes))
    settings = runs.pruning("crashed", dense_run.last, **changes)
    stop.by_crash(lambda: runs.run(settings), 1)
    cut = read_checkpoint(runs.at(settings).last)
    assert (cut["allattn"]["step"], cut["allattn"]["phase"]) == (0, "fine_tune")
    again = import_module("allattn.stages.prune")
    monkeypatch.setattr(again, "select_heads", lambda *_: pytest.fail("the heads were scored again"))
    assert rows(runs.run(settings)) == rows(whole)
