import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allattn import stages
from allattn.commands.evaluate import EvaluateSettings, evaluate
from allattn.errors import InputError
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.surgery import cut_model, plan_removal
from allattn.training import checkpoints
from allattn.training.checkpoint_io import AtomicCheckpointIO
from allattn.training.checkpoints import read_checkpoint, write_checkpoint
from allattn.training.loading import checked_tokenizer, load_model
from allattn.training.run_folder import RunFolder

Models = Callable[..., AllAttentionLM]
LogProbs = Callable[..., Tensor]
ROOT = Path(__file__).resolve().parents[2]
# In a new process: only the file, and torch.load as it is by default.
SCORE = """
import sys, torch
from pathlib import Path
from allattn.training.loading import load_model
torch.load(sys.argv[1])
model = load_model(Path(sys.argv[1])).model.eval()
with torch.no_grad():
    log_probs, _ = model.log_probs(torch.arange(12).view(2, 6), model.empty_memory(2))
torch.save({"log_probs": log_probs, "kept": model.config.heads_kept}, sys.argv[2])
"""


def content(model: AllAttentionLM, **meta: Any) -> dict[str, Any]:
    """A small checkpoint of a model."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    values = {"format_version": 1, "model": model.config.to_dict(), "phase": "pretrain", "step": 0}
    values |= {"best": 1.0, "memory": [{}], "data": {}, "tokenizer_hash": ""}
    values |= {"fingerprint": "", "output_scaling": None, "target_sparsity": None, **meta}
    return {"state_dict": state, "allattn": values}


@pytest.fixture
def saved(tmp_path: Path, random_model: Models) -> Path:
    """A checkpoint of a dense model."""
    path = tmp_path / "last.ckpt"
    write_checkpoint(path, content(random_model()))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as error:
        read_checkpoint(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_model_comes_back(saved: Path, random_model: Models, log_probs: LogProbs) -> None:
    assert torch.equal(log_probs(load_model(saved).model.eval()), log_probs(random_model()))
    assert not list(saved.parent.glob("*.partial"))


class FullDisk:
    """torch.save that writes a part and then fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, checkpoint: Any, file: Any) -> None:
        file.write(b"half a checkpoint")
        raise self.error


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")], ids=str
)
def test_failed_write_keeps_the_earlier_file(
    saved: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    before = saved.read_bytes()
    monkeypatch.setattr(checkpoints.torch, "save", FullDisk(error))
    with pytest.raises(OSError, match=r"last\.ckpt: the checkpoint could not be written"):
        AtomicCheckpointIO().save_checkpoint({}, saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["last.ckpt"]


def test_killed_write_keeps_the_earlier_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    monkeypatch.setattr(checkpoints.torch, "save", FullDisk(KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(saved, {})
    assert saved.read_bytes() == before


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert "no such checkpoint" in refusal(tmp_path / "none.ckpt")
    assert "is a folder" in refusal(tmp_path)


@pytest.mark.parametrize("kept", [0, 10, 0.5, -1], ids=["zero bytes", "ten bytes", "half", "last byte gone"])
def test_damaged_file_is_refused(saved: Path, kept: float) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(kept * len(whole))] if kept == 0.5 else whole[: int(kept)])
    assert "is damaged" in refusal(saved)


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> Any:
        return Path.touch, (self.touched,)


@pytest.mark.parametrize("write", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))])
def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, write: Callable[[Any, Path], Any]) -> None:
    touched = tmp_path / "it_ran"
    write({"state_dict": {}, "allattn": Payload(touched)}, tmp_path / "bad.ckpt")
    assert "does not load as plain tensors" in refusal(tmp_path / "bad.ckpt")
    with pytest.raises(InputError):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "bad.ckpt", weights_only=False)
    assert not touched.exists()


@pytest.mark.parametrize(
    "values", [{"state_dict": {}}, {"allattn": {"format_version": 1}}, [1], torch.ones(2)]
)
def test_other_files_of_torch_are_refused(tmp_path: Path, values: Any) -> None:
    torch.save(values, tmp_path / "other.ckpt")
    assert "is not a checkpoint of allattn" in refusal(tmp_path / "other.ckpt")


@pytest.mark.parametrize("version", [3, 0, None, "1"])
def test_another_format_is_refused(saved: Path, random_model: Models, version: Any) -> None:
    write_checkpoint(saved, content(random_model(), format_version=version))
    assert f"has checkpoint format {version}, this version of allattn reads 1" in refusal(saved)


