"""Exports of made-up models, as folders that transformers loads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from allattn.data.vocabulary import save_tokenizer, tokenizer_hash
from allattn.model.language_model import AllAttentionLM
from allattn.training.exports import write_export

from .checkpoint_files import TOKENIZER, cut

KINDS: dict[str, tuple[dict[str, Any], list[list[int]] | None]] = {
    "dense, adaptive softmax": ({}, None),
    "cut, a layer without heads": ({}, [[0, 2, 3, 5], [], [0, 6, 7]]),
    "cut, plain softmax, all positions": ({"cutoffs": [], "same_length": False}, [[1], [0, 2], [4]]),
    "Transformer-XL, cut": ({"persistent_vectors": 0, "feed_forward": 9}, [[0, 1], [], [2]]),
    "no head at all": ({"cutoffs": []}, [[], [], []]),
}


@dataclass(frozen=True)
class Exported:
    """A folder and the model in it."""

    folder: Path
    model: AllAttentionLM


@pytest.fixture(scope="session")
def exported_kind(
    random_model: Callable[..., AllAttentionLM], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Exported]:
    """The export of one of `KINDS`; its folder is not to be changed."""
    made: dict[str, Exported] = {}

    def make(kind: str) -> Exported:
        if kind not in made:
            sizes, heads = KINDS[kind]
            model = random_model(torch.float32, **sizes)
            with torch.no_grad():
                for table in model.embedding.tables:
                    table *= 0.1  # log-probabilities of size 1 to 10, as a trained model's
            model = model if heads is None else cut(model, heads)
            folder = tmp_path_factory.mktemp("exported")
            save_tokenizer(TOKENIZER, folder / "tokenizer.json")
            meta = {"tokenizer_hash": tokenizer_hash(TOKENIZER)}
            exported = write_export(model, meta, folder / "tokenizer.json", folder / "export")
            made[kind] = Exported(folder / "export", exported)
        return made[kind]

    return make
