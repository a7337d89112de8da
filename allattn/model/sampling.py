"""Which word comes next: temperature, top-k and top-p on log-probabilities, then a draw."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from allattn.errors import InputError

Choose = Callable[[Tensor], int]  # log-probabilities (V,) -> the chosen word


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuse settings that choose no word.

    Raises:
        InputError: names the setting.
    """
    if not 0 <= temperature < math.inf:
        raise InputError(f"temperature={temperature}: must be 0 (the likeliest word) or a positive number")
    if top_k < 0:
        raise InputError(f"top_k={top_k}: must be 0 (all words) or the number of words to choose among")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p={top_p}: must lie in (0, 1]; 1 keeps all words")


def candidates(log_probs: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The words that may come next and their probabilities.

    The temperature comes first, then the `top_k` likeliest words, then of these the fewest likeliest whose
    share of the probability reaches `top_p` (Holtzman et al., arXiv:1904.09751). Of equally likely words
    the one with the smaller id counts as the likelier.

    Args:
        log_probs: (V,).
        temperature: divides the log-probabilities; positive.
        top_k: 0 = all words.
        top_p: in (0, 1]; 1 = all words.

    Returns:
        Ids (n,) int64 and probabilities (n,) float64 that sum to 1.
    """
    scaled = (log_probs.double() - log_probs.max()) / temperature
    words = torch.arange(len(scaled), device=scaled.device)
    if 0 < top_k < len(scaled):
        words = _likeliest_first(scaled, at_least=scaled.topk(top_k).values[-1])[:top_k]
    if top_p < 1:
        shares = scaled[words].softmax(dim=0)
        # All that are rarer than this make less than 1 - top_p together, so only the others need sorting.
        order = _likeliest_first(shares, at_least=(1 - top_p) / (2 * len(words)))
        reached = shares[order].cumsum(dim=0)
        words = words[order[: 1 + int((reached < top_p).sum())]]
    return words, scaled[words].softmax(dim=0)


def sampler(temperature: float, top_k: int, top_p: float, noise: torch.Generator) -> Choose:
    """Draws from `candidates`, on the CPU; at temperature 0 the likeliest word (the first of equals).

    Raises:
        InputError: by `check_sampling`, or when a word is chosen: the log-probabilities are not numbers.
    """
    check_sampling(temperature, top_k, top_p)

    def choose(log_probs: Tensor) -> int:
        log_probs = log_probs.cpu()
        if log_probs.max().isnan():
            raise InputError("the model's probabilities are not numbers (NaN): its weights are damaged")
        if temperature == 0:
            return int(log_probs.argmax())
        words, probabilities = candidates(log_probs, temperature, top_k, top_p)
        shares = probabilities.cumsum(dim=0)
        point = torch.rand(1, generator=noise, dtype=torch.float64) * shares[-1]
        return int(words[torch.searchsorted(shares, point, right=True).clamp(max=len(words) - 1)])

    return choose


def _likeliest_first(scores: Tensor, at_least: Tensor | float) -> Tensor:
    """Places of the scores that reach `at_least`, the highest first, equal ones in order."""
    places = (scores >= at_least).nonzero().squeeze(1)
    return places[scores[places].argsort(descending=True, stable=True)]
