"""`AllAttentionLM` as a causal language model of transformers.

The logits are the exact log-probabilities: an adaptive softmax has no other full logits, and softmax of them
is the distribution itself. The cache is the segment memory.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from allattn.errors import InputError
from allattn.huggingface.configuration import AllAttentionConfig
from allattn.huggingface.rows import AllAttentionCache, nothing_read, read_rows
from allattn.model.embedding import AdaptiveEmbedding
from allattn.model.language_model import AllAttentionLM, sizes_only
from allattn.training.exports import read_export
from allattn.training.hub_models import hub_folder
from allattn.training.weights import refuse_non_finite_weights


class AllAttentionForCausalLM(PreTrainedModel, GenerationMixin):
    """The model, dense or cut, with everything that transformers does with one.

    Raises:
        InputError: the configuration contradicts itself.
    """

    config_class = AllAttentionConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # num_items_in_batch
    _is_stateful = True  # a full memory cannot be set back: no assisted generation
    _no_split_modules = ["AllAttentionLM"]  # noqa: RUF012  (embedding and softmax share their tables)

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__(config)
        self.model = AllAttentionLM(config.sizes)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: every module fills its own parameters when it is made."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, once the folder is found to be whole; no code in it is run.

        Raises:
            InputError: the folder is damaged, its files do not belong together, a weight is NaN or infinite,
                the hub does not give it, or `trust_remote_code` is asked for.
        """
        if kwargs.pop("trust_remote_code", None):
            raise InputError("trust_remote_code: no model of allattn needs code of its folder; leave it out")
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            names = ("revision", "cache_dir", "token", "local_files_only", "force_download")
            options = {name: kwargs.pop(name) for name in names if name in kwargs}
            folder = hub_folder(str(pretrained_model_name_or_path), **options)
        sizes = read_export(folder, needs_tokenizer=False).sizes
        loaded = super().from_pretrained(folder, *args, **kwargs)
        model: AllAttentionForCausalLM = loaded[0] if isinstance(loaded, tuple) else loaded
        here = {name: tensor for name, tensor in model.state_dict().items() if tensor.device.type != "meta"}
        refuse_non_finite_weights(here, folder)
        trained = sizes_only(sizes).trained
        for name, parameter in model.model.named_parameters():
            parameter.requires_grad_(name in trained)
        return loaded

    def get_input_embeddings(self) -> AdaptiveEmbedding:
        """The embedding; it has a table for every band of the vocabulary."""
        return self.model.embedding

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            InputError: always.
        """
        raise InputError("the vocabulary of a model of allattn lies in bands by frequency: it is not resized")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: AllAttentionCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> Any:
        """Log-probabilities of the next token after each token.

        Args:
            input_ids: (B, T) int64, the tokens that follow what `cache` has read.
            attention_mask: (B, at least T), 0 = padding, on any side; its last T columns are of these tokens.
            cache: from the call before; it is changed.
            labels: (B, T), `input_ids` or -100 where a token is not to be predicted. They are shifted here.
            use_cache: return the cache; None = where not training.
            logits_to_keep: of the last so many tokens, or of these positions; 0 = of all.
            num_items_in_batch: divides the sum of nats; None = the mean over the tokens predicted.
            return_dict: an output with names instead of a tuple.
            output_attentions: not there.
            output_hidden_states: not there.

        Returns:
            loss (), nats per token, where there are labels; logits (B, T, V), log-probabilities in float32
            (float64 of such a model), None where a model in training mode gets labels: its loss needs none;
            cache.

        Raises:
            InputError: the cache is of another number of rows, or what is not there is asked for.
        """
        if output_attentions or output_hidden_states:
            raise InputError("output_attentions, output_hidden_states: a model of allattn does not give them")
        rows, tokens = input_ids.shape
        keep = (not self.training if use_cache is None else use_cache) or cache is not None
        if cache is None:
            cache = AllAttentionCache(nothing_read(self.model, rows))
        if sum(len(group.places) for group in cache.groups) != rows:
            raise InputError(f"input_ids has {rows} rows, but the cache is of another number")
        real = None if attention_mask is None else attention_mask[:, -tokens:].bool()
        hidden, groups = read_rows(self.model, input_ids, real, cache.groups, keep)
        if keep:
            cache.groups = groups
            cache.seen += tokens
        loss = None if labels is None else self._loss(hidden, labels, real, num_items_in_batch)
        logits = None
        if labels is None or not self.training:
            chosen = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.softmax.log_probs(hidden[:, chosen], self.model.embedding)
        kept: Any = cache if keep else None  # in the role of transformers' own
        output = CausalLMOutputWithPast(loss=loss, logits=logits, cache=kept)
        return output.to_tuple() if return_dict is False else output

    def _loss(
        self, hidden: Tensor, labels: Tensor, real: Tensor | None, items: Tensor | int | None
    ) -> Tensor:
        """Nats of each token after the one before it, summed and divided; padding predicts and is nothing."""
        targets = labels[:, 1:]
        if real is not None:
            targets = targets.masked_fill(~(real[:, 1:] & real[:, :-1]), -100)
        nats = self.model.softmax(hidden[:, :-1], targets, self.model.embedding).sum()
        predicted = (targets >= 0).sum().clamp(min=1)
        total: Tensor = nats / (predicted if items is None else items)
        return total
