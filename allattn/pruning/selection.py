"""Other ways to choose heads, for comparison with the learned gates: random, magnitude, gradient.

Each gives every head present a score; the lowest go. Removal and fine-tuning are the same as for the gates.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig, Scope, Selection
from allattn.pruning.gates import heads_to_keep

Batches = Iterable[tuple[Tensor, Tensor]]  # consecutive (inputs, targets) segments, (B, T) int64 each


def select_heads(
    model: AllAttentionLM, batches: Batches, config: GatesConfig, noise: torch.Generator
) -> list[Tensor]:
    """0/1 gates, one (h,) vector per layer: the heads to keep by `config.selection` at the target sparsity.

    Args:
        model: on any device.
        batches: the text that scores are taken on.
        config: selection, scope, target_sparsity.
        noise: of the random selection.
    """
    assert config.target_sparsity is not None
    if config.selection is Selection.random:
        scores = random_scores(model.config.heads_present, noise)
    elif config.selection is Selection.magnitude:
        scores = magnitude_scores(model, batches)
    else:
        scores = gradient_scores(model, batches)
    keep = heads_to_keep(config.target_sparsity, model.config.heads_kept_total)
    return keep_highest(scores, keep, config.scope)


def random_scores(heads: Sequence[int], noise: torch.Generator) -> list[Tensor]:
    """Uniform scores, one (h,) vector per layer."""
    return [torch.rand(count, generator=noise) for count in heads]


def magnitude_scores(model: AllAttentionLM, batches: Batches) -> list[Tensor]:
    """Frobenius norm of each head's WO block times the mean norm of its output s_g h_i over the text.

    Args:
        model: in evaluation mode afterwards as before.
        batches: the text, memory carried from one to the next.
    """
    c = model.config.head_width
    layers = model.stack
    norms: list[list[Tensor]] = [[] for _ in layers]

    def note(layer: int) -> RemovableHandle:
        def hook(_: torch.nn.Module, args: tuple[Tensor]) -> None:
            z = args[0].unflatten(-1, (-1, c))  # (B, T, h, c)
            norms[layer].append(z.norm(dim=-1).mean(dim=(0, 1)))

        return layers[layer].output.register_forward_pre_hook(hook)

    handles = [note(layer) for layer in range(len(layers))]
    training = model.training
    model.eval()
    with torch.no_grad():
        memory = None
        for inputs, _ in batches:
            memory = model.empty_memory(len(inputs)) if memory is None else memory
            _, memory = model.hidden(inputs, memory)
    model.train(training)
    for handle in handles:
        handle.remove()
    scores = []
    for layer, found in zip(layers, norms, strict=True):
        block = layer.output.weight.detach().unflatten(1, (-1, c))  # (d, h, c)
        scores.append(block.norm(dim=(0, 2)) * torch.stack(found).mean(0) if found else torch.zeros(0))
    return scores


def gradient_scores(model: AllAttentionLM, batches: Batches) -> list[Tensor]:
    """Mean over the segments of |dL / d gate| at open gates, each layer's scores scaled to unit norm.

    Michel, Levy, Neubig, *Are Sixteen Heads Really Better than One?* (2019): L is a segment's mean loss.
    """
    layers = model.stack
    sizes = [len(layer.heads_kept) for layer in layers]
    sums = [torch.zeros(size) for size in sizes]
    training = model.training
    model.eval()
    memory = None
    for inputs, targets in batches:
        memory = model.empty_memory(len(inputs)) if memory is None else memory
        gates = [
            torch.full((size,), layer.scale, requires_grad=True)
            for size, layer in zip(sizes, layers, strict=True)
        ]
        nats, memory = model(inputs, targets, memory, gates)
        used = [gate for gate in gates if gate.numel()]
        gradients = iter(torch.autograd.grad(nats.sum() / (targets >= 0).sum().clamp(min=1), used))
        for total, gate in zip(sums, gates, strict=True):
            if gate.numel():
                total += (next(gradients) * gate.detach()).abs()
    model.train(training)
    return [total / total.norm().clamp(min=torch.finfo(total.dtype).tiny) for total in sums]


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
    counts = [0] * len(scores)
    while sum(counts) < keep:
        for layer, layer_scores in enumerate(scores):
            if counts[layer] < len(layer_scores) and sum(counts) < keep:
                counts[layer] += 1
    return [
        keep_highest([layer], count, Scope.all_layers)[0] for layer, count in zip(scores, counts, strict=True)
    ]
