"""Other ways to choose heads, for comparison with the learned gates: by a score, at once or in several steps.

The lowest-scored heads go. Removal and fine-tuning are the same as for the gates.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from allattn.families import watched
from allattn.heads.ranking import keep_highest
from allattn.heads.scores import importance, text_scores
from allattn.heads.watched import Batch
from allattn.model.gated import GatedLM
from allattn.pruning.config import GatesConfig, Selection
from allattn.pruning.gates import by_head, heads_to_keep
from allattn.pruning.objective import heads_per_gate


def select_heads(
    model: GatedLM, batches: Iterable[Batch], config: GatesConfig, keep: int, noise: torch.Generator
) -> list[Tensor]:
    """0/1 gates, one (h,) vector per layer: the heads to keep by `config.selection`.

    Args:
        model: on any device.
        batches: the text that scores are taken on, with memory where the model has one.
        config: selection, scope.
        keep: how many, over all layers.
        noise: of the random selection.

    Raises:
        InputError: the model does not give what the score needs.
    """
    name = (Selection.gradient if config.selection is Selection.iterative else config.selection).value
    scores = text_scores(watched(model), batches, [name], model.config.memory_length > 0, noise)[name]
    ranking, share = importance(name, scores), heads_per_gate(config, model.config)
    if share > 1:  # a group counts by the sum of its heads
        ranking = [layer.unflatten(0, (-1, share)).sum(1) for layer in ranking]
    return by_head(keep_highest(ranking, keep // share, config.scope), share)


def heads_after(target_sparsity: float, heads: int, removal: int, removals: int) -> int:
    """How many of `heads` stay after each of several removals of nearly the same size: 1, 2, ..., `removals`.

    The last one leaves what one removal alone would leave.
    """
    gone = heads - heads_to_keep(target_sparsity, heads)
    return heads - round(gone * removal / removals)
