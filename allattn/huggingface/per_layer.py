"""Models whose layers have different numbers of heads: transformers' own classes with smaller projections.

transformers builds every layer of one size, so such a folder has a model_type of ours and loads once
`allattn.huggingface` is imported. Everything but the sizes is the class of the dense model.
"""

from dataclasses import replace
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers import PreTrainedConfig as Config

from allattn.errors import InputError
from allattn.pretrained.architecture import attentions, shrink
from allattn.pretrained.language_model import layers_of
from allattn.pretrained.opening import sizes_of
from allattn.pretrained.sizes import PretrainedSizes

OWN = "allattn_"  # begins the model_type
UNIFORM_KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")  # take any head_dim
WHOLE_WIDTH_KINDS = ("gpt2", "gpt_neox")  # take heads * head width = hidden_size for granted
KINDS = (*UNIFORM_KINDS, *WHOLE_WIDTH_KINDS)


def kind_of(config: Config) -> str:
    """The model_type of the dense model."""
    return str(config.model_type).removeprefix(OWN)


def own_type(kind: str) -> str:
    """The model_type of models of this kind with their own number of heads in every layer."""
    return f"{OWN}{kind}"


def sizes_of_network(config: Config) -> PretrainedSizes:
    """Sizes of a model of transformers, dense, or cut layer by layer.

    Raises:
        InputError: as `sizes_of`, or the heads do not fit the layers.
    """
    sizes = sizes_of(config)
    own = ("heads_kept", "head_width")
    network = {name: value for name, value in sizes.network.items() if name not in own}
    kept = getattr(config, "heads_kept", None)
    sizes = replace(sizes, network={**network, "model_type": kind_of(config)}, heads_kept=kept)
    fits = kept is None or len(kept) == sizes.layers
    if not fits or any(set(layer) - set(range(sizes.heads)) for layer in kept or ()):
        raise InputError(f"config.json: heads_kept is not of {sizes.layers} layers of {sizes.heads} heads")
    return sizes


def _register(kind: str) -> None:
    """Make config and model class of one kind known to transformers' Auto classes."""
    dense_config: Any = CONFIG_MAPPING[kind]
    dense_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[dense_config]

    class CutConfig(dense_config):
        model_type = own_type(kind)
        heads_kept: list[list[int]] | None = None  # of every layer, original indices
        head_width: int | None = None

    class CutForCausalLM(dense_model):
        config_class = CutConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            sizes = sizes_of_network(config)
            if sizes.heads_kept is not None:
                shrink(attentions(self, layers_of(self)), sizes.dense(), sizes)

    for made, dense in ((CutConfig, dense_config), (CutForCausalLM, dense_model)):
        made.__name__ = made.__qualname__ = f"Cut{dense.__name__}"
    AutoConfig.register(own_type(kind), CutConfig, exist_ok=True)
    AutoModelForCausalLM.register(CutConfig, CutForCausalLM, exist_ok=True)


for _kind in KINDS:
    _register(_kind)
