"""A pretrained model that prune.py has taken heads from, as a network of transformers: s_g inside WO.

The three forms are those of `removal`; what is written in one of them needs no checkpoint of ours any more.
"""

from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, PreTrainedTokenizerFast

from allattn.errors import InputError
from allattn.files import new_folder
from allattn.huggingface.removal import Form, check_form, config_of, filled
from allattn.pretrained.language_model import NETWORK, PretrainedLM
from allattn.pretrained.language_model import sizes_only as skeleton


def as_network(model: PretrainedLM, form: Form) -> PreTrainedModel:
    """The network in a form; weights that s_g or the form does not change are shared with `model`.

    Raises:
        InputError: these heads are not to be had in this form.
    """
    sizes, network = model.config, model.network
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    for layer, attention in enumerate(model.attentions):
        name = f"{attention.name}.{attention.output}.weight"
        state[name] = state[name] * sizes.scale(layer)
    if form is Form.masked:
        config, state = skeleton(sizes.dense()).network.config, _dense(model, state)
    elif sizes.masked:
        raise InputError(f"form={form.value}: the heads were zeroed and not cut: give form=masked")
    else:
        check_form(sizes, form)
        config = config_of(sizes, form)
    own: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return filled(config, state, network, own)


def _dense(model: PretrainedLM, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the dense shapes, 0 where a head is gone."""
    sizes, result = model.config, dict(state)
    if not sizes.masked:
        for full, part in skeleton(sizes.dense()).head_parts.items():
            name = full.removeprefix(NETWORK)
            shape = list(state[name].shape)
            shape[part.axis] = len(part.owner)
            kept = torch.tensor(part.staying(sizes.kept(part.layer)), dtype=torch.long)
            result[name] = state[name].new_zeros(shape).index_copy(part.axis, kept, state[name])
        return result
    for layer, attention in enumerate(model.attentions):
        name = f"{attention.name}.{attention.output}.weight"
        kept = torch.tensor(sizes.kept(layer), dtype=torch.long)
        still = torch.zeros(sizes.heads).index_fill(0, kept, 1).repeat_interleave(sizes.head_width)
        result[name] = state[name] * (still[:, None] if attention.output == "c_proj" else still)
    return result


def write_pruned(
    model: PretrainedLM, tokenizer: Path, folder: Path, form: Form, card: str
) -> PreTrainedModel:
    """Write a folder that transformers loads; it appears when it is whole.

    Raises:
        InputError: as `as_network`, or the folder exists or cannot be written.
    """
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder}: exists already; give the export another folder")
    network = as_network(model, form)
    try:
        with new_folder(folder) as partial:
            network.save_pretrained(partial)
            words = Tokenizer.from_file(str(tokenizer))
            PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(partial)
            (partial / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder}: the export cannot be written ({error.strerror or error})") from None
    return network


def pruned_card(
    name: str, model: PretrainedLM, form: str, license_: str, result: dict[str, Any] | None
) -> str:
    """The model card: heads, form, and what the run measured of both models on its own text, where it did."""
    sizes = model.config
    head = {"license": license_, "library_name": "transformers", "pipeline_tag": "text-generation"}
    lines = [
        f"# {name}",
        "",
        f"A {sizes.family} with {sizes.heads_kept_total} of {sizes.heads_total} attention heads, chosen by "
        f"allattn (form {form}). Learned head gates on a pretrained model are an extension: no number here "
        "is of arXiv:2110.03252.",
        "",
    ]
    records = {kind: result[kind] for kind in ("dense", "pruned") if result and kind in result}
    if len(records) == 2:
        rows = {
            "parameters": lambda r: f"{r['parameters']['total']:,}",
            "perplexity, test": lambda r: f"{r['test']['perplexity']:.2f}",
            "tokens scored, test": lambda r: f"{r['test']['tokens_scored']:,}",
            "tokens per second, layers": lambda r: f"{1e6 / r['layer_microseconds_per_token']:,.0f}",
            "cache bytes per token": lambda r: f"{r['cache_bytes_per_token']:,}",
        }
        lines += ["| | dense | pruned |", "| --- | --- | --- |"]
        lines += [f"| {row} | {' | '.join(map(show, records.values()))} |" for row, show in rows.items()]
        lines += ["", "Measured in one run, before s_g went into WO, on the run's own text."]
    kept = [
        f"- layer {layer}: {' '.join(map(str, sizes.kept(layer))) or 'none'}" for layer in range(sizes.layers)
    ]
    lines += ["", "Heads kept, by original index:", "", *kept, ""]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n".join(lines)
