"""What commands let choose about causal language models of others; transformers is not needed to name it."""

from enum import Enum


class Dtype(Enum):
    """Of the weights in memory."""

    auto = "auto"  # as they are stored; float32 of a .gguf file
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Form(Enum):
    """What a model without some of its heads is written as."""

    uniform = "uniform"  # as many heads in every layer: a smaller model of the same class, loads anywhere
    per_layer = "per_layer"  # each layer its own number: loads once allattn.huggingface is imported
    masked = "masked"  # dense shapes, the heads' blocks of WO are 0: loads anywhere, saves nothing


class Unit(Enum):
    """What goes at a time where key/value heads serve several query heads."""

    auto = "auto"  # head under form=masked, else group
    group = "group"  # a key/value head with its query heads
    head = (
        "head"  # query heads: any under form=masked, else one of every group of a layer; keys and values stay
    )
