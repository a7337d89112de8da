"""Made-up runs as W&B has them, a made-up sweep, and a project of the stand-in to read them from."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from allattn.training.flat_names import flat
from allattn.training.metrics import read_metrics
from support.made_up import OFF, articles, config, dense_run, history, result, write_run
from support.wandb_stand_in import StandIn, StandInRun, serve

PATH = "someone/study"


@pytest.fixture
def stand_in(wandb_client: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """An empty project, served."""
    made = StandIn(*PATH.split("/"), [])
    with serve(made) as address:
        wandb_client.setenv("WANDB_BASE_URL", address)
        yield made


def as_logged(folder: Path) -> StandInRun:
    """The run of a folder as W&B has it: whole numbers without a point, nothing that is None."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    record = json.loads((folder / "result.json").read_text())
    rows = [
        {name: text if name == "phase" else float(text) for name, text in row.items()}
        for row in read_metrics(folder / "metrics.csv")
    ]
    kept = folder / "articles.json"
    return StandInRun(
        folder.name,
        as_json(settings | {"environment": record["environment"], "corpus": record["corpus"]}),
        as_json({name: value for name, value in flat(record, "/") if value is not None}),
        [as_json(row) for row in rows],
        name=settings["name"],
        group=settings["logger"]["group"],
        job_type=record["stage"],
        files={kept.name: kept.read_bytes()} if kept.exists() else {},
    )


def as_json(value: Any) -> Any:
    """As W&B's own service writes numbers."""
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, list):
        return [as_json(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods x two lambdas x two seeds, so that they have curves; a dense run; a damaged run."""
    folder = tmp_path_factory.mktemp("sweep")
    rng = random.Random(1)
    for variant in ("full", "init", "scaling"):
        for strength, kept in ((0.01, 13), (0.02, 9)):
            for seed in (1, 2):
                name, value = f"{variant}-{strength}-{seed}", 100 + 4 * (16 - kept) + 3 * rng.random()
                settings = config(name, seed, **OFF[variant], **{"gates.lambda_max": strength})
                settings["gates"]["target_gain"] = 1.0
                record = result(value, kept, microseconds=1.5) | {"updates_after_cut": 150}
                record["environment"]["git_revision"] = None
                write_run(folder / name, settings, record, history(value), articles(value, seed))
    write_run(folder / "x-dense", *dense_run(100.0, 1), None)
    write_run(folder / "y-silent", config("y-silent", 3), result(120), [])
    return folder
