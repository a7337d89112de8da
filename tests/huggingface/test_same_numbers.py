"""The same numbers in transformers as by `allattn.load`: logits, losses, padded rows, greedy generation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.huggingface_fixtures import KINDS, Exported
from support.reference import random_ids
from torch import Tensor

from allattn.model.cache import read
from allattn.model.generation import generate_tokens
from allattn.model.language_model import AllAttentionLM
from allattn.model.sampling import sampler

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "allattn[hf]"')
pytest.importorskip("allattn.huggingface", exc_type=ImportError)

pytestmark = pytest.mark.numeric

TOLERANCE = 1e-5  # of float32 log-probabilities of size 10: 10 ulp
Kinds = Callable[[str], Exported]


def loaded(exported: Exported, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(exported.folder, **options)


def ours(model: AllAttentionLM, ids: Tensor) -> Tensor:
    """Log-probabilities (B, T, V), segment by segment of one token, as words are read."""
    memory, parts = model.empty_memory(len(ids)), []
    with torch.no_grad():
        for column in ids.split(1, dim=1):
            found, memory = model.log_probs(column, memory)
            parts.append(found)
    return torch.cat(parts, dim=1)


def greedy(model: AllAttentionLM, prompt: list[int], length: int) -> list[int]:
    return list(generate_tokens(model, prompt, length, sampler(0, 0, 1.0, torch.Generator())))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_exact_distribution(exported_kind: Kinds, kind: str) -> None:
    """Texts longer than the memory, at once and in pieces with the cache; softmax changes nothing."""
    exported = exported_kind(kind)
    model, ids = loaded(exported), random_ids(2, 20, vocabulary=50)
    expected = ours(exported.model, ids)
    with torch.no_grad():
        logits = model(ids).logits
        pieces, cache = [], None
        for piece in ids.split([1, 6, 1, 9, 3], dim=1):
            output = model(piece, cache=cache)
            pieces.append(output.logits)
            cache = output.cache
        last = model(ids, logits_to_keep=1).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits.log_softmax(dim=-1), logits, rtol=0, atol=TOLERANCE)
    assert last.shape == (2, 1, 50)
    torch.testing.assert_close(last, logits[:, -1:], rtol=0, atol=TOLERANCE)
    assert cache is not None
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_ours(exported_kind: Kinds, kind: str) -> None:
    exported = exported_kind(kind)
    model, ids = loaded(exported), random_ids(2, 8, vocabulary=50)
    labels = ids.clone()
    labels[0, 3:5] = -100
    with torch.no_grad():
        nats, _ = exported.model(ids[:, :-1], labels[:, 1:], exported.model.empty_memory(2))
        found = model(ids, labels=labels)
        assert float(found.loss) == pytest.approx(float(nats.sum()) / 12, abs=TOLERANCE)
        share = model(ids, labels=labels, num_items_in_batch=6).loss
        assert float(share) == pytest.approx(float(nats.sum()) / 6, abs=TOLERANCE)
    assert found.logits is not None
    assert model.train()(ids, labels=labels).logits is None


LENGTHS = (3, 0, 12, 7, 1)  # shorter and longer than the memory of 7, and nothing


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Ids (5, 12) and their mask."""
    ids, mask = random_ids(5, 12, vocabulary=50), torch.zeros(5, 12, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, slice(12 - length, None) if side == "left" else slice(0, length)] = 1
    return ids, mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_are_the_rows_alone(exported_kind: Kinds, kind: str, side: str) -> None:
    """Logits, loss, and what follows with the cache, padding in it too."""
    exported = exported_kind(kind)
    model, (ids, mask) = loaded(exported), padded(side)
    more = random_ids(5, 6, vocabulary=50)
    more_mask = torch.ones(5, 6, dtype=torch.int64)
    more_mask[2, 4:] = more_mask[0, 1] = 0
    with torch.no_grad():
        first = model(ids, attention_mask=mask, labels=ids)
        logits, cache = [first.logits], first.cache
        for start in (0, 1, 2, 4):  # one token, one, two, two
            stop = {0: 1, 1: 2, 2: 4, 4: 6}[start]
            whole = torch.cat([mask, more_mask[:, :stop]], dim=1)
            output = model(more[:, start:stop], attention_mask=whole, cache=cache)
            logits.append(output.logits)
            cache = output.cache
        found = torch.cat(logits, dim=1)
        both, both_mask = torch.cat([ids, more], dim=1), torch.cat([mask, more_mask], dim=1).bool()
        losses = 0.0
        for row in range(5):
            alone = both[row][both_mask[row]].unsqueeze(0)
            expected = ours(exported.model, alone)
            torch.testing.assert_close(found[row][both_mask[row]], expected[0], rtol=0, atol=TOLERANCE)
            words = ids[row][mask[row].bool()].unsqueeze(0)
            if words.shape[1] > 1:
                losses += float(model(words, labels=words).loss) * (words.shape[1] - 1)
    predicted = sum(max(0, length - 1) for length in LENGTHS)
    assert float(first.loss) == pytest.approx(losses / predicted, abs=TOLERANCE)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation_is_ours(exported_kind: Kinds, kind: str) -> None:
    """With and without the cache, one text and a padded batch; on past the memory and past `<eos>`."""
    exported = exported_kind(kind)
    model, (ids, mask) = loaded(exported), padded("left")
    ids, mask = ids[[0, 2, 3]], mask[[0, 2, 3]]
    prompts = [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
    expected = [greedy(exported.model, prompt, 15) for prompt in prompts]
    for use_cache in (True, False):
        options = {"max_new_tokens": 15, "use_cache": use_cache}
        batch = model.generate(ids, attention_mask=mask, **options)
        assert batch[:, 12:].tolist() == expected
        alone = model.generate(torch.tensor([prompts[1]]), **options)
        assert alone[0, 12:].tolist() == expected[1]


def test_sampling_repeats_with_its_seed(exported_kind: Kinds) -> None:
    model, ids = loaded(exported_kind("dense, adaptive softmax")), random_ids(3, 4, vocabulary=50)

    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        found: list[list[int]] = model.generate(ids, do_sample=True, top_p=0.9, max_new_tokens=8).tolist()
        return found

    assert sample(1) == sample(1) != sample(2)


def test_beam_search_finds_the_likeliest_texts(exported_kind: Kinds) -> None:
    """As many beams as words try every text of two; in a padded batch, with the cache and without."""
    exported = exported_kind("cut, a layer without heads")
    model, (ids, mask) = loaded(exported), padded("left")
    ids, mask = ids[[0, 2]], mask[[0, 2]]
    options = {"num_beams": 50, "max_new_tokens": 2, "num_return_sequences": 3}
    found = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(found, model.generate(ids, attention_mask=mask, use_cache=False, **options))
    for row in range(2):
        prompt = ids[row][mask[row].bool()].expand(50, -1)
        texts = torch.cat([prompt, torch.arange(50).unsqueeze(1)], dim=1)
        first, second = ours(exported.model, texts)[:, -2:].unbind(1)  # (50, 50) each
        both = first[0].unsqueeze(1) + second
        best = [divmod(int(place), 50) for place in both.flatten().topk(3).indices]
        assert [tuple(text) for text in found[3 * row : 3 * row + 3, 12:].tolist()] == best


def test_half_precision_loads_and_stays_near(exported_kind: Kinds) -> None:
    """bf16 has 8 bits: 3 layers of sums of 32 entries, twice, keep log-probabilities of size 10 within 1."""
    exported = exported_kind("cut, a layer without heads")
    model, ids = loaded(exported, dtype=torch.bfloat16), random_ids(2, 9, vocabulary=50)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.logsumexp(dim=-1), torch.zeros(2, 9), rtol=0, atol=1e-5)
    assert (logits - ours(exported.model, ids)).abs().max() < 1
    assert model.generate(ids, max_new_tokens=3).shape == (2, 12)
    model.train()(ids, labels=ids).loss.backward()


