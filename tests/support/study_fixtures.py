"""A made-up study of pruning runs, and a real W&B client of no account."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.made_up import write_study

PERPLEXITIES = {
    "full": {1: 124.85, 2: 125.10, 3: 124.20},
    "warm-up": {1: 125.00, 2: 125.30, 3: 124.50},
    "init": {1: 125.50, 2: 125.60, 3: 125.00},
    "scaling": {1: 126.10, 2: 126.30, 3: 125.60},
    "three": {1: 126.30, 2: 126.80, 3: 125.70},
}


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The paper's five variants, three seeds each; not to be written to."""
    return write_study(tmp_path_factory.mktemp("study"), PERPLEXITIES)


@pytest.fixture(scope="module")
def wandb_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """The real client with a key of no account, its files in a folder of their own; ended afterwards."""
    import wandb

    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_ENTITY", "WANDB_PROJECT"):
            patch.delenv(name, raising=False)
        for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(folder))
        patch.setenv("WANDB_API_KEY", "local" + "".join(random.Random(0).choices("0123456789abcdef", k=35)))
        patch.setenv("WANDB_SILENT", "true")
        yield patch
        wandb.teardown()
