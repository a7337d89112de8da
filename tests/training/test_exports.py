import json
import pickletools
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.checkpoint_files import TOKENIZER, cut, saved_checkpoint
from support.command_fixtures import CommandLine
from support.exports import save_export
from support.model_fixtures import Models
from torch import Tensor

import allattn
from allattn.data.vocabulary import save_tokenizer, tokenizer_hash, word_tokenizer
from allattn.errors import InputError
from allattn.model.counts import count_parameters
from allattn.training import exports
from allattn.training.exports import load_export, write_export
from allattn.training.run_folder import RunFolder

HEADS = {
    "different heads": [[0, 2, 3, 5], [1], [0, 6, 7]],
    "no head in one layer": [[0, 2, 3, 5, 6, 7], [], [4]],
    "no head at all": [[], [], []],
    "all heads": [list(range(8))] * 3,
}
FORMAT_1 = ["config.json", "model.safetensors", "tokenizer.json"]
FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
]

LogProbs = Callable[..., Tensor]


@pytest.fixture
def exported(moderate_model: Models, tmp_path: Path) -> Path:
    """An export of a cut model that a test may damage."""
    checkpoint = saved_checkpoint(cut(moderate_model(), HEADS["different heads"]), tmp_path)
    save_export(checkpoint, tmp_path / "export")
    return tmp_path / "export"


def test_a_transformer_xl_is_exported_and_loaded(
    random_model: Models, log_probs: LogProbs, tmp_path: Path
) -> None:
    """From its checkpoint of format 1 too; a layer without heads keeps its feed-forward sublayer."""
    dense = random_model(torch.float64, persistent_vectors=0, feed_forward=9)
    model = cut(dense, HEADS["no head in one layer"])
    checkpoint = saved_checkpoint(model, tmp_path)
    save_export(checkpoint, tmp_path / "export")
    assert load_file(tmp_path / "export" / "model.safetensors")[
        "model.layers.1.feed_forward.inner.weight"
    ].any()
    for source in (checkpoint, tmp_path / "export"):
        loaded = allattn.load(source)
        assert loaded.config.family == "Transformer-XL"
        torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=1e-10)


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_export_gives_the_checkpoints_logits(
    moderate_model: Models, log_probs: LogProbs, tmp_path: Path, heads: list[list[int]]
) -> None:
    model = cut(moderate_model(), heads)
    checkpoint = saved_checkpoint(model, tmp_path)
    save_export(checkpoint, tmp_path / "export")
    loaded = allattn.load(tmp_path / "export")
    assert not loaded.training
    assert loaded.config.heads_kept == heads
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=1e-5)
    assert torch.equal(log_probs(allattn.load(str(checkpoint))), log_probs(model))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_export_in_double_precision(
    moderate_model: Models, log_probs: LogProbs, tmp_path: Path, heads: list[list[int]]
) -> None:
    model = cut(moderate_model(torch.float64), heads)
    save_tokenizer(TOKENIZER, tmp_path / "tokenizer.json")
    meta = {"tokenizer_hash": tokenizer_hash(TOKENIZER)}
    write_export(model, meta, tmp_path / "tokenizer.json", tmp_path / "export")
    loaded = load_export(tmp_path / "export")
    assert loaded.positions.table.dtype == torch.float64
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=1e-12)


def test_double_precision_survives_a_checkpoint(
    moderate_model: Models, log_probs: LogProbs, tmp_path: Path
) -> None:
    model = cut(moderate_model(torch.float64), HEADS["different heads"])
    save_export(saved_checkpoint(model, tmp_path), tmp_path / "export")
    loaded = allattn.load(tmp_path / "export")
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=1e-12)


def test_scale_is_in_the_output_projection_and_not_in_the_bias(
    moderate_model: Models, exported: Path
) -> None:
    model = cut(moderate_model(), HEADS["different heads"])
    weights = load_file(exported / "model.safetensors")
    for layer, kept in enumerate(HEADS["different heads"]):
        expected = model.state_dict()[f"layers.{layer}.output.weight"] * (8 / len(kept))
        torch.testing.assert_close(weights[f"model.layers.{layer}.output.weight"], expected)
        assert torch.equal(weights[f"model.layers.{layer}.bias"], model.state_dict()[f"layers.{layer}.bias"])
    config = json.loads((exported / "config.json").read_text())["model"]
    assert config["scale_absorbed"] is True
    assert config["output_scale"] is None


