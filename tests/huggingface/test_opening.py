"""Folders of models of others: what opens, and what is one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.foreign_folders import saved
from support.foreign_models import padded, row, tiny

from allattn.errors import InputError
from allattn.huggingface import opening
from allattn.huggingface.foreign import ForeignModel
from allattn.huggingface.opening import Foreign, open_foreign
from allattn.training.artifacts import local_checkpoint
from allattn.training.foreign_settings import Dtype
from allattn.training.hub_models import is_foreign

CPU = torch.device("cpu")


def opened(folder: Path, dtype: Dtype = Dtype.auto) -> Foreign:
    return open_foreign(folder, CPU, dtype, None)


def test_a_saved_model_has_the_same_numbers(tmp_path: Path) -> None:
    network = tiny("llama").bfloat16()
    folder = saved(network, tmp_path / "model")
    assert is_foreign(folder)
    assert local_checkpoint(f"huggingface:{folder}") == folder
    found, batch = opened(folder), padded([row(9)], left=False)
    assert torch.equal(found.model.nats(batch)[0], ForeignModel(network).nats(batch)[0])
    assert opened(folder, Dtype.float32).model.model.dtype == torch.float32
    assert found.tokenizer("w0 w5").input_ids == [2, 7]
    other = saved(tiny("llama", rms_norm_eps=0.1).bfloat16(), tmp_path / "other")
    assert found.weights_hash() == opened(other).weights_hash() != ""


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def change_config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_softmax(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path, {"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (break_config, "transformers cannot read it"),
        (change_config(model_type="vit"), "a vit is no causal language model"),
        (change_config(model_type="nothing"), "transformers cannot read it"),
        (change_config(model_type="mpt", n_heads=6, d_model=24, n_layers=1), "name the output projection"),
        (change_config(num_attention_heads=5), "transformers cannot read it"),
        (change_config(vocab_size=20), "transformers cannot read it"),
        (cut_weights, "transformers cannot read it"),
        (no_weights, "holds no weights"),
        (no_softmax, "lack lm_head.weight"),
        (no_tokenizer, "transformers cannot read it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_opened_is_one_line(change: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path / "model")
    change(folder)
    with pytest.raises(InputError, match=said) as refused:
        opened(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path / "model")
    change_config(model_type="own", auto_map={"AutoConfig": "own.Own"})(folder)
    (folder / "own.py").write_text("raise SystemExit(9)")
    with pytest.raises(InputError, match="transformers cannot read it"):
        opened(folder)


def test_a_model_larger_than_the_free_memory_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tiny("llama"), tmp_path / "model")
    no_weights(folder)
    (folder / "model.safetensors").write_bytes(b"never read")
    monkeypatch.setattr(opening, "free_memory", lambda: 1000)
    with pytest.raises(InputError, match=r"take 0\.0 GiB in float32, and this machine has 0\.0 GiB free"):
        opened(folder)


def test_two_gguf_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(InputError, match=r"holds 2 \.gguf files"):
        is_foreign(tmp_path)
    (tmp_path / "a.gguf").unlink()
    assert is_foreign(tmp_path)
    with pytest.raises(InputError, match="transformers cannot read it"):
        opened(tmp_path)
