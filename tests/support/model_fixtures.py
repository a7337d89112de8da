"""Models with random weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allattn.model.language_model import AllAttentionLM

Models = Callable[..., AllAttentionLM]


@pytest.fixture
def moderate_model(random_model: Models) -> Models:
    """A random model whose log-probabilities are of size 1 to 10, as a trained one's, not 100."""

    def make(dtype: torch.dtype = torch.float32, **sizes: Any) -> AllAttentionLM:
        model = random_model(dtype, **sizes)
        with torch.no_grad():
            for table in model.embedding.tables:
                table *= 0.1
        return model

    return make
