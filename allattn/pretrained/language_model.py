"""A pretrained causal language model of transformers as a `GatedLM`: every head's Z times its gate.

The gate acts on the input of the output projection, (B, T, h * dv), as in All-attention: a head writes
s_g * g_i * Z_i WO^(i). transformers' own classes compute everything else.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allattn.errors import InputError, first_line
from allattn.model.bands import BandCounts
from allattn.model.cores.inputs import Core
from allattn.model.gated import GatedLM, HeadPart, Memory
from allattn.pretrained.architecture import attentions, head_parts, read_unevenly, shrink, why_uncut
from allattn.pretrained.libraries import transformers
from allattn.pretrained.sizes import PretrainedSizes

ATTENTION = "allattn"  # the name of `read_unevenly` in transformers
NETWORK = "network."  # prefix of the weights' names


class PretrainedLM(GatedLM):
    """The model, dense or with heads removed.

    Args:
        sizes: that the network has.
        network: of those shapes; its weights may lie on the device meta.
    """

    def __init__(self, sizes: PretrainedSizes, network: nn.Module) -> None:
        super().__init__()
        self.config = sizes
        self.network: Any = network
        self.attentions = attentions(network, self.layers)
        self._multipliers: list[Tensor] | None = None
        for layer, attention in enumerate(self.attentions):
            attention.projection.register_forward_pre_hook(partial(self._gate, layer))
            if not sizes.heads_present[layer] and not sizes.masked:
                for name, parameter in attention.module.named_parameters():
                    parameter.requires_grad_(name == f"{attention.output}.bias")

    @property
    def layers(self) -> Any:  # type: ignore[override]
        """One module per layer."""
        return layers_of(self.network)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.parameters()).dtype

    @property
    def head_parts(self) -> dict[str, HeadPart]:
        """Query, key, value and output projections, with their biases; none where heads are only zeroed."""
        if self.config.masked:
            return {}
        return {NETWORK + name: part for name, part in head_parts(self.attentions, self.config).items()}

    @property
    def outputs(self) -> set[str]:
        """Names of the output projections' weights, and of all that has one axis: norms and biases."""
        projections = {f"{NETWORK}{a.name}.{a.output}.weight" for a in self.attentions}
        return projections | {name for name, p in self.named_parameters() if p.ndim == 1}

    @property
    def core_name(self) -> str:
        """The attention of transformers."""
        return str(self.network.config._attn_implementation)

    def use_core(self, core: Core) -> None:
        """Attention is computed by transformers: there is no choice."""

    def empty_memory(self, rows: int) -> Memory:
        """None: every segment is read by itself."""
        return []

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        memory: Memory,
        multipliers: list[Tensor] | None = None,
        memory_length: int | None = None,
        counts: BandCounts | None = None,
    ) -> tuple[Tensor, Memory]:
        """Nats (B, T) of each target, 0 where not scored; no memory, see `GatedLM`."""
        return _nats(self.logits(ids, multipliers), targets), []

    def with_first_level(
        self,
        ids: Tensor,
        targets: Tensor,
        memory: Memory,
        multipliers: list[Tensor] | None = None,
        counts: BandCounts | None = None,
    ) -> tuple[Tensor, Tensor, Memory]:
        """`forward` with the log-probabilities of all words, (B, T, V), in the middle."""
        logits = self.logits(ids, multipliers)
        return _nats(logits, targets), logits.log_softmax(-1), []

    def first_level(
        self, ids: Tensor, memory: Memory, counts: BandCounts | None = None
    ) -> tuple[Tensor, Memory]:
        """Log-probabilities of all words, (B, T, V)."""
        return self.logits(ids).log_softmax(-1), []

    def logits(self, ids: Tensor, multipliers: list[Tensor] | None = None) -> Tensor:
        """(B, T, V) of the next token, in float32 or wider.

        Args:
            ids: (B, T) int64.
            multipliers: per layer (h,) s_g * g_i; None = the constants s_g.
        """
        self._multipliers = multipliers
        try:
            logits: Tensor = self.network(input_ids=ids, use_cache=False).logits
        finally:
            self._multipliers = None
        return logits if logits.dtype == torch.float64 else logits.float()

    def layers_alone(self, segments: Sequence[Tensor]) -> Callable[[], None]:
        """An action that puts the segments through the network up to the last norm: all but the softmax."""
        body = self.network.base_model

        def through() -> None:
            with torch.no_grad():
                for ids in segments:
                    body(input_ids=ids, use_cache=False)

        return through

    def _gate(self, layer: int, projection: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Multiply the heads' outputs (B, T, h * dv) before the output projection."""
        sizes = self.config
        if self._multipliers is None:
            if sizes.scale(layer) == 1.0 and not (sizes.masked and len(sizes.kept(layer)) < sizes.heads):
                return None
            factors = args[0].new_full((len(sizes.kept(layer)),), sizes.scale(layer))
        else:
            factors = self._multipliers[layer]
        if sizes.masked:
            kept = torch.tensor(sizes.kept(layer), dtype=torch.long, device=factors.device)
            factors = factors.new_zeros(sizes.heads).index_copy(0, kept, factors)
        z = args[0].unflatten(-1, (len(factors), -1))  # (B, T, h, dv)
        return ((z * factors.to(z.dtype).unsqueeze(-1)).flatten(-2), *args[1:])


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T) negative log-likelihoods, 0 where the target is negative."""
    places = targets.masked_fill(targets < 0, -100).flatten()
    return F.cross_entropy(logits.flatten(0, 1), places, reduction="none").view_as(targets)


def layers_of(network: Any) -> nn.ModuleList:
    """The list of a network's layers.

    Raises:
        InputError: there is none.
    """
    for name in ("layers", "h"):  # Llama, GPT-NeoX and most others; GPT-2
        if isinstance(found := getattr(network.base_model, name, None), nn.ModuleList):
            return found
    raise InputError(
        f"{type(network).__name__}: its list of layers cannot be found, so its heads cannot be gated"
    )


def sizes_only(sizes: PretrainedSizes) -> PretrainedLM:
    """The model with its weights on the device meta: names, shapes and what is trained, no numbers."""
    library = transformers()
    config = library.config(sizes.network)
    uneven = sizes.heads_kept is not None and not sizes.masked
    if uneven:
        library.register_attention(ATTENTION, read_unevenly)
    try:
        with library.empty():
            network = library.network(config, ATTENTION if uneven else None)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise InputError(f"transformers cannot build the model ({first_line(error)})") from None
    if uneven:
        shrink(attentions(network, layers_of(network)), sizes.dense(), sizes)
    network.tie_weights()  # what is shared was made twice
    return PretrainedLM(sizes, network)


def filled(
    sizes: PretrainedSizes, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> PretrainedLM:
    """A model of these sizes with these weights, all of them."""
    model = sizes_only(sizes)
    own = {name: tensor.to(device, dtype, copy=True) for name, tensor in state.items()}
    model.load_state_dict(own, assign=True)
    model.network.tie_weights()
    return model.to(device)


def refuse_removal(model: PretrainedLM) -> None:
    """Refuse to cut heads where the architecture does not let them go.

    Raises:
        InputError: says why, and what is possible.
    """
    if reason := why_uncut(model.attentions[0], model.config):
        raise InputError(f"{reason}: heads can be zeroed (gates.removal=masked), not removed")