def test_automatic_placement(exported_kind: Kinds) -> None:
    pytest.importorskip("accelerate", reason='needs the extra: pip install "allattn[hf]"')
    exported = exported_kind("Transformer-XL, cut")
    ids = random_ids(1, 9, vocabulary=50)
    with torch.no_grad():
        found = loaded(exported, device_map="auto")(ids).logits.cpu()
    torch.testing.assert_close(found, ours(exported.model, ids), rtol=0, atol=TOLERANCE)


def test_the_cache_is_of_its_rows(exported_kind: Kinds) -> None:
    model = loaded(exported_kind("dense, adaptive softmax"))
    cache = model(random_ids(2, 3, vocabulary=50)).cache
    with pytest.raises(ValueError, match="3 rows, but the cache is of another number"):
        model(random_ids(3, 1, vocabulary=50), cache=cache)
    with pytest.raises(ValueError, match="does not give them"):
        model(random_ids(3, 1, vocabulary=50), output_attentions=True)


def test_reading_without_gradient_is_readings_end(exported_kind: Kinds) -> None:
    """A prompt in one call of transformers, or in segments by our own reader."""
    exported = exported_kind("dense, adaptive softmax")
    model, ids = loaded(exported), random_ids(2, 30, vocabulary=50)
    hidden, _ = read(exported.model, ids)
    with torch.no_grad():
        expected = exported.model.softmax.log_probs(hidden, exported.model.embedding)
        torch.testing.assert_close(model(ids).logits[:, -1], expected, rtol=0, atol=TOLERANCE)
