"""Checkpoints whose tensors were on a GPU: read, scored and gone on with where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from allattn.training.checkpoints import read_checkpoint
from allattn.training.loading import load_model
from allattn.training.run_folder import RunFolder


def as_of_a_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the checkpoint again; every tensor says that it was on cuda:0."""
    checkpoint = torch.load(path, weights_only=True)
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(checkpoint, path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there torch finds the device")
def test_torch_itself_would_look_for_the_gpu(dense_run: RunFolder, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(dense_run.last.read_bytes())
    as_of_a_gpu(path, monkeypatch)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, weights_only=True)


def test_it_is_read_to_the_cpu(dense_run: RunFolder, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(dense_run.last.read_bytes())
    as_of_a_gpu(path, monkeypatch)
    tensors = [x for x in tree_leaves(read_checkpoint(path)) if isinstance(x, torch.Tensor)]
    assert len(tensors) > 20
    assert all(x.device.type == "cpu" for x in tensors)
    expected, found = (load_model(one).model.state_dict() for one in (dense_run.last, path))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.usefixtures("uneven_gates")
def test_a_run_goes_on_from_it(
    runs: Any, stop: Any, rows: Any, dense_run: RunFolder, monkeypatch: Any
) -> None:
    """In the gate phase, with all that training keeps: weights, pi, moments, memory."""
    whole = runs.run(runs.pruning("whole", dense_run.last))
    settings = runs.pruning("run", dense_run.last)
    stop.by_signal(lambda: runs.run(settings), 3)
    as_of_a_gpu(runs.at(settings).last, monkeypatch)
    assert rows(runs.run(settings)) == rows(whole)
