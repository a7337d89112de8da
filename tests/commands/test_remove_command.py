"""allattn remove: from a folder of transformers to a smaller one with its card."""

from pathlib import Path

import pytest
import torch
from support.command_fixtures import CommandLine
from support.foreign_folders import saved
from support.foreign_models import padded, row, tiny
from transformers import AutoModelForCausalLM

from allattn.heads.scores import text_scores
from allattn.huggingface.foreign import ForeignModel
from allattn.huggingface.removal import without_heads
from allattn.huggingface.units import lowest
from allattn.training.foreign_settings import Form, Unit


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A tiny Llama and a text, as settings."""
    saved(tiny("llama"), tmp_path / "model")
    noise = torch.Generator().manual_seed(5)
    for split, tokens in (("train", 300), ("valid", 30), ("test", 130)):
        text = " ".join(f"w{int(word)}" for word in torch.randint(38, (tokens,), generator=noise))
        (tmp_path / f"wiki.{split}.tokens").write_text(text + "\n")
    data = ["data.source=files", f"data.folder={tmp_path}", "length=20", "rows=4", "calibration.tokens=200"]
    return [
        f"checkpoint=huggingface:{tmp_path / 'model'}",
        "folder=out",
        "device=cpu",
        "progress=false",
        *data,
    ]


@pytest.mark.parametrize(("form", "heads"), [("uniform", 6), ("per_layer", 4), ("masked", 5)])
def test_the_folder_holds_the_cut_model(
    form: str, heads: int, words: list[str], command_line: CommandLine, tmp_path: Path
) -> None:
    done = command_line("remove", *words, f"heads={heads}", f"form={form}", "score=wanda")
    assert done.status == 0, done.err
    written = ForeignModel(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    removed = sum(line.count(",") + 1 for line in done.out.splitlines() if line.startswith("  layer"))
    assert removed == heads
    assert f"without {heads} of its 18 attention heads" in card
    parameters = written.model.num_parameters()
    assert f"| parameters | {tiny('llama').num_parameters():,} | {parameters:,} |" in card
    assert f"{parameters:,} after" in done.out
    for layer, place in zip(written.layers, written.places, strict=True):
        assert layer.heads == 0 or place.attention.q_proj.out_features == 4 * layer.heads
    if form == "masked":
        assert (
            sum(int((layer.output_blocks() == 0).all(-1).all(-1).sum()) for layer in written.layers) == heads
        )
    else:
        assert sum(layer.heads for layer in written.layers) == 18 - heads
    again = command_line("remove", *words, f"heads={heads}", f"form={form}")
    assert again.status == 2
    assert "folder=out: exists already" in again.err


def test_the_lowest_scores_of_the_calibration_text_go(
    words: list[str], command_line: CommandLine, tmp_path: Path
) -> None:
    """One window is the text: what the command does by hand."""
    single = [*words, "calibration.tokens=19", "length=19", "heads=6", "score=circuit_ahon_ln"]
    assert command_line("remove", *single).status == 0
    model = ForeignModel(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    text = (tmp_path / "wiki.train.tokens").read_text().split()
    ids = torch.tensor([int(word[1:]) + 2 for word in text[:20]])
    batch = padded([ids], left=False)
    batch = type(batch)(batch.ids[:, :-1], batch.targets[:, :-1], batch.real[:, :-1])
    scores = text_scores(model, [batch], ["circuit_ahon_ln"])["circuit_ahon_ln"]
    gates = lowest(scores, [3, 3, 3], 6, Form.uniform, Unit.auto)
    expected = ForeignModel(without_heads(model, gates, Form.uniform))
    written = ForeignModel(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    check = padded([row(9)], left=False)
    with torch.no_grad():
        assert torch.equal(written.nats(check)[0], expected.nats(check)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["heads=5"], "a whole key/value group, 2 heads, goes at a time"),
        (["heads=4"], "give a multiple of 6"),
        (["heads=18"], "from 1 to 17"),
        (["heads=6", "score=ahon_lm"], "did you mean ahon_ln?"),
        (["heads=6", "length=100"], "the model has 64 positions"),
        (["heads=6", "data.tokenizer=bpe"], "has no effect"),
        (["heads=6", "test.split=train"], "the same text"),
        (["heads=6", "length=64", "calibration.tokens=10"], "the calibration text has 10 tokens"),
        (["heads=6", "projection=model.layers.*.attn.o"], "no layer has attn.o"),
        (["heads=6", "checkpoint=wiki.test.tokens"], "is no causal language model of others"),
    ],
)
def test_bad_input_is_one_line(
    changes: list[str], message: str, words: list[str], command_line: CommandLine, tmp_path: Path
) -> None:
    names = {change.split("=")[0] for change in changes}
    done = command_line("remove", *(word for word in words if word.split("=")[0] not in names), *changes)
    assert done.status == 2
    assert message in done.err.strip().splitlines()[-1]
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()
