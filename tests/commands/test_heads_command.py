import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import image
from support.command_fixtures import CommandLine

from allattn.model.config import ModelConfig
from allattn.model.counts import count_parameters, multiply_adds
from allattn.model.language_model import AllAttentionLM
from allattn.training.checkpoints import FORMAT_VERSION, write_checkpoint
from allattn.training.cutting import cut_checkpoint, freeze_plan

KEPT = [[0, 2, 3, 5, 6, 7], [], [4]]
PI = [[round((0.5 + head / 8) * (1 if head in kept else -1), 3) for head in range(8)] for kept in KEPT]
# Width 32, 8 heads of 4, 6 persistent vectors, 7 + 1 visible positions (tests/conftest.py), by hand.
PER_HEAD = 5 * 32 * 4 + 2 * 4 + 2 * 6 * 4  # q, k, v, r, o; u, v; PK, PV
BESIDE_HEADS = 3 * 32  # a layer's norm and bias
MULTIPLY_ADDS_PER_HEAD = 4 * 32 * 4 + 3 * 8 * 4 + 2 * 6 * 4

Models = Callable[..., AllAttentionLM]
Command = Callable[..., tuple[int, str, str]]


def entry(model: AllAttentionLM, phase: str) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "model": model.config.to_dict(),
        "phase": phase,
        "step": 5,
        "best": 1.0,
        "memory": [],
        "data": {},
        "tokenizer_hash": "",
        "fingerprint": "",
        "output_scaling": True,
        "target_sparsity": None,
    }


