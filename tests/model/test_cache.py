"""Step by step with cached keys and values = the whole text at once, at a constant cost per word."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.reference import assert_close, random_ids, reference_model, rounding
from support.reference import random_model as small_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from allattn.errors import InputError
from allattn.model.cache import Cache, next_log_probs, read, step
from allattn.model.counts import multiply_adds
from allattn.model.generation import generate_tokens
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.surgery import absorb_scale

pytestmark = pytest.mark.numeric

Models = Callable[..., AllAttentionLM]


def moderate(model: AllAttentionLM) -> AllAttentionLM:
    """Log-probabilities of size 1 to 10, as a trained model's."""
    with torch.no_grad():
        for table in model.embedding.tables:
            table *= 0.1
    return model


def in_steps(model: AllAttentionLM, ids: Tensor, prompt: int, memory_length: int | None = None) -> Tensor:
    """Log-probabilities (B, T - prompt + 1, V) after the prompt and after each word that follows it."""
    hidden, cache = read(model, ids[:, :prompt], memory_length)
    rows = [next_log_probs(model, hidden)]
    for word in ids[:, prompt:].unbind(1):
        rows.append(next_log_probs(model, step(model, word, cache)))
    return torch.stack(rows, dim=1)


def at_once(model: AllAttentionLM, ids: Tensor, memory_length: int | None = None) -> Tensor:
    """Log-probabilities (B, T, V) of one forward pass over the whole text."""
    with torch.no_grad():
        hidden, _ = model.hidden(ids, model.empty_memory(len(ids)), memory_length=memory_length)
        return model.softmax.log_probs(hidden, model.embedding)


