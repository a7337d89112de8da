"""Folders: saved again, through a pipeline, fine-tuned; damaged, foreign and hostile ones are one line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.huggingface_fixtures import KINDS, Exported
from support.reference import random_ids
from tokenizers import Tokenizer, models

import allattn
from allattn.commands.generate import GenerateSettings, generate
from allattn.data.vocabulary import save_tokenizer, word_tokenizer
from allattn.errors import InputError
from allattn.huggingface.configuration import CodeInFolderError

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "allattn[hf]"')
huggingface = pytest.importorskip("allattn.huggingface", exc_type=ImportError)

Kinds = Callable[[str], Exported]
CUT = "cut, a layer without heads"


@pytest.fixture
def folder(exported_kind: Kinds, tmp_path: Path) -> Path:
    """An export that a test may damage."""
    return Path(shutil.copytree(exported_kind(CUT).folder, tmp_path / "export"))


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_again_it_is_the_same_export(exported_kind: Kinds, kind: str, tmp_path: Path) -> None:
    """In one file or several; for transformers and for `allattn.load`; no place gets into it."""
    exported = exported_kind(kind)
    model = load(exported.folder)
    assert {name for name, p in model.model.named_parameters() if p.requires_grad} == exported.model.trained
    model.save_pretrained(tmp_path / "again", max_shard_size="10KB")
    transformers.AutoTokenizer.from_pretrained(exported.folder).save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors.index.json").exists()
    expected = exported.model.state_dict()
    for again in (load(tmp_path / "again").model, allattn.load(tmp_path / "again")):
        assert again.config == exported.model.config
        assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert str(exported.folder) not in (tmp_path / "again" / "config.json").read_text()


def test_a_model_from_its_sizes_alone(exported_kind: Kinds) -> None:
    config = transformers.AutoConfig.from_pretrained(exported_kind(CUT).folder)
    sizes = (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    assert sizes == (50, 32, 3, 8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    drawn = model.model.layers[0].query.weight
    assert 0.5 < float(drawn.detach().std()) * 32**0.5 < 2  # N(0, 1/d), not what transformers draws
    assert torch.isfinite(model(random_ids(1, 9, vocabulary=50)).logits).all()


def test_a_pipeline_writes_what_the_command_writes(exported_kind: Kinds) -> None:
    place = exported_kind(CUT).folder
    pipe = transformers.pipeline("text-generation", model=str(place), tokenizer=str(place))
    (found,) = pipe("w3 w1 w7 ", do_sample=False, max_new_tokens=9)  # a space before the next word
    ours = generate(GenerateSettings(str(place), "cpu", prompt="w3 w1 w7", length=9, temperature=0.0))
    assert found["generated_text"].split() == ours.split()


def test_a_trainer_fine_tunes(exported_kind: Kinds, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason='needs the extra: pip install "allattn[hf]"')
    model = load(exported_kind(CUT).folder)
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    ids = random_ids(4, 9, vocabulary=50)
    texts = [{"input_ids": row, "labels": row} for row in ids]
    with torch.no_grad():
        first = float(model(ids, labels=ids).loss)
    settings = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
    )
    done = transformers.Trainer(model, settings, train_dataset=texts).train()
    assert done.global_step == 3
    trained = model.model.trained
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in trained), name
    with torch.no_grad():
        assert float(model.eval()(ids, labels=ids).loss) < first
    model.save_pretrained(tmp_path / "tuned")
    shutil.copy(exported_kind(CUT).folder / "tokenizer.json", tmp_path / "tuned")
    tuned = allattn.load(tmp_path / "tuned").state_dict()
    assert all(torch.equal(tensor, tuned[name]) for name, tensor in model.model.state_dict().items())


def change(folder: Path, name: str, **entries: Any) -> None:
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**values, **entries}))


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def foreign(folder: Path) -> None:
    save_file({"transformer.wte.weight": torch.zeros(50, 32)}, folder / "model.safetensors")


def not_a_number(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.bias"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def other_sizes(folder: Path) -> None:
    model = json.loads((folder / "config.json").read_text())["model"]
    change(folder, "config.json", model={**model, "persistent_vectors": 5})


def countless_layers(folder: Path) -> None:
    model = json.loads((folder / "config.json").read_text())["model"]
    change(folder, "config.json", model={**model, "layers": 10**9, "heads_kept": None})


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncated, "is not a whole safetensors file"),
    "foreign": (foreign, "the weights do not fit"),
    "not a number": (not_a_number, "layers.2.bias holds NaN"),
    "other sizes": (other_sizes, r"persistent_keys is \[6, 16\], but should be \[5, 16\]"),
    "countless layers": (countless_layers, "layer 999999999 is absent"),
    "newer format": (lambda f: change(f, "config.json", format_version=3), "reads 1 and 2"),
    "old format": (lambda f: change(f, "config.json", format_version=1), "allattn export checkpoint=FOLDER"),
    "contradiction": (lambda f: change(f, "config.json", vocab_size=51), "vocab_size=51 contradicts"),
    "code": (lambda f: change(f, "config.json", auto_map={"AutoConfig": "x.Y"}), "names code to run"),
    "other vocabulary": (
        lambda f: save_tokenizer(word_tokenizer({}), f / "tokenizer.json"),  # type: ignore[arg-type]
        "is not the vocabulary",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_with_a_folder_is_one_line(
    folder: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(folder)
    with pytest.raises(InputError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


BAD_VOCABULARY = {
    **{kind: BAD[kind] for kind in ("newer format", "code", "other vocabulary")},
    "none": (lambda f: (f / "tokenizer.json").unlink(), r"^tokenizer\.json: there is no such file"),
    "foreign": (
        lambda f: Tokenizer(models.BPE()).save(str(f / "tokenizer.json")),
        r"^\S+: has no <eos> token",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD_VOCABULARY.values(), ids=BAD_VOCABULARY)
def test_what_is_wrong_with_a_vocabulary_is_one_line(
    folder: Path, damage: Callable[[Path], Any], message: str
) -> None:
    """Also where the tokenizer alone is loaded."""
    damage(folder)
    with pytest.raises(InputError, match=message) as error:
        transformers.AutoTokenizer.from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_no_code_of_a_folder_is_run(folder: Path) -> None:
    """Not even where it is allowed to."""
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(InputError, match="trust_remote_code: no model of allattn needs code"):
        load(folder, trust_remote_code=True)
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})
    for allowed in (False, True):
        with pytest.raises(CodeInFolderError, match=r"tokenizer_config\.json names code to run"):
            transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=allowed)
    change(folder, "config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with pytest.raises(CodeInFolderError):
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    change(folder, "tokenizer_config.json", auto_map=None)
    with pytest.raises(InputError, match="names code to run"):
        load(folder, trust_remote_code=True)


def test_without_transformers_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import allattn.huggingface"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        'ImportError: transformers is not installed: pip install "allattn[hf]"'
    )


def test_the_vocabulary_is_not_resized(exported_kind: Kinds) -> None:
    with pytest.raises(InputError, match="is not resized"):
        load(exported_kind(CUT).folder).resize_token_embeddings(60)
