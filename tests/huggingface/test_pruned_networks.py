"""A pretrained model without heads, written for transformers: the same logits in each form."""

import pytest
import torch
from support.tiny_networks import gated
from torch import Tensor

from allattn.errors import InputError
from allattn.families import for_removal
from allattn.huggingface.pruned import as_network
from allattn.huggingface.removal import Form
from allattn.pretrained.language_model import PretrainedLM
from allattn.pruning.surgery import cut_model, plan_removal

IDS = torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(4))
CLOSE = {"rtol": 0.0, "atol": 1e-11}  # float64, a few dozen sums of terms of order 1
FIRST, UNEVEN, GROUPS = (
    [[1, 1, 1, 0, 0, 0]] * 3,
    [[1, 0, 1, 1, 1, 1]] * 3,
    [[1] * 6, [0, 0, 0, 1, 1, 1], [1] * 6],
)


def pruned(kind: str, gates: list[list[int]], masked: bool = False) -> PretrainedLM:
    """With s_g, which the network written has inside WO."""
    model = gated(kind)
    model = PretrainedLM(for_removal(model.config, masked), model.network).eval()
    return cut_model(model, plan_removal(model.config, [torch.tensor(g).double() for g in gates], True))


def same(model: PretrainedLM, form: Form) -> None:
    def logits(network: PretrainedLM | torch.nn.Module) -> Tensor:
        with torch.no_grad():
            return network.logits(IDS) if isinstance(network, PretrainedLM) else network(input_ids=IDS).logits

    torch.testing.assert_close(logits(as_network(model, form)), logits(model), **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_the_forms_say_what_the_model_says(kind: str) -> None:
    same(pruned(kind, UNEVEN), Form.masked)
    same(pruned(kind, GROUPS), Form.per_layer)
    if kind != "gpt2":
        same(pruned(kind, FIRST), Form.uniform)


def test_zeroed_heads_have_one_form() -> None:
    model = pruned("olmo2", UNEVEN, masked=True)
    same(model, Form.masked)
    with pytest.raises(InputError, match="give form=masked"):
        as_network(model, Form.per_layer)


def test_heads_that_no_class_of_transformers_takes_are_refused() -> None:
    with pytest.raises(InputError, match="equally many"):
        as_network(pruned("llama", UNEVEN), Form.per_layer)
