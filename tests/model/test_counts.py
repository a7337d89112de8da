"""Parameter counts of the paper's configuration (on the meta device) and of a small cut."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from support.reference import small_config

from allattn.model.config import ModelConfig
from allattn.model.counts import (
    count_parameters,
    head_parameters,
    multiply_adds,
)
from allattn.model.language_model import AllAttentionLM, sizes_only
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import HeadGates
from allattn.settings import register

CONF = Path(__file__).parents[2] / "conf"
PER_LAYER = [8, 0, 8, 3, 5, 0, 7, 1, 4, 6, 2, 8, 8, 5, 4, 3]  # 72 heads, unevenly


def paper_model(**changes: Any) -> AllAttentionLM:
    with torch.device("meta"):
        return AllAttentionLM(ModelConfig(vocabulary_size=267_735, **changes))


def numel(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_dense_model() -> None:
    model = paper_model()
    counts = count_parameters(model)
    assert counts.layers == 54_566_912
    assert counts.embedding_side == 19_603_602
    assert counts.total == 54_566_912 + 19_603_602 == numel(model)
    assert [numel(layer) for layer in model.layers] == [3_410_432] * 16
    assert model.config.parameters_per_head == 426_112
    assert head_parameters(model.layers[0]) == 8 * 426_112


def test_parts_of_a_head_and_of_a_layer() -> None:
    """5 blocks of 512 x 64, u and v, PK and PV of 2,048 x 64; besides heads: norm and output bias."""
    sizes = {name: p.numel() for name, p in paper_model().layers[0].named_parameters()}
    projections = ("query", "key", "value", "position", "output")
    assert sum(sizes.pop(f"{name}.weight") for name in projections) == 8 * 163_840
    assert sizes.pop("content_bias") + sizes.pop("position_bias") == 8 * 128
    assert sizes.pop("persistent_keys") + sizes.pop("persistent_values") == 8 * 262_144
    assert sizes == {"norm.weight": 512, "norm.bias": 512, "bias": 512}


def test_parts_of_the_embedding_side() -> None:
    model = paper_model()
    assert sum(table.numel() for table in model.embedding.tables) == 18_461_880
    assert sum(projection.numel() for projection in model.embedding.projections) == 348_160
    assert numel(model.softmax) == 262_144 + 267_735 + 3 * 512 + 3
    assert model.positions.table.numel() == 262_144


def test_72_of_128_heads() -> None:
    assert sum(PER_LAYER) == 72
    model = paper_model(heads_kept=[list(range(8))[-n:] if n else [] for n in PER_LAYER])
    counts = count_parameters(model)
    assert counts.layers == 30_704_640
    assert counts.embedding_side == 19_603_602
    for kept, layer in zip(PER_LAYER, model.layers, strict=True):
        assert head_parameters(layer) == kept * 426_112
        assert numel(layer) == 3_410_432 - (8 - kept) * 426_112


def test_transformer_xl() -> None:
    """A layer: 5 d^2 + 2 d (u, v) + d (bias) + 2 (2 d) (norms) + 2 d F + F + d; a head: 5 c d + 2 c."""
    for width, hidden, layer, of_a_head, total in (
        (512, 2048, 3_414_016, 163_968, 54_624_256),
        (384, 1536, 1_921_536, 92_256, 30_744_576),
    ):
        model = paper_model(width=width, persistent_vectors=0, feed_forward=hidden)
        norms_and_biases = 2 * width + width + 2 * 2 * width + hidden + width
        assert layer == 5 * width**2 + 2 * width * hidden + norms_and_biases
        assert [numel(each) for each in model.layers] == [layer] * 16
        assert count_parameters(model).layers == 16 * layer == total
        assert model.config.parameters_per_head == of_a_head == 5 * width * (width // 8) + 2 * width // 8
        assert head_parameters(model.layers[0]) == 8 * of_a_head


def test_a_head_takes_no_feed_forward_parameters_with_it() -> None:
    """72 of 128 heads of the dense Transformer-XL: 56 x 163,968 less, half of the paper's saving a head."""
    model = paper_model(
        persistent_vectors=0, feed_forward=2048, heads_kept=[list(range(n)) for n in PER_LAYER]
    )
    assert count_parameters(model).layers == 54_624_256 - 56 * 163_968 == 45_442_048
    sublayer = 2 * 512 + 2 * 512 * 2048 + 2048 + 512
    assert numel(model.layers[1]) == sublayer + 2 * 512 + 512  # no head left
    assert numel(model.layers[1].feed_forward) == sublayer


@pytest.mark.parametrize("name", ["small", "demo"])
def test_rivals_have_the_sizes_of_the_models_that_they_stand_beside(name: str) -> None:
    """The layers of conf/model's Transformer-XLs, within one per cent of All-attention's."""

    register()

    def layers(model: str, **changes: Any) -> int:
        with initialize_config_dir(str(CONF), version_base=None):
            composed = compose("train", [f"experiment={name}", f"model={model}", "name=counted"])
        sizes = OmegaConf.to_object(composed.model)
        assert isinstance(sizes, ModelConfig)
        sizes.vocabulary_size = 10_000
        return count_parameters(sizes_only(replace(sizes, **changes))).layers

    dense = {"small": (1_134_336, 1_134_584), "demo": (86_976, 86_970)}[name]
    assert (layers(name), layers(f"{name}_transformer_xl")) == dense
    if name == "small":
        half = layers("small", heads_kept=[[0, 2, 4, 6]] * 4)
        assert (half, layers("small_transformer_xl_narrow")) == (568_320, 567_424)


def test_gates_add_128_parameters_outside_the_model() -> None:
    model = paper_model()
    gates = HeadGates(GatesConfig(), [len(layer.heads_kept) for layer in model.layers], 8, [1.0] * 16)
    assert numel(gates) == 128
    assert count_parameters(model).total == numel(model)


def test_small_cut() -> None:
    """C31: d 64, 8 heads of 8, N 16; two heads gone in each of 2 layers.

    A head: WQ, WK, WV, WO 4 x 64 x 8 = 2,048, PK and PV 2 x 16 x 8 = 256, its position projection 512, its
    u and v 16: 2,832.
    """
    sizes: dict[str, Any] = {"width": 64, "heads": 8, "persistent_vectors": 16}
    kept = [[0, 2, 3, 4, 6, 7], [1, 2, 3, 4, 5, 6]]
    before = AllAttentionLM(small_config(**sizes))
    after = AllAttentionLM(small_config(**sizes, heads_kept=kept))
    assert before.config.parameters_per_head == 2_048 + 256 + 512 + 16 == 2_832
    assert numel(before) - numel(after) == 4 * 2_832 == 11_328
    assert count_parameters(before).layers - count_parameters(after).layers == 11_328
    assert count_parameters(before).embedding_side == count_parameters(after).embedding_side


@pytest.mark.parametrize("kept", [[[0, 1, 2, 3], [0, 1, 2, 3]], [[1], []]])
def test_multiply_adds_follow_the_heads(kept: list[list[int]]) -> None:
    """d 12, c 3, M 4, N 3 per head: 4 x 36 + 3 x 5 x 3 + 2 x 3 x 3 = 207; F 7: 2 x 12 x 7 = 168 a layer."""
    config = small_config(heads_kept=kept)
    assert [config.layer_multiply_adds(layer) for layer in range(2)] == [207 * len(heads) for heads in kept]
    assert multiply_adds(config) == 207 * sum(map(len, kept))
    assert multiply_adds(replace(config, feed_forward=7)) == 207 * sum(map(len, kept)) + 2 * 168
