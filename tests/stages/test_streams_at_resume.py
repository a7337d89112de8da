"""The text streams and their memory where a run goes on: of an earlier version, cut anew, or damaged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allattn.errors import InputError
from allattn.settings import Resume
from allattn.training.checkpoints import read_checkpoint
from allattn.training.language_task import LanguageTask
from allattn.training.run_folder import RunFolder
from allattn.training.segment_memory import of_process

Rows = Callable[[RunFolder], list[dict[str, str]]]


def test_a_checkpoint_of_format_1_goes_on(runs: Any, stop: Any, rows: Rows) -> None:
    """It held the memory of each process by accumulation group."""
    whole = runs.run(runs.pretraining("whole", trainer__accumulation=2))
    settings = runs.pretraining("old", trainer__accumulation=2)
    stop.by_signal(lambda: runs.run(settings), 4)
    path = runs.at(settings).last
    old = torch.load(path)
    memory = old["allattn"]["memory"]
    old["allattn"] |= {"format_version": 1, "memory": [of_process(memory, 2, 0, 1)]}
    for name in ("segment_length", "tokens_seen"):
        del old["allattn"][name]
    torch.save(old, path)
    assert all(map(torch.equal, read_checkpoint(path)["allattn"]["memory"], memory))
    assert rows(runs.run(settings)) == rows(whole)


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("batch_size", 2, "2 streams and segments of 6, until step 4 it was in 4 and 6"),
        ("segment_length", 5, "4 streams and segments of 5, until step 4 it was in 4 and 6"),
    ],
)
def test_other_streams_begin_with_an_empty_memory(
    runs: Any,
    stop: Any,
    rows: Rows,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: int,
    line: str,
) -> None:
    stop.by_signal(lambda: runs.run(runs.pretraining("run")), 4)
    capsys.readouterr()
    remembered = []
    step = LanguageTask.training_step

    def watched(self: LanguageTask, *args: Any) -> Any:
        remembered.append(sum(layer.shape[1] for memory in self.memory.values() for layer in memory))
        return step(self, *args)

    monkeypatch.setattr(LanguageTask, "training_step", watched)
    changes = {f"schedule__{setting}": value, "resume": Resume.changed}
    settings = runs.pretraining("run", **changes)
    folder = runs.run(settings)
    assert f"memory begins empty: the text is now read in {line}" in capsys.readouterr().out
    assert remembered[0] == 0 < remembered[1]
    per_step = settings.schedule.batch_size * settings.schedule.segment_length
    seen = [int(row["tokens_seen"]) for row in rows(folder)]
    assert seen == [24 * step for step in range(1, 5)] + [96 + per_step * step for step in range(1, 7)]


DAMAGES: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "a layer is missing": lambda memory: memory[:1],
    "another width": lambda memory: [layer[..., :8] for layer in memory],
    "another number of streams": lambda memory: [memory[0], memory[1][:2]],
    "longer than the model's": lambda memory: [layer.repeat(1, 2, 1) for layer in memory],
    "no streams": lambda memory: [layer[:0] for layer in memory],
    "flat": lambda memory: [layer.flatten() for layer in memory],
    "words": lambda memory: ["memory", "memory"],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_memory_that_is_not_the_models_is_refused(
    runs: Any, dense_run: RunFolder, damage: Callable[[list[torch.Tensor]], Any]
) -> None:
    checkpoint = torch.load(dense_run.last)
    checkpoint["allattn"]["memory"] = damage(checkpoint["allattn"]["memory"])
    settings = runs.pretraining("damaged")
    folder = runs.at(settings)
    folder.checkpoints.mkdir(parents=True)
    (folder.path / "config.yaml").write_text(dense_run.config.read_text().replace("dense", "damaged"))
    torch.save(checkpoint, folder.last)
    with pytest.raises(InputError, match=r"last\.ckpt: is damaged: no run can go on from its segment memory"):
        runs.run(runs.pretraining("damaged", resume=Resume.changed))
