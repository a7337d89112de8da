"""Refusals of the model's configuration and its round trip through plain values."""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.reference import small_config

from allattn.errors import InputError
from allattn.model.config import ModelConfig, check_model, model_config_from_dict

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"layers": 0}, ["model.layers=0"]),
    ({"width": 0}, ["model.width=0"]),
    ({"heads": 0}, ["model.heads=0"]),
    ({"memory_length": 0}, ["model.memory_length=0"]),
    ({"position_rows": 0}, ["model.position_rows=0"]),
    ({"div": 0}, ["model.div=0"]),
    ({"persistent_vectors": -1}, ["model.persistent_vectors=-1"]),
    ({"feed_forward": -1}, ["model.feed_forward=-1"]),
    ({"feed_forward_dropout": 1.0}, ["model.feed_forward_dropout=1.0"]),
    ({"width": 10}, ["model.width=10", "model.heads=4"]),
    ({"attention_dropout": 1.0}, ["model.attention_dropout=1.0"]),
    ({"projection_dropout": -0.1}, ["model.projection_dropout=-0.1"]),
    ({"input_dropout": 1.5}, ["model.input_dropout=1.5"]),
    ({"output_dropout": float("nan")}, ["model.output_dropout=nan"]),
    ({"word_dropout": 1.0}, ["model.word_dropout=1.0"]),
    ({"memory_length": 40}, ["model.memory_length=40", "model.position_rows=40", "at least 41"]),
    ({"cutoffs": [18, 8]}, ["model.cutoffs=[18, 8]"]),
    ({"cutoffs": [8, 8]}, ["model.cutoffs=[8, 8]"]),
    ({"cutoffs": [0, 8]}, ["model.cutoffs=[0, 8]"]),
    ({"cutoffs": [8, 30]}, ["model.cutoffs=[8, 30]", "vocabulary", "30"]),
    ({"div": 4}, ["model.width=12", "model.div=4", "model.cutoffs"]),
    ({"heads_kept": [[0]]}, ["model.heads_kept", "model.layers=2"]),
    ({"output_scale": [1.0] * 3}, ["model.output_scale", "model.layers=2"]),
    ({"heads_kept": [[0], [1, 1]]}, ["model.heads_kept", "layer 1", "[1, 1]"]),
    ({"heads_kept": [[2, 0], []]}, ["model.heads_kept", "layer 0", "[2, 0]"]),
    ({"heads_kept": [[0], [4]]}, ["model.heads_kept", "layer 1", "0..3", "model.heads=4"]),
    ({"heads_kept": [[-1], []]}, ["model.heads_kept", "layer 0", "[-1]"]),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_contradictions_are_refused_by_name(changes: dict[str, Any], named: list[str]) -> None:
    config = small_config(**changes)
    for refuse in (lambda: check_model(config), lambda: model_config_from_dict(config.to_dict())):
        with pytest.raises(InputError) as error:
            refuse()
        assert all(name in str(error.value) for name in named), str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cutoffs": []},
        {"cutoffs": [8, 29]},
        {"memory_length": 39},
        {"memory_length": 99, "same_length": False},
        {"persistent_vectors": 0},
        {"persistent_vectors": 0, "feed_forward": 5},
        {"feed_forward": 5, "feed_forward_dropout": 0.3},
        {"vocabulary_size": None},
        {"heads_kept": [[], [0, 3]], "output_scale": [4.0, 2.0]},
    ],
)
def test_accepted_configurations_survive_plain_values(changes: dict[str, Any]) -> None:
    """Through JSON and back: equal, and no longer sharing lists."""
    config = small_config(**changes)
    check_model(config)
    again = model_config_from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    again.cutoffs.append(1)
    assert again != config


def test_the_defaults_are_the_papers() -> None:
    config = ModelConfig(vocabulary_size=267_735)
    check_model(config)
    sizes = (config.layers, config.width, config.heads, config.persistent_vectors, config.memory_length)
    assert sizes == (16, 512, 8, 2048, 192)
    assert (config.position_rows, config.same_length, config.div) == (512, True, 4)
    assert config.band_ends == [20_000, 40_000, 200_000, 267_735]
    dropouts = (config.attention_dropout, config.projection_dropout, config.input_dropout)
    assert dropouts == (0.2, 0.1, 0.1)
    assert (config.output_dropout, config.word_dropout) == (0.1, 0.1)


def test_configurations_from_before_the_feed_forward_sublayer_have_none() -> None:
    """Checkpoints and exports of format 1 were written without these entries."""
    values = small_config().to_dict()
    del values["feed_forward"], values["feed_forward_dropout"]
    assert model_config_from_dict(values) == replace(small_config(), feed_forward_dropout=0.1)
    assert model_config_from_dict(values).feed_forward == 0


def test_families() -> None:
    families = {
        (3, 0): "All-attention",
        (0, 5): "Transformer-XL",
        (3, 5): "All-attention with feed-forward",
        (0, 0): "attention alone",
    }
    for (persistent, hidden), family in families.items():
        assert small_config(persistent_vectors=persistent, feed_forward=hidden).family == family


def test_unknown_entries_are_refused() -> None:
    with pytest.raises(InputError, match="unknown entries: depth, head_dim"):
        model_config_from_dict(small_config().to_dict() | {"head_dim": 3, "depth": 1})


def test_head_width_and_scale_of_a_cut_layer() -> None:
    """The original H defines the head width; a layer's s_g and heads are its own."""
    config = small_config(heads_kept=[[1, 3], []], output_scale=[2.0, 4.0])
    assert config.head_width == 3
    assert (config.heads_present, config.heads_kept_total, config.heads_total) == ([2, 0], 2, 8)
    assert [config.kept(0), config.kept(1)] == [[1, 3], []]
    assert [config.scale(0), config.scale(1)] == [2.0, 4.0]
    assert small_config().kept(1) == [0, 1, 2, 3]
    assert small_config().scale(1) == 1.0