def test_dense_checkpoint_is_exported_as_it_is(
    moderate_model: Models, log_probs: LogProbs, tmp_path: Path
) -> None:
    model = moderate_model()
    save_export(saved_checkpoint(model, tmp_path, phase="pretrain"), tmp_path / "export")
    loaded = allattn.load(tmp_path / "export")
    assert loaded.config.heads_kept is None
    assert torch.equal(log_probs(loaded), log_probs(model))


def test_gate_phase_checkpoint_is_exported_without_its_closed_heads(
    moderate_model: Models, log_probs: LogProbs, tmp_path: Path
) -> None:
    model, heads = moderate_model(), HEADS["no head in one layer"]
    pi = [torch.tensor([0.5 if head in kept else -0.5 for head in range(8)]) for kept in heads]
    checkpoint = saved_checkpoint(model, tmp_path, phase="gates", output_scaling=True, gates=pi)
    save_export(checkpoint, tmp_path / "export")
    loaded = allattn.load(tmp_path / "export")
    assert loaded.config.heads_kept == heads
    torch.testing.assert_close(log_probs(loaded), log_probs(cut(model, heads)), rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["pi"] == [layer.tolist() for layer in pi]
    assert config["heads_before"] == [list(range(8))] * 3
    assert config["tokenizer_hash"] == tokenizer_hash(TOKENIZER)


def test_export_loads_in_a_new_process_from_its_folder_alone(
    moderate_model: Models, log_probs: LogProbs, exported: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    exported.rename(moved)
    (tmp_path / "last.ckpt").unlink()
    code = (
        "import sys, allattn\n"
        "assert 'torch' not in sys.modules\n"
        "import pickle, torch, allattn.training.exports\n"
        "def forbidden(*a, **k): raise AssertionError('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = torch.load = forbidden\n"
        "model = allattn.load(sys.argv[1])\n"
        "ids = torch.arange(10).view(1, 10)\n"
        "print(float(model.log_probs(ids, model.empty_memory(1))[0].sum()), model.config.heads_kept)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(moved)], capture_output=True, text=True, check=True
    )
    value, _, heads = done.stdout.partition(" ")
    model = cut(moderate_model(), HEADS["different heads"])
    with torch.no_grad():
        found = float(model.log_probs(torch.arange(10).view(1, 10), model.empty_memory(1))[0].sum())
    assert float(value) == pytest.approx(found, rel=1e-5)
    assert json.loads(heads) == HEADS["different heads"]


def test_folder_holds_these_files_and_no_pickle(exported: Path) -> None:
    assert sorted(path.name for path in exported.iterdir()) == FILES
    for path in exported.iterdir():
        assert not zipfile.is_zipfile(path)
        with pytest.raises(ValueError, match=r".*"):
            list(pickletools.genops(path.read_bytes()))
        assert path.stat().st_mode & 0o044 == exported.stat().st_mode & 0o044, "as readable as its folder"


def test_existing_folder_is_refused_and_left_alone(exported: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("export", "empty", "dangling"):
        with pytest.raises(InputError, match=rf"{name}: exists already"):
            save_export(tmp_path / "last.ckpt", tmp_path / name)
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert list((tmp_path / "empty").iterdir()) == []


def test_nothing_stays_of_an_export_that_fails(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exports.shutil, "copyfile", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"second: the export cannot be written \(No space left on device\)"):
        save_export(tmp_path / "last.ckpt", tmp_path / "second")
    assert sorted(tmp_path.iterdir()) == before


def test_export_below_a_file_is_refused(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        save_export(tmp_path / "last.ckpt", tmp_path / "last.ckpt" / "export")


def test_export_needs_the_checkpoints_own_tokenizer(moderate_model: Models, tmp_path: Path) -> None:
    checkpoint = saved_checkpoint(moderate_model(), tmp_path)
    save_tokenizer(word_tokenizer(Counter({b"other": 3})), tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="is not the vocabulary"):
        save_export(checkpoint, tmp_path / "export")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        save_export(checkpoint, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("name", FORMAT_1)
def test_missing_and_damaged_files_are_named(exported: Path, name: str) -> None:
    content = (exported / name).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\x80\x04\x95", b"[1, 2]", b"[" * 100_000):
        (exported / name).write_bytes(damaged)
        with pytest.raises(InputError, match=name.replace(".", r"\.")) as error:
            load_export(exported)
        assert "\n" not in str(error.value)
    (exported / name).unlink()
    with pytest.raises(InputError, match=f"is not an export of allattn \\(it has no {name}\\)"):
        load_export(exported)


def test_other_weights_are_refused_whole(exported: Path) -> None:
    path = exported / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.query.weight"
    cases: dict[str, dict[str, Tensor]] = {
        r"layers.0.query.weight is absent, but should be \[16, 32\]": {
            n: t for n, t in weights.items() if n != name
        },
        r"extra is \[1\], but should be absent": {**weights, "model.extra": torch.zeros(1)},
        r"\(extra\) is \[1\], but should be absent": {**weights, "extra": torch.zeros(1)},
        r"layers.0.query.weight is \[32, 32\], but should be \[16, 32\]": {
            **weights,
            name: torch.zeros(32, 32),
        },
        r"not all of one floating-point type": {**weights, name: weights[name].long()},
    }
    for message, changed in cases.items():
        save_file(changed, path)
        with pytest.raises(InputError, match=message):
            load_export(exported)


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer format": (
        lambda c: c.update(format_version=3),
        "export format_version 3, this version .* reads 1 and 2",
    ),
    "no format": (lambda c: c.pop("format_version"), "format_version None"),
    "no model": (lambda c: c.pop("model"), "has no model"),
    "no hash": (lambda c: c.pop("tokenizer_hash"), "has no tokenizer_hash"),
    "another vocabulary": (lambda c: c.update(tokenizer_hash="0" * 64), "is not the vocabulary"),
    "unknown size": (lambda c: c["model"].update(depth=3), "unknown entries: depth"),
    "text as a size": (lambda c: c["model"].update(width="wide"), "not of the right kind"),
    "list as a size": (lambda c: c["model"].update(layers=[3]), "not of the right kind"),
    "number as heads": (lambda c: c["model"].update(heads_kept=[1, 2, 3]), "not of the right kind"),
    "no vocabulary": (lambda c: c["model"].pop("vocabulary_size"), "vocabulary_size is not set"),
    "code": (lambda c: c.update(auto_map={"AutoConfig": "code.Config"}), r"names code to run \(auto_map\)"),
    "uncut sizes": (lambda c: c["model"].update(heads_kept=None), r"\[16\], but should be \[32\]"),
}


@pytest.mark.parametrize(("change", "message"), CONFIGS.values(), ids=CONFIGS)
def test_other_configurations_are_refused(
    exported: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    change_config(exported, change)
    with pytest.raises(InputError, match=message) as error:
        load_export(exported)
    assert "\n" not in str(error.value)


def test_configuration_names_no_files(exported: Path, tmp_path: Path, log_probs: LogProbs) -> None:
    expected = log_probs(load_export(exported))
    change_config(exported, lambda c: c.update(weights="../last.ckpt", tokenizer="/etc/passwd"))
    assert torch.equal(log_probs(load_export(exported)), expected)


def test_load_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such checkpoint"):
        allattn.load(tmp_path / "nothing")
    with pytest.raises(InputError, match="is not an export of allattn"):
        allattn.load(tmp_path)


def test_importing_the_package_is_light() -> None:
    code = "import sys, allattn; assert not {'torch', 'lightning', 'safetensors'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def as_format_1(folder: Path) -> None:
    """Turn an export into what the version before wrote."""
    weights = load_file(folder / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in weights.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kept = {name: config[name] for name in ("model", "tokenizer_hash")}
    (folder / "config.json").write_text(json.dumps({"format_version": 1, **kept}))
    for path in folder.iterdir():
        if path.name not in FORMAT_1:
            path.unlink()


def test_an_export_of_format_1_loads_and_becomes_one_of_today(
    exported: Path, tmp_path: Path, log_probs: LogProbs, command_line: CommandLine
) -> None:
    expected = log_probs(load_export(exported))
    today = {path.name: path.read_bytes() for path in exported.iterdir() if path.name != "README.md"}
    as_format_1(exported)
    assert torch.equal(log_probs(load_export(exported)), expected)
    done = command_line("export", "checkpoint=export", "folder=again")
    assert done.status == 0, done.err
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert "Not measured" in again.pop("README.md").decode()
    assert again == today


def test_large_weights_lie_in_several_files(
    moderate_model: Models, log_probs: LogProbs, tmp_path: Path
) -> None:
    model = moderate_model()
    folder = tmp_path / "export"
    save_tokenizer(TOKENIZER, tmp_path / "tokenizer.json")
    meta = {"tokenizer_hash": tokenizer_hash(TOKENIZER)}
    write_export(model, meta, tmp_path / "tokenizer.json", folder, shard=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        weights = load_file(folder / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == weights.keys()
        assert len(weights) == 1 or sum(tensor.nbytes for tensor in weights.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.state_dict().values())
    assert torch.equal(log_probs(load_export(folder)), log_probs(model))
    index["weight_map"]["model.softmax.biases.0"] = "../last.ckpt"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"index\.json: is damaged"):
        load_export(folder)
    index["weight_map"]["model.softmax.biases.0"] = files[0]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / files[1]).unlink()
    with pytest.raises(InputError, match=f"{files[1]}: is damaged"):
        load_export(folder)


def test_model_card_says_what_is_known(dense_run: RunFolder, tmp_path: Path) -> None:
    """Scores come from the run's result.json, if it is of this checkpoint; no path gets out."""
    save_export(dense_run.last, tmp_path / "dense", license="apache-2.0", language="en")
    card = (tmp_path / "dense" / "README.md").read_text()
    after = [later for line, later in pairwise(card.splitlines()) if line.startswith("|")]
    assert all(line.startswith("|") or not line for line in after), "a line after a table is a row of it"
    metadata = yaml.safe_load(card.split("---\n")[1])
    record = json.loads(dense_run.result.read_text())["dense"]
    assert (metadata["license"], metadata["language"]) == ("apache-2.0", "en")
    assert metadata["library_name"] == "transformers"
    (entry,) = metadata["model-index"]
    found = {each["dataset"]["split"]: each["metrics"][0]["value"] for each in entry["results"]}
    assert found == {split: round(record[split]["word_perplexity"], 4) for split in ("valid", "test")}
    assert f"| test | {record['test']['word_perplexity']:.4f} |" in card
    assert "mode memory, memory length 4, segment length 8" in card
    assert f"| parameters | {record['parameters']['total']:,} | {record['parameters']['total']:,} |" in card
    assert "| 1 | 0, 1, 2, 3 |" in card
    assert str(dense_run.path.parent) not in card
    other = tmp_path / "run" / "checkpoints"
    shutil.copytree(dense_run.checkpoints, other)
    changed = json.loads(dense_run.result.read_text()) | {"steps": 3}
    (other.parent / "result.json").write_text(json.dumps(changed))
    save_export(other / "last.ckpt", tmp_path / "other")
    card = (tmp_path / "other" / "README.md").read_text()
    assert "Not measured" in card
    assert "model-index" not in card


def test_model_card_of_a_cut_model_counts_what_is_gone(moderate_model: Models, exported: Path) -> None:
    dense = count_parameters(moderate_model()).total
    now = sum(tensor.numel() for tensor in load_file(exported / "model.safetensors").values())
    card = (exported / "README.md").read_text()
    assert f"| parameters | {dense:,} | {now:,} |" in card
    assert "| attention heads | 24 | 8 |" in card
    assert "| 2 | 0, 6, 7 |" in card


def test_command(moderate_model: Models, tmp_path: Path, command_line: CommandLine) -> None:
    checkpoint = saved_checkpoint(cut(moderate_model(), HEADS["no head in one layer"]), tmp_path)
    done = command_line("export", f"checkpoint={checkpoint}", "folder=out")
    assert "out: 7 of 24 heads" in done.out, done.err
    assert allattn.load("out").config.heads_kept == HEADS["no head in one layer"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "out", "tokenizer.json"]
    again = command_line("export", f"checkpoint={checkpoint}", "folder=out")
    assert (again.status, again.err.count("\n")) == (2, 1)
    assert "needs folder=PATH" in command_line("export", f"checkpoint={checkpoint}").err
