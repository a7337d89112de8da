"""Slow float64 references of the model's parts, written from the formulas alone, and small models to try.

Loops over batch rows, heads, queries and keys; nothing of the package's arithmetic is called. Gradients come
from autograd, so a reference takes a layer's parameters as plain tensors that may require gradients.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from allattn.model.config import ModelConfig
from allattn.model.embedding import AdaptiveEmbedding
from allattn.model.language_model import AllAttentionLM
from allattn.model.softmax import TiedAdaptiveSoftmax

Module = TypeVar("Module", bound=nn.Module)


def small_config(**changes: Any) -> ModelConfig:
    """A small model without dropout: 2 layers, d 12, H 4, N 3, M 4, three bands of 30 words."""
    values: dict[str, Any] = {
        "vocabulary_size": 30,
        "layers": 2,
        "width": 12,
        "heads": 4,
        "persistent_vectors": 3,
        "memory_length": 4,
        "position_rows": 40,
        "cutoffs": [8, 18],
        "div": 2,
    }
    dropouts = ("attention", "projection", "feed_forward", "input", "output", "word")
    values |= {f"{name}_dropout": 0.0 for name in dropouts}
    return ModelConfig(**(values | changes))


def random_model(dtype: torch.dtype = torch.float64, **changes: Any) -> AllAttentionLM:
    """A small model in evaluation mode with every parameter random, biases too."""
    return randomised(AllAttentionLM(small_config(**changes)).to(dtype)).eval()


def randomised(module: Module) -> Module:
    """Random values in every parameter, so that none is hidden by its start value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


def random_ids(*shape: int, vocabulary: int = 30) -> Tensor:
    """Words of every band."""
    return torch.randint(vocabulary, shape)


def random_memory(model: AllAttentionLM, rows: int, length: int) -> list[Tensor]:
    """A memory of `length` random positions per layer."""
    table = model.positions.table
    return [torch.randn(rows, length, table.shape[1], dtype=table.dtype) for _ in model.layers]


def rounding(dtype: torch.dtype, terms: int) -> float:
    """What `terms` roundings one after another add up to at most, relative to what is rounded: eps each.

    A sum of n products rounds about n times (Higham, Accuracy and Stability, 3.1), whatever the order; of two
    results each has its own.
    """
    return terms * torch.finfo(dtype).eps


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, name: str = "") -> None:
    """Largest difference relative to the largest expected entry (never to less than 1e-3)."""
    assert actual.shape == expected.shape, name
    if expected.numel():
        worst = (actual - expected).abs().max().item()
        assert worst <= tolerance * max(expected.abs().max().item(), 1e-3), name  # false for NaN


