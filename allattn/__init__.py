"""Pretrain All-attention Transformer language models and prune whole heads with learned L0 gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from allattn.model.language_model import AllAttentionLM

__version__ = "0.1.0"


def load(path: str | PathLike[str]) -> AllAttentionLM:
    """A model ready for evaluation, from a checkpoint file or a folder that `allattn export` wrote.

    A checkpoint of the gate phase comes with its closed heads removed. Nothing is unpickled but tensors and
    plain values.

    Raises:
        InputError: there is no such file or folder, or it is damaged.
    """
    from allattn.families import all_attention
    from allattn.files import user_path
    from allattn.training.exports import load_export
    from allattn.training.loading import load_model

    where = user_path("path", str(path))
    return load_export(where) if where.is_dir() else all_attention(load_model(where).model.eval(), str(where))