def random_heads(draw: random.Random) -> dict[str, Any]:
    """Any number of heads from 0 to 8 in each of three layers, and any s_g."""
    heads = [sorted(draw.sample(range(8), draw.randrange(9))) for _ in range(3)]
    return {"heads_kept": heads, "output_scale": [draw.uniform(0.5, 3) for _ in heads]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", range(8))
def test_steps_equal_the_text_at_once(random_model: Models, dtype: torch.dtype, case: int) -> None:
    """Same length: any head counts, s_g inside WO or not, prompts of 1 to several M, any memory."""
    draw = random.Random(case)
    family = {"persistent_vectors": case % 3 * 3, "feed_forward": case % 4 * 5}
    cutoffs = draw.choice([[], [10, 30]])
    model = moderate(random_model(dtype, seed=case, cutoffs=cutoffs, **random_heads(draw), **family))
    memory_length = draw.choice([None, 1, 2, 5])
    length = memory_length or model.config.memory_length
    stepped = absorb_scale(model) if case % 2 else model
    for prompt in (1, length, length + 1, 3 * length + 2):
        ids = random_ids(2, prompt + length + 4, vocabulary=50)
        expected = at_once(model, ids, memory_length)[:, prompt - 1 :]
        found = in_steps(stepped, ids, prompt, memory_length)
        assert found.dtype == dtype
        assert_close(found, expected, rounding(dtype, 2 * 3 * 32))  # 3 layers sum over 32 entries, twice


@pytest.mark.parametrize("heads", [[[], [], []], [list(range(8))] * 3, [[5], [], [0, 7]]])
def test_extreme_head_counts(random_model: Models, heads: list[list[int]]) -> None:
    model = moderate(random_model(torch.float64, heads_kept=heads))
    ids = random_ids(1, 20, vocabulary=50)
    assert (in_steps(model, ids, 3) - at_once(model, ids)[:, 2:]).abs().max() < 1e-10


@pytest.mark.parametrize(("persistent_vectors", "feed_forward"), [(3, 0), (0, 5), (3, 5), (0, 0)])
def test_steps_equal_loop_reference(persistent_vectors: int, feed_forward: int) -> None:
    """Against loops over the formulas, not the package's forward pass."""
    changes = {"heads_kept": [[1, 2], [0, 1, 3]], "output_scale": [2.0, 4 / 3]}
    model = small_model(persistent_vectors=persistent_vectors, feed_forward=feed_forward, **changes)
    ids = random_ids(1, 12)
    assert_close(in_steps(model, ids, 2), reference_model(model, ids)[:, 1:], 1e-10)


@pytest.mark.parametrize("prompt", [1, 6, 20])
def test_growing_mask_equals_the_text_at_once_while_the_memory_holds_it(
    random_model: Models, prompt: int
) -> None:
    model = moderate(random_model(torch.float64, same_length=False, memory_length=31))
    ids = random_ids(2, 25, vocabulary=50)
    assert (in_steps(model, ids, prompt) - at_once(model, ids)[:, prompt - 1 :]).abs().max() < 1e-10


@pytest.mark.parametrize("prompt", [1, 20])
def test_growing_mask_with_a_short_memory_sees_the_last_positions(random_model: Models, prompt: int) -> None:
    """A word and the M before it: the forward pass fed one word at a time."""
    model = moderate(random_model(torch.float64, same_length=False, memory_length=4))
    ids = random_ids(2, 25, vocabulary=50)
    memory, rows = model.empty_memory(2), []
    with torch.no_grad():
        for word in ids.split(1, dim=1):
            row, memory = model.log_probs(word, memory)
            rows.append(row)
    expected = torch.cat(rows, dim=1)[:, prompt - 1 :]
    assert (in_steps(model, ids, prompt) - expected).abs().max() < 1e-10


# --- cost, counted


class ElementsWritten(TorchDispatchMode):
    """Elements of the results of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            self.total += each.numel() if isinstance(each, Tensor) else 0
        return result


def products(run: Callable[[], object]) -> int:
    """Multiply-adds of the matrix products in `run`."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2


def test_multiply_adds_of_a_step_are_flat_and_those_of_the_formula(random_model: Models) -> None:
    """Every step's count is that of the keys it sees, and no more once there are M + 1 of them."""
    heads = [[0, 2, 3], [], list(range(8))]
    # d 32, c 4, N 6, M 7, F 9; the embedding has no product
    model = random_model(heads_kept=heads, cutoffs=[], feed_forward=9)
    _, cache = read(model, torch.tensor([[1]]))
    counted = [products(lambda: step(model, torch.tensor([2]), cache)) for _ in range(40)]
    seen = [min(position + 1, 8) for position in range(1, 41)]
    assert counted == [11 * (4 * 32 * 4 + 3 * keys * 4 + 2 * 6 * 4) + 3 * 2 * 32 * 9 for keys in seen]
    assert counted[-1] == multiply_adds(model.config)
    hidden = torch.zeros(1, 32)
    assert products(lambda: next_log_probs(model, hidden)) == 32 * 50
    again = products(lambda: model.hidden(torch.tensor([[2]]), [torch.zeros(1, 7, 32)] * 3))
    assert again > 2 * counted[-1], "projecting the memory again would show"


@pytest.mark.parametrize("same_length", [True, False])
def test_what_a_step_writes_is_flat(random_model: Models, same_length: bool) -> None:
    """All operations, copies and element-wise ones too, from the step at which the memory is full."""
    model = random_model(same_length=same_length)
    _, cache = read(model, torch.tensor([[1, 2, 3]]))
    written = []
    for _ in range(40):
        with ElementsWritten() as counter:
            step(model, torch.tensor([2]), cache)
        written.append(counter.total)
    assert written[0] < written[4]
    assert len(set(written[4:])) == 1


def test_generating_calls_no_forward_pass_and_projects_no_position_again(random_model: Models) -> None:
    """After the prompt; the position keys are constants in evaluation."""
    model = random_model()
    words = generate_tokens(model, [1, 2, 3], 30, lambda log_probs: int(log_probs.argmax()))
    next(words)

    def refuse(*_: object) -> None:
        raise AssertionError("called for a single word")

    for layer in model.layers:
        for module in (layer, layer.position):
            assert isinstance(module, nn.Module)
            module.register_forward_pre_hook(refuse)
    assert len(list(words)) == 29
    with pytest.raises(AssertionError):
        read(model, torch.tensor([[1]]))


# --- the cache itself and the loop


def test_two_texts_do_not_share_a_cache(random_model: Models) -> None:
    model = random_model()
    ids = random_ids(1, 3, vocabulary=50)
    (_, one), (_, two) = read(model, ids), read(model, ids)
    expected = step(model, torch.tensor([4]), one)
    for word in range(20):
        step(model, torch.tensor([word]), one)
    assert torch.equal(step(model, torch.tensor([4]), two), expected)


def test_cache_holds_the_last_positions_only(random_model: Models) -> None:
    """M + 1 slots of projected keys and values per head, whatever the prompt's length."""

    def sizes(cache: Cache) -> list[tuple[int, ...]]:
        return [tuple(kept.keys.shape) for kept in cache.layers]

    model = random_model(heads_kept=[[1], [], [0, 5, 6]])
    for prompt in (1, 7, 50):
        _, cache = read(model, random_ids(2, prompt, vocabulary=50))
        assert sizes(cache) == [(2, 1, 8, 4), (2, 0, 8, 4), (2, 3, 8, 4)]
        assert cache.memory_length == 7


def test_generated_words_are_those_that_were_chosen(random_model: Models) -> None:
    """`choose` gets each position's log-probabilities of the full forward pass."""
    model = moderate(random_model(torch.float64))
    seen: list[Tensor] = []

    def choose(log_probs: Tensor) -> int:
        seen.append(log_probs)
        return (7 * len(seen)) % 50

    words = list(generate_tokens(model, [3, 1], 20, choose, memory_length=5))
    assert words == [(7 * n) % 50 for n in range(1, 21)]
    expected = at_once(model, torch.tensor([[3, 1, *words[:-1]]]), 5)[0, 1:]
    assert (torch.stack(seen) - expected).abs().max() < 1e-10


def test_a_model_in_training_mode_is_refused(random_model: Models) -> None:
    with pytest.raises(ValueError, match=r"model\.eval"):
        read(random_model().train(), torch.tensor([[1]]))


def test_more_memory_than_position_rows_is_refused(random_model: Models) -> None:
    model = random_model()  # 32 rows: distances 0..31
    read(model, torch.tensor([[1]]), memory_length=31)
    with pytest.raises(InputError, match=r"distances up to 32.*position_rows=32"):
        read(model, torch.tensor([[1]]), memory_length=32)