def gradients(value: Tensor, of: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a scalar; zeros for what it does not depend on."""
    return torch.autograd.grad(value, list(of), allow_unused=True, materialize_grads=True)


def reference_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    pk: Tensor,
    pv: Tensor,
    window: int | None,
    keep: Tensor | None = None,
) -> Tensor:
    """What `allattn.model.cores.inputs.Core` promises, one (row, head, query, key) at a time.

    `window` None is the growing mask: all keys up to the query's own. `keep` (B, h, T, S + N) multiplies the
    probabilities: what dropout does.
    """
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    rows = []
    for b in range(batch):
        for i in range(queries):
            for h in range(heads):
                scores, values = [], []
                own = keys - queries + i  # the query's position in the sequence of keys
                for j in range(keys):
                    distance = own - j
                    if distance < 0 or (window is not None and distance > window):
                        continue
                    content = torch.dot(q[b, i, h] + u[h], k[b, j, h])
                    position = torch.dot(q[b, i, h] + w[h], r[distance, h])
                    scores.append((content + position) / math.sqrt(width))
                    values.append(v[b, j, h] * (1 if keep is None else keep[b, h, i, j]))
                for n in range(pk.shape[0]):
                    scores.append(torch.dot(q[b, i, h], pk[n, h]) / math.sqrt(width))
                    values.append(pv[n, h] * (1 if keep is None else keep[b, h, i, keys + n]))
                rows.append(_weighted_mean(scores, values))
    return torch.stack(rows).view(batch, queries, heads, width) if rows else q.new_zeros(q.shape)


def _weighted_mean(scores: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    largest = max(score.item() for score in scores)
    weights = [torch.exp(score - largest) for score in scores]
    total = sum(weights[1:], weights[0])
    mean = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        mean = mean + weight / total * value
    return mean


def reference_layer(
    parameters: Mapping[str, Tensor],
    head_width: int,
    x: Tensor,
    memory: Tensor,
    positions: Tensor,
    window: int | None,
    multipliers: Sequence[float | Tensor],
) -> Tensor:
    """One layer without dropout; `parameters` under the names of `AllAttention`, heads in blocks.

    Args:
        parameters: of the heads present only.
        head_width: c.
        x: (B, T, d).
        memory: (B, M', d).
        positions: (S, d), row i for distance i.
        window: None = the growing mask.
        multipliers: one number or scalar tensor per head present.
    """
    batch, queries, width = x.shape
    blocks = [slice(h * head_width, (h + 1) * head_width) for h in range(len(multipliers))]

    def of_heads(weight: Tensor, vector: Tensor) -> Tensor:
        return torch.stack([weight[block] @ vector for block in blocks])  # (h, c)

    def of_rows(weight: Tensor, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.stack([torch.stack([of_heads(weight, vector) for vector in row]) for row in rows])

    def by_head(matrix: Tensor) -> Tensor:
        return torch.stack([matrix[..., block] for block in blocks], dim=-2)

    outputs = [[x[b, i] + parameters["bias"] for i in range(queries)] for b in range(batch)]
    if blocks:
        normed = [[_norm(vector, parameters) for vector in [*memory[b], *x[b]]] for b in range(batch)]
        persistent = parameters["persistent_values"].shape[0]
        z = reference_attend(
            of_rows(parameters["query.weight"], [row[len(row) - queries :] for row in normed]),
            of_rows(parameters["key.weight"], normed),
            of_rows(parameters["value.weight"], normed),
            torch.stack([of_heads(parameters["position.weight"], row) for row in positions]),
            by_head(parameters["content_bias"]),
            by_head(parameters["position_bias"]),
            by_head(parameters["persistent_keys"]) * math.sqrt(head_width),
            by_head(parameters["persistent_values"]) * math.sqrt(persistent),
            window,
        )
        for b in range(batch):
            for i in range(queries):
                for h, block in enumerate(blocks):  # project per head, then add
                    projected = parameters["output.weight"][:, block] @ z[b, i, h]
                    outputs[b][i] = outputs[b][i] + multipliers[h] * projected
    vectors = [vector for row in outputs for vector in row]
    if "feed_forward.inner.weight" in parameters:
        vectors = [vector + _feed_forward(vector, parameters) for vector in vectors]
    return torch.stack(vectors).view(batch, queries, width)


def _norm(vector: Tensor, parameters: Mapping[str, Tensor], of: str = "") -> Tensor:
    centred = vector - vector.sum() / len(vector)
    variance = (centred * centred).sum() / len(vector)
    weight, bias = parameters[f"{of}norm.weight"], parameters[f"{of}norm.bias"]
    return centred / torch.sqrt(variance + 1e-5) * weight + bias


def _feed_forward(vector: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """W2 ReLU(W1 LN(x) + b1) + b2, hidden unit by hidden unit."""
    normed = _norm(vector, parameters, "feed_forward.")
    added = parameters["feed_forward.outer.bias"]
    into, out = parameters["feed_forward.inner.weight"], parameters["feed_forward.outer.weight"]
    for unit, bias in enumerate(parameters["feed_forward.inner.bias"]):
        score = torch.dot(into[unit], normed) + bias
        if score > 0:
            added = added + score * out[:, unit]
    return added


def reference_embedding(embedding: AdaptiveEmbedding, ids: Tensor, config: ModelConfig) -> Tensor:
    """Every word looked up by itself: its band's row, projected, times sqrt(d)."""
    vectors = []
    for word in ids.flatten().tolist():
        band, row = _band_and_row(word, config)
        vector = embedding.tables[band][row]
        if config.cutoffs:
            vector = sum(
                (entry * line for entry, line in zip(vector, embedding.projections[band], strict=True)),
                torch.zeros(config.width, dtype=vector.dtype),
            )
        vectors.append(vector * config.width**0.5)
    return torch.stack(vectors).view(*ids.shape, config.width)


def _band_and_row(word: int, config: ModelConfig) -> tuple[int, int]:
    band = sum(word >= cutoff for cutoff in config.cutoffs)
    return band, word - [0, *config.cutoffs][band]


def reference_log_probs(
    softmax: TiedAdaptiveSoftmax, embedding: AdaptiveEmbedding, hidden: Tensor, config: ModelConfig
) -> Tensor:
    """log p(word) for one hidden vector (d,), word by word: log p(head entry) + log p(word | band)."""
    vocabulary = config.vocabulary_size
    assert vocabulary is not None
    bands = len(config.cutoffs) + 1
    ends = [*config.cutoffs, vocabulary]
    starts = [0, *config.cutoffs]

    def logit(word: int) -> Tensor:
        band, row = _band_and_row(word, config)
        if not config.cutoffs:
            vector = hidden
        elif band == 0:
            vector = softmax.head_projection.t() @ hidden
        else:
            vector = embedding.projections[band] @ hidden
        return torch.dot(embedding.tables[band][row], vector) + softmax.biases[band][row]

    def log_sum(logits: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(logits)).exp().sum().log()

    logits = [logit(word) for word in range(vocabulary)]
    clusters = [
        torch.dot(softmax.cluster_weight[band - 1], softmax.head_projection.t() @ hidden)
        + softmax.cluster_bias[band - 1]
        for band in range(1, bands)
    ]
    head = log_sum([*logits[: ends[0]], *clusters])
    within = [log_sum(logits[starts[band] : ends[band]]) for band in range(bands)]
    answer = []
    for word in range(vocabulary):
        band, _ = _band_and_row(word, config)
        entry = logits[word] if band == 0 else clusters[band - 1] + logits[word] - within[band]
        answer.append(entry - head)
    return torch.stack(answer)


def reference_model(model: AllAttentionLM, ids: Tensor) -> Tensor:
    """Log-probabilities (B, T, V) of a whole text at once, no memory, with each layer's constant scale."""
    config = model.config
    window = config.memory_length if config.same_length else None
    rows = ids.shape[1] if window is None else min(ids.shape[1], window + 1)
    positions = model.positions.table[:rows]  # distances that some query sees
    x = reference_embedding(model.embedding, ids, config)
    for index, layer in enumerate(model.layers):
        multipliers = [config.scale(index)] * len(config.kept(index))
        memory = x.new_zeros(ids.shape[0], 0, config.width)
        parameters = dict(layer.named_parameters())
        x = reference_layer(parameters, config.head_width, x, memory, positions, window, multipliers)
    flat = [reference_log_probs(model.softmax, model.embedding, row, config) for row in x.flatten(0, 1)]
    return torch.stack(flat).view(*ids.shape, -1)
