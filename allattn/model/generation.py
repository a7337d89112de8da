"""Writing on: one word after the other, from a prompt."""

from collections.abc import Iterator, Sequence

import torch

from allattn.model.cache import next_log_probs, read, step
from allattn.model.language_model import AllAttentionLM
from allattn.model.sampling import Choose


@torch.no_grad()
def generate_tokens(
    model: AllAttentionLM,
    prompt: Sequence[int],
    length: int,
    choose: Choose,
    memory_length: int | None = None,
) -> Iterator[int]:
    """Words that follow the prompt, each as soon as it is chosen; the first one after the prompt is read.

    Args:
        model: in evaluation mode.
        prompt: ids, at least one.
        length: how many words, at least 1.
        choose: from the log-probabilities (V,) on the model's device to the next word's id.
        memory_length: M, at least 1; None = the model's.

    Raises:
        InputError: the position table has fewer than M + 1 rows, or `choose` raises it.
    """
    device = model.device
    hidden, cache = read(model, torch.tensor([prompt], device=device), memory_length)
    yield (word := choose(next_log_probs(model, hidden)[0]))
    for _ in range(length - 1):
        hidden = step(model, torch.tensor([word], device=device), cache)
        yield (word := choose(next_log_probs(model, hidden)[0]))
