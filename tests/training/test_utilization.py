"""Multiply-adds of training, peaks by a GPU's name, and the share that is logged."""

import math
from typing import Any

import pytest
import torch

from allattn.errors import InputError
from allattn.model.config import ModelConfig
from allattn.model.counts import multiply_adds
from allattn.training.config import (
    EvaluationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerConfig,
    check_training,
)
from allattn.training.loading import load_model
from allattn.training.metrics import read_metrics
from allattn.training.utilization import peak_by_name, peak_flops, utilization

PAPER = ModelConfig(vocabulary_size=267_735)


def test_multiply_adds_of_the_papers_training() -> None:
    """By hand: per head 2 (q, o) + 2 * 2 (k, v of 384 keys for 192 queries) blocks of 512 x 64, ..."""
    per_head = (2 + 4) * 512 * 64 + 3 * 193 * 64 + 2 * 2048 * 64
    softmax = 512 * 512 + 512 * (20_000 + 3)
    assert PAPER.training_multiply_adds(192) == 3 * (16 * 8 * per_head + softmax)


def test_long_segments_cost_what_evaluation_costs_threefold() -> None:
    """The share of the memory's keys vanishes; what is left beside the layers is the softmax."""
    config = ModelConfig(vocabulary_size=1_000, cutoffs=[])
    layers = config.training_multiply_adds(10**9) - 3 * 512 * 1_000
    assert layers == pytest.approx(3 * multiply_adds(config), rel=1e-6)


def test_a_cut_model_takes_less() -> None:
    cut = ModelConfig(vocabulary_size=267_735, heads_kept=[[0, 1, 2, 3]] * 16)
    softmax = 3 * 512 * (512 + 20_003)
    dense, half = (config.training_multiply_adds(192) - softmax for config in (PAPER, cut))
    assert half == dense / 2


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 3090 Ti", 80e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_peak_by_name(name: str, peak: float | None) -> None:
    assert peak_by_name(name) == peak


def test_the_setting_goes_before_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert peak_flops(None, torch.device("cuda")) == 312e12
    assert peak_flops(1e12, torch.device("cuda")) == 1e12
    assert peak_flops(1e12, torch.device("cpu")) == 1e12
    assert peak_flops(None, torch.device("cpu")) is None


@pytest.mark.parametrize("peak", [0.0, -1.0, math.inf, math.nan])
def test_a_peak_that_is_none(peak: float) -> None:
    settings = (OptimizerConfig(), ScheduleConfig(), EvaluationConfig(), TrainerConfig(peak_flops=peak))
    with pytest.raises(InputError, match="peak_flops"):
        check_training(*settings)


def test_rows_say_the_share_where_a_peak_is_known(runs: Any) -> None:
    folder = runs.run(runs.pretraining("given", trainer__peak_flops=1e12, schedule__steps=4))
    config = load_model(folder.last).model.config
    for row in read_metrics(folder.metrics):
        expected = utilization(config, 6, float(row["tokens_per_second"]), 1e12)
        assert float(row["mfu"]) == pytest.approx(expected)
    unknown = runs.run(runs.pretraining("unknown", trainer__accelerator="cpu", schedule__steps=4))
    assert not any("mfu" in row for row in read_metrics(unknown.metrics))
