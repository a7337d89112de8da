"""Whether two runs are bit for bit the same."""

import json
from typing import Any

import torch

from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder
from support.processes import rows


def equal(one: Any, other: Any) -> bool:
    """Bit-identical, however deep the tensors are."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def assert_same(folder: RunFolder, expected: RunFolder) -> None:
    """Every logged number, the weights, the optimizer, the memory and the scores are bit-identical."""
    assert rows(folder) == rows(expected)
    for name in ("last", "best", "gates"):
        path, wanted = getattr(folder, name), getattr(expected, name)
        assert path.exists() == wanted.exists()
        if wanted.exists():
            ours, theirs = read_checkpoint(path), read_checkpoint(wanted)
            for part in ("state_dict", "optimizer_states", "allattn"):
                assert equal(ours[part], theirs[part]), f"{name}: {part}"
    results = [json.loads(f.result.read_text()) for f in (folder, expected)]
    for stage in ("dense", "pruned"):
        both = [result.get(stage) for result in results]
        for split in ("valid", "test"):
            first, second = (record and record[split] for record in both)
            assert first == second
    assert not list(folder.path.rglob("*.partial")), "nothing half-written is left"
