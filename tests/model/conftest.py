import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same numbers."""
    torch.manual_seed(0)
