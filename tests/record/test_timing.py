"""What is inside the clock, and that models take turns at it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from allattn.data.segments import EvaluationStream
from allattn.record import timing
from allattn.record.timing import in_turn, layer_seconds_per_token

CPU = torch.device("cpu")


def test_actions_take_turns_and_the_first_round_is_a_warm_up() -> None:
    calls: list[str] = []
    seconds = in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, CPU)
    assert calls == ["a", "b"] * 4
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3}
    assert all(value >= 0 for taken in seconds.values() for value in taken)


def test_the_layers_alone_are_timed(
    random_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the clock every layer runs once per segment, on what a whole pass gives it, and nothing else."""
    models = [random_model(), random_model(heads_kept=[[1, 4], [0], []], output_scale=[4.0, 8.0, 8.0])]
    stream = EvaluationStream(np.arange(50, dtype=np.int32), 2, 5, 0)
    segments = list(stream)
    ran: list[str] = []
    outputs: list[Tensor] = []
    for model in models:
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
        model.layers[-1].register_forward_hook(lambda layer, given, out: outputs.append(out))

    def clock(actions: Mapping[int, Callable[[], object]], *rest: Any) -> dict[int, list[float]]:
        for index, action in actions.items():
            ran.clear()
            outputs.clear()
            action()
            within = {name.split(".")[0] for name in ran}
            assert within == {"layers"}
            assert [name for name in ran if name.count(".") == 1] == [
                f"layers.{layer}" for _ in segments for layer in range(3)
            ]
            model, timed, memory = models[index], list(outputs), models[index].empty_memory(2)
            for segment, out in zip(segments, timed, strict=True):
                with torch.no_grad():
                    expected, memory = model.hidden(segment.inputs, memory)
                assert torch.equal(out, expected)
        return {0: [3.0, 1.0, 2.0], 1: [1.0]}

    monkeypatch.setattr(timing, "in_turn", clock)
    tokens = sum(segment.inputs.numel() for segment in segments)
    assert layer_seconds_per_token(models, segments) == [2 / tokens, 1 / tokens]
