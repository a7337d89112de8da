"""Other ways to choose heads, for comparison with the learned gates: random, magnitude, gradient, iterative.

Each gives every head present a score; the lowest go. Removal and fine-tuning are the same as for the gates.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from allattn.devices import to_device
from allattn.families import all_attention
from allattn.model.gated import GatedLM
from allattn.model.language_model import AllAttentionLM
from allattn.model.words import words_of
from allattn.pruning.config import GatesConfig, Scope, Selection
from allattn.pruning.gates import by_head, equal_counts, heads_to_keep
from allattn.pruning.objective import heads_per_gate

Batches = Iterable[tuple[Tensor, Tensor]]  # consecutive (inputs, targets) segments, (B, T) int64 each


def select_heads(
    model: GatedLM, batches: Batches, config: GatesConfig, keep: int, noise: torch.Generator
) -> list[Tensor]:
    """0/1 gates, one (h,) vector per layer: the heads to keep by `config.selection`.

    Args:
        model: on any device.
        batches: the text that scores are taken on.
        config: selection, scope.
        keep: how many, over all layers.
        noise: of the random selection.
    """
    if config.selection is Selection.random:
        scores = random_scores(model.config.heads_present, noise)
    elif config.selection is Selection.magnitude:
        scores = magnitude_scores(all_attention(model, "gates.selection=magnitude"), batches)
    else:
        assert config.selection in (Selection.gradient, Selection.iterative)
        scores = gradient_scores(model, batches)
    share = heads_per_gate(config, model.config)
    if share > 1:  # a group counts by the sum of its heads
        scores = [layer.unflatten(0, (-1, share)).sum(1) for layer in scores]
    return by_head(keep_highest(scores, keep // share, config.scope), share)


def heads_after(target_sparsity: float, heads: int, removal: int, removals: int) -> int:
    """How many of `heads` stay after each of several removals of nearly the same size: 1, 2, ..., `removals`.

    The last one leaves what one removal alone would leave.
    """
    gone = heads - heads_to_keep(target_sparsity, heads)
    return heads - round(gone * removal / removals)


def random_scores(heads: Sequence[int], noise: torch.Generator) -> list[Tensor]:
    """Uniform scores, one (h,) vector per layer."""
    return [torch.rand(count, generator=noise) for count in heads]


def magnitude_scores(model: AllAttentionLM, batches: Batches) -> list[Tensor]:
    """Frobenius norm of each head's WO block times the mean norm of its output s_g h_i over the text.

    Args:
        model: in evaluation mode afterwards as before.
        batches: the text, memory carried from one to the next; tokens whose target is negative do not count.
    """
    c, layers = model.config.head_width, model.stack
    device = model.device
    sums = [torch.zeros(len(layer.heads_kept), dtype=torch.float64, device=device) for layer in layers]
    scored = torch.empty(0)  # places among the B * T tokens of the batch that is being read
    tokens = 0

    def note(layer: int) -> RemovableHandle:
        def hook(_: torch.nn.Module, args: tuple[Tensor]) -> None:
            norms = args[0].unflatten(-1, (-1, c)).norm(dim=-1).flatten(0, 1)  # (B*T, h)
            sums[layer] += norms[scored].sum(0, dtype=torch.float64)

        return layers[layer].output.register_forward_pre_hook(hook)

    handles = [note(layer) for layer in range(len(layers))]
    training = model.training
    model.eval()
    with torch.no_grad():
        memory = None
        for inputs, targets in batches:
            counted = (targets.flatten() >= 0).nonzero().squeeze(1)
            tokens += len(counted)
            scored = to_device(counted, device)
            memory = model.empty_memory(len(inputs)) if memory is None else memory
            words = words_of(inputs, targets, model)
            in_bands = words.counts and words.counts.inputs
            _, memory = model.hidden(words.inputs, memory, counts=in_bands)
    model.train(training)
    for handle in handles:
        handle.remove()
    scores = []
    for layer, total in zip(layers, sums, strict=True):
        block = layer.output.weight.detach().cpu().unflatten(1, (len(layer.heads_kept), c))  # (d, h, c)
        scores.append(block.norm(dim=(0, 2)) * (total.cpu() / max(tokens, 1)).to(block.dtype))
    return scores


def gradient_scores(model: GatedLM, batches: Batches) -> list[Tensor]:
    """Sum over the segments of |dL / d gate| at open gates, each layer's scores scaled to unit norm.

    Michel, Levy, Neubig, *Are Sixteen Heads Really Better than One?* (2019). L is a segment's summed loss, so
    a segment counts by its tokens. Arguments as of `magnitude_scores`.
    """
    scales = [model.config.scale(layer) for layer in range(model.config.layers)]
    sums = [torch.zeros(h, dtype=model.dtype, device=model.device) for h in model.config.heads_present]
    training = model.training
    model.eval()
    memory = None
    for inputs, targets in batches:
        memory = model.empty_memory(len(inputs)) if memory is None else memory
        gates = [
            total.new_full((len(total),), scale).requires_grad_()
            for total, scale in zip(sums, scales, strict=True)
        ]
        words = words_of(inputs, targets, model)
        nats, memory = model(words.inputs, words.targets, memory, gates, counts=words.counts)
        used = [gate for gate in gates if gate.numel()]
        gradients = iter(torch.autograd.grad(nats.sum(), used))
        for total, gate in zip(sums, gates, strict=True):
            if gate.numel():
                total += (next(gradients) * gate.detach()).abs()
    model.train(training)
    return [(total / total.norm().clamp(min=torch.finfo(total.dtype).tiny)).cpu() for total in sums]


def keep_highest(scores: Sequence[Tensor], keep: int, scope: Scope) -> list[Tensor]:
    """0/1 gates, one (h,) vector per layer, that keep the `keep` highest-scored heads.

    Each layer keeps the same number where the scope is `each_layer`; what does not divide goes to the first
    layers, and a layer keeps at most what it has.
    """
    if scope is Scope.all_layers:
        flat = torch.cat(list(scores))
        gates = torch.zeros_like(flat)
        gates[torch.sort(flat, descending=True, stable=True).indices[:keep]] = 1
        return list(gates.split([len(layer) for layer in scores]))
    counts = equal_counts(keep, [len(layer) for layer in scores])
    return [
        keep_highest([layer], count, Scope.all_layers)[0] for layer, count in zip(scores, counts, strict=True)
    ]