@pytest.mark.parametrize("entry", ["model", "phase"])
def test_incomplete_entry_is_refused(saved: Path, random_model: Models, entry: str) -> None:
    values = content(random_model())
    del values["allattn"][entry]
    write_checkpoint(saved, values)
    with pytest.raises(InputError):
        load_model(saved)


def test_weights_of_other_sizes_are_refused(saved: Path, random_model: Models) -> None:
    wrong = content(random_model())
    wrong["allattn"]["model"]["heads_kept"] = [[0, 1, 2, 3, 4]] * 3
    write_checkpoint(saved, wrong)
    with pytest.raises(InputError, match="do not fit the recorded sizes") as error:
        load_model(saved)
    assert "\n" not in str(error.value)
    missing = content(random_model())
    del missing["state_dict"]["model.layers.1.query.weight"]
    write_checkpoint(saved, missing)
    with pytest.raises(InputError, match=r"layers\.1\.query\.weight"):
        load_model(saved)


def swap_two_words(tokenizer: Path) -> None:
    values = json.loads(tokenizer.read_text())
    vocabulary = values["model"]["vocab"]
    first, second = [word for word, number in vocabulary.items() if number in (5, 6)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(values))


@pytest.fixture
def copied(dense_run: RunFolder, tmp_path: Path) -> Path:
    """A dense run's checkpoint with its tokenizer, free to be changed."""
    folder = tmp_path / "copied"
    folder.mkdir()
    for path in (dense_run.last, dense_run.tokenizer):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder / "last.ckpt"


def test_right_vocabulary_is_accepted(copied: Path) -> None:
    assert checked_tokenizer(copied, read_checkpoint(copied)) == copied.with_name("tokenizer.json")


@pytest.mark.parametrize("command", ["prune", "evaluate"])
def test_vocabulary_with_two_words_swapped_is_refused(copied: Path, runs: Any, command: str) -> None:
    swap_two_words(copied.with_name("tokenizer.json"))
    run = {
        "prune": lambda: stages.prune(runs.pruning("wrong", copied)),
        "evaluate": lambda: evaluate(EvaluateSettings(checkpoint=str(copied), data=replace(runs.data))),
    }[command]
    with pytest.raises(InputError, match=r"is not the vocabulary that last\.ckpt was trained with"):
        run()


def test_missing_vocabulary_says_where_it_belongs(copied: Path) -> None:
    copied.with_name("tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json") as error:
        checked_tokenizer(copied, read_checkpoint(copied))
    assert "data.tokenizer" not in str(error.value)


def test_cut_checkpoint_in_a_new_process(tmp_path: Path, random_model: Models) -> None:
    """5, 8, 3 heads; default loading gives the same logits and the same heads; a second cut works."""
    model = random_model()
    kept = [[0, 1, 2, 5, 7], list(range(8)), [1, 4, 6]]
    gates = [torch.tensor([float(head in row) for head in range(8)]) for row in kept]
    cut = cut_model(model, plan_removal(model.config, gates, True))
    source, result = tmp_path / "cut.ckpt", tmp_path / "result.pt"
    write_checkpoint(source, content(cut))
    subprocess.run([sys.executable, "-c", SCORE, str(source), str(result)], check=True, cwd=ROOT)
    found = torch.load(result)
    with torch.no_grad():
        expected, _ = cut.log_probs(torch.arange(12).view(2, 6), cut.empty_memory(2))
    assert torch.equal(found["log_probs"], expected)
    assert found["kept"] == kept
    again = load_model(source).model
    second = plan_removal(
        again.config, [torch.tensor([0.0, 1, 1, 1, 1]), torch.ones(8), torch.tensor([1.0, 0, 1])], True
    )
    assert cut_model(again, second).config.heads_kept == [[1, 2, 5, 7], list(range(8)), [1, 6]]


def test_run_checkpoints_hold_plain_values_only(dense_run: RunFolder) -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(plain, value.keys())) and all(map(plain, value.values()))
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return value is None or isinstance(value, bool | int | float | str | Tensor)

    checkpoint = torch.load(dense_run.last)
    assert plain(checkpoint)
    assert checkpoint["allattn"].keys() >= {
        "format_version",
        "model",
        "phase",
        "step",
        "best",
        "output_scaling",
        "memory",
        "data",
        "tokenizer_hash",
        "fingerprint",
    }