@pytest.fixture
def checkpoints(random_model: Models, tmp_path: Path) -> dict[str, Path]:
    """A dense checkpoint, one of the gate phase, the cut one, and one cut without gates."""
    model = random_model()
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    dense = {"state_dict": state, "allattn": entry(model, "pretrain")}
    gates = {f"gates.pi.{layer}": torch.tensor(pi) for layer, pi in enumerate(PI)}
    gated = {"state_dict": {**state, **gates}, "allattn": entry(model, "gates")}
    cut = cut_checkpoint(gated, freeze_plan(gated))
    without = {name: value for name, value in cut["allattn"].items() if name not in ("pi", "heads_before")}
    found = {}
    for name, checkpoint in {
        "dense": dense,
        "gates": gated,
        "cut": cut,
        "selected": {**cut, "allattn": without},
    }.items():
        found[name] = tmp_path / "run" / "checkpoints" / f"{name}.ckpt"
        write_checkpoint(found[name], checkpoint)
    return found


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch, command_line: CommandLine) -> Command:
    """Run the command: exit status, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> tuple[int, str, str]:
        done = command_line("heads", *arguments)
        return done.status, done.out, done.err

    return run


def record(heads: Command, path: Path, *more: str) -> dict[str, Any]:
    status, out, err = heads(f"checkpoint={path}", "format=json", *more)
    assert status == 0, err
    return json.loads(out)


def test_json_of_a_cut_checkpoint(heads: Command, checkpoints: dict[str, Path]) -> None:
    found = record(heads, checkpoints["cut"])
    layers = found.pop("layers")
    assert found == {
        "phase": "fine_tune",
        "step": 5,
        "heads_total": 24,
        "heads_kept": 7,
        "heads_removed": 17,
        "heads_closed_by_gates": 0,
        "sparsity": pytest.approx(17 / 24),
        "parameters": {
            "layers": {
                "dense": 24 * PER_HEAD + 3 * BESIDE_HEADS,
                "pruned": 7 * PER_HEAD + 3 * BESIDE_HEADS,
            },
            "per_head": PER_HEAD,
            "embedding_side": found["parameters"]["embedding_side"],
            "total": {
                name: count + found["parameters"]["embedding_side"]
                for name, count in found["parameters"]["layers"].items()
            },
        },
        "multiply_adds_per_token_layers": {
            "dense": 24 * MULTIPLY_ADDS_PER_HEAD,
            "pruned": 7 * MULTIPLY_ADDS_PER_HEAD,
        },
    }
    for layer, kept in enumerate(KEPT):
        assert layers[layer] == {
            "layer": layer,
            "heads_kept": kept,
            "pi": pytest.approx(PI[layer]),
            "output_scale": pytest.approx(min(8 / max(len(kept), 1), 8)),
            "parameters": {
                "dense": 8 * PER_HEAD + BESIDE_HEADS,
                "pruned": len(kept) * PER_HEAD + BESIDE_HEADS,
            },
            "multiply_adds_per_token": {
                "dense": 8 * MULTIPLY_ADDS_PER_HEAD,
                "pruned": len(kept) * MULTIPLY_ADDS_PER_HEAD,
            },
        }


def test_numbers_are_those_of_the_models(
    heads: Command, checkpoints: dict[str, Path], tiny_config: Callable[..., ModelConfig]
) -> None:
    found = record(heads, checkpoints["cut"])
    configs = {"dense": tiny_config(), "pruned": tiny_config(heads_kept=KEPT)}
    for name, config in configs.items():
        counts = count_parameters(AllAttentionLM(config))
        assert found["parameters"]["layers"][name] == counts.layers
        assert found["parameters"]["total"][name] == counts.total
        assert found["parameters"]["embedding_side"] == counts.embedding_side
        assert found["multiply_adds_per_token_layers"][name] == multiply_adds(config)
    assert found["parameters"]["per_head"] == configs["dense"].parameters_per_head


def test_gate_phase_has_removed_nothing_yet(heads: Command, checkpoints: dict[str, Path]) -> None:
    found, cut = record(heads, checkpoints["gates"]), record(heads, checkpoints["cut"])
    assert found["heads_removed"] == 0
    assert found["heads_closed_by_gates"] == 17
    assert found["phase"] == "gates"
    changed = ("phase", "heads_removed", "heads_closed_by_gates")
    for name in cut.keys() - set(changed):
        assert found[name] == cut[name], "the decided gates give the cut checkpoint's numbers"
    _, out, _ = heads(f"checkpoint={checkpoints['gates']}")
    assert "0 heads removed so far" in out
    assert "17 heads that the gates close now" in " ".join(out.split())


def test_checkpoint_in_the_middle_of_the_gate_phase_has_its_targets_heads(
    heads: Command, random_model: Models, tmp_path: Path
) -> None:
    model = random_model()
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"gates.pi.{layer}": torch.tensor(pi) for layer, pi in enumerate(PI)}
    checkpoint = {"state_dict": state, "allattn": {**entry(model, "gates"), "target_sparsity": 0.5}}
    write_checkpoint(tmp_path / "target.ckpt", checkpoint)
    assert record(heads, tmp_path / "target.ckpt")["heads_kept"] == 12


def test_second_cut_keeps_original_indices_beside_their_pi(
    heads: Command, random_model: Models, tmp_path: Path
) -> None:
    model = random_model(heads_kept=[[1, 4], [0], []], output_scale=[4.0, 8.0, 8.0])
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for layer, pi in enumerate([[-1.0, 3.0], [2.0], []]):
        state[f"gates.pi.{layer}"] = torch.tensor(pi)
    write_checkpoint(tmp_path / "two.ckpt", {"state_dict": state, "allattn": entry(model, "gates")})
    found = record(heads, tmp_path / "two.ckpt")
    assert [layer["heads_kept"] for layer in found["layers"]] == [[4], [0], []]
    assert found["layers"][0]["pi"] == [None, -1.0, None, None, 3.0, None, None, None]
    assert found["layers"][2]["pi"] == [None] * 8
    assert found["heads_removed"] == 21
    assert found["heads_closed_by_gates"] == 1


@pytest.mark.parametrize("name", ["dense", "selected"])
def test_without_gates_no_pi_is_known(heads: Command, checkpoints: dict[str, Path], name: str) -> None:
    found = record(heads, checkpoints[name])
    assert [layer["pi"] for layer in found["layers"]] == [[None] * 8] * 3
    assert found["heads_kept"] == {"dense": 24, "selected": 7}[name]
    assert found["sparsity"] == pytest.approx({"dense": 0, "selected": 17 / 24}[name])


def test_text(heads: Command, checkpoints: dict[str, Path]) -> None:
    _, out, err = heads(f"checkpoint={checkpoints['cut']}")
    assert err == ""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    kept = " ".join(f"{head}:{PI[0][head]:+.2f}" for head in KEPT[0])
    assert rows[0] == ["0", "6", "1.333", f"{6 * PER_HEAD + BESIDE_HEADS:,}", kept]
    assert rows[1] == ["1", "0", "8.000", f"{BESIDE_HEADS:,}", "none"]
    sums = {row[0]: row[1:] for row in rows if len(row) == 3}
    assert sums["heads"] == ["24", "7 of 24"]
    assert sums["sparsity (share of heads)"] == ["0.0%", "70.8%"]
    assert sums["parameters, layers"] == [f"{n * PER_HEAD + 3 * BESIDE_HEADS:,}" for n in (24, 7)]
    assert sums["parameters, one head"] == [f"{PER_HEAD:,}"] * 2
    assert sums["multiply-adds per token, layers"] == [f"{n * MULTIPLY_ADDS_PER_HEAD:,}" for n in (24, 7)]
    _, dense, _ = heads(f"checkpoint={checkpoints['dense']}")
    assert "0 1 2 3 4 5 6 7" in dense
    assert "pi" not in dense


@pytest.mark.parametrize("name", ["dense", "gates", "cut", "selected"])
def test_picture(heads: Command, checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    record(heads, checkpoints[name], "picture=heads.png")  # standard output is JSON only
    pixels = image.imread(tmp_path / "heads.png")
    assert min(pixels.shape[:2]) > 200
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["heads.png"]


def test_pictures_show_heads_and_pi(heads: Command, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    pictures = []
    for name in ("dense", "cut", "selected"):
        record(heads, checkpoints[name], f"picture={name}.png")
        pixels = image.imread(tmp_path / f"{name}.png")[..., :3]
        blue = (pixels[..., 2] > pixels[..., 0] + 0.2).mean()
        red = (pixels[..., 0] > pixels[..., 2] + 0.2).mean()
        pictures.append((blue, red))
    (dense_blue, dense_red), (_, cut_red), (selected_blue, _) = pictures
    assert selected_blue / dense_blue == pytest.approx(7 / 24, rel=0.15)
    assert dense_red == 0
    assert cut_red > 0.1, "negative pi is red"


def test_what_cannot_be_done_is_one_line(
    heads: Command, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    cases = {
        "needs checkpoint=PATH": (),
        "no such checkpoint": ("checkpoint=nothing.ckpt",),
        "ends in .png": (f"checkpoint={checkpoints['cut']}", "picture=heads.pdf"),
        "cannot be written": (f"checkpoint={checkpoints['cut']}", "picture=no/such/folder/heads.png"),
    }
    for message, arguments in cases.items():
        status, out, err = heads(*arguments)
        assert (status, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
