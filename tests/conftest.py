"""Fixtures that several test folders share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from allattn.model.config import ModelConfig
from allattn.model.language_model import AllAttentionLM

pytest_plugins = [
    f"support.{name}_fixtures"
    for name in ("text", "model", "huggingface", "run", "process", "study", "logged", "command")
]  # texts, models, runs in this process and in their own, made-up studies in folders and W&B, command lines


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same numbers."""
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = {}
    if not config.getoption("--slow"):
        absent["slow"] = "minutes long or gigabytes large; run with --slow"
    if not torch.cuda.is_available():
        absent["gpu"] = "no CUDA device here"
    for item in items:
        for marker in absent.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=absent[marker]))


NO_DROPOUT = {
    f"{name}_dropout": 0.0 for name in ("attention", "projection", "feed_forward", "input", "output", "word")
}


def _tiny_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "vocabulary_size": 50,
        "layers": 3,
        "width": 32,
        "heads": 8,
        "persistent_vectors": 6,
        "memory_length": 7,
        "position_rows": 32,
        "cutoffs": [10, 30],
        "div": 2,
        **NO_DROPOUT,
    }
    return ModelConfig(**{**values, **changes})


def _random_model(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> AllAttentionLM:
    model = AllAttentionLM(_tiny_config(**changes)).to(dtype)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
            parameter.copy_((0.3 * values).to(dtype))
    return model.eval()


def _log_probs(model: AllAttentionLM, multipliers: list[Tensor] | None = None) -> Tensor:
    ids = torch.randint(model.config.band_ends[-1], (2, 10), generator=torch.Generator().manual_seed(3))
    memory, parts = model.empty_memory(2), []
    with torch.no_grad():
        for piece in ids.split(5, dim=1):
            hidden, memory = model.hidden(piece, memory, multipliers)
            parts.append(model.softmax.log_probs(hidden, model.embedding))
    return torch.cat(parts, dim=1)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., ModelConfig]:
    """Sizes of a tiny model without dropout; keyword arguments change them."""
    return _tiny_config


@pytest.fixture(scope="session")
def random_model() -> Callable[..., AllAttentionLM]:
    """A tiny model in evaluation mode with every parameter (biases, u and v too) random."""
    return _random_model


@pytest.fixture(scope="session")
def log_probs() -> Callable[..., Tensor]:
    """Log-probabilities (2, 10, V) of a model over two segments, the second with memory."""
    return _log_probs
