"""What a score depends on, and what it does not: rows, segments, windows, context, tokens and words."""

import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import run

from allattn.data.segments import WindowStream
from allattn.model.language_model import AllAttentionLM
from allattn.training.config import EvaluationConfig, EvaluationMode
from allattn.training.run_folder import RunFolder
from allattn.training.scoring import Score, score_split

Models = Callable[..., AllAttentionLM]
IDS = np.random.default_rng(5).integers(0, 50, 140).astype(np.int32)
LAYERS, MEMORY = 3, 7  # of the random model
REACH = LAYERS * MEMORY  # tokens before a query that can change it


@pytest.fixture(scope="module")
def model(random_model: Models) -> AllAttentionLM:
    return random_model(torch.float64)


def scored(model: AllAttentionLM, ids: np.ndarray[Any, Any] = IDS, **evaluation: Any) -> Score:
    corpus: Any = SimpleNamespace(
        splits={"valid": SimpleNamespace(ids=ids, words=len(ids), articles=[], unseen=[])}
    )
    return score_split(model, corpus, "valid", EvaluationConfig(**evaluation))


@pytest.fixture(scope="module")
def token_by_token(model: AllAttentionLM) -> dict[int, Score]:
    """Scores by memory length with one row and one token at a time, the slowest way."""
    return {length: scored(model, rows=1, segment_length=1, memory_length=length) for length in (1, 7, 9)}


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 150), segment_length=st.integers(2, 150), memory_length=st.sampled_from([1, 7, 9]))
def test_memory_mode_depends_on_nothing_but_the_memory(
    model: AllAttentionLM,
    token_by_token: dict[int, Score],
    rows: int,
    segment_length: int,
    memory_length: int,
) -> None:
    result = scored(model, rows=rows, segment_length=segment_length, memory_length=memory_length)
    assert result.tokens == token_by_token[memory_length].tokens == len(IDS) - 1
    assert result.nats == pytest.approx(token_by_token[memory_length].nats, rel=1e-9, abs=0)


def test_another_memory_length_gives_another_score(model: AllAttentionLM) -> None:
    """eval.memory_length is used, the model's is the default, and it may exceed the model's."""
    scores = {length: scored(model, memory_length=length).nats for length in (1, 4, 7, 20)}
    assert scored(model).nats == scores[7]
    assert len({round(nats, 6) for nats in scores.values()}) == 4


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(2, 60), rows=st.integers(1, 9), context=st.integers(1, 70), stride=st.integers(1, 70)
)
def test_windows_score_every_token_once(tokens: int, rows: int, context: int, stride: int) -> None:
    """Counted from the segments: ids are positions here. Each is read after its `context` predecessors."""
    seen: Counter[int] = Counter()
    for segment in WindowStream(np.arange(tokens, dtype=np.int32), rows, context, stride):
        assert segment.starts_over
        for inputs, targets in zip(segment.inputs.tolist(), segment.targets.tolist(), strict=True):
            for place, target in enumerate(targets):
                if target >= 0:
                    seen[target] += 1
                    before = inputs[: place + 1]
                    assert before == list(range(target - len(before), target))
                    assert min(target, context + 1) <= len(before) <= context + stride
    assert seen == Counter(range(1, tokens))


@pytest.mark.parametrize("memory_length", [None, 4])
@pytest.mark.parametrize(("context", "stride", "rows"), [(0, 1, 4), (0, 13, 3), (5, 8, 1), (40, 139, 2)])
def test_windows_with_the_whole_reach_score_as_memory_does(
    model: AllAttentionLM, memory_length: int | None, context: int, stride: int, rows: int
) -> None:
    reach = LAYERS * (memory_length or MEMORY)
    window = scored(
        model,
        mode=EvaluationMode.window,
        rows=rows,
        context=reach + context,
        stride=stride,
        memory_length=memory_length,
    )
    memory = scored(model, memory_length=memory_length)
    assert window.tokens == memory.tokens
    assert window.nats == pytest.approx(memory.nats, rel=1e-12)


def test_one_token_less_is_not_enough(model: AllAttentionLM) -> None:
    """So layers * memory_length is the exact reach, and the test above can fail."""
    memory = scored(model).nats
    enough = scored(model, mode=EvaluationMode.window, context=REACH, stride=1).nats
    less = scored(model, mode=EvaluationMode.window, context=REACH - 1, stride=1).nats
    assert abs(enough - memory) < 1e-10
    assert abs(less - memory) > 1e-8


def test_the_command_takes_every_mode(tmp_path: Path, dense_without_dropout: RunFolder) -> None:
    """It names what it scored; equal context gives equal scores, another one another."""
    scores = {}
    for name, overrides in {
        "memory": ["eval.rows=2"],
        "rows": ["eval.rows=7", "eval.segment_length=5"],
        "window": ["eval.mode=window", "eval.context=8", "eval.stride=5"],
        "shorter": ["eval.memory_length=1"],
        "longer": ["eval.memory_length=15"],
    }.items():
        arguments = [f"checkpoint={dense_without_dropout.last}", "split=valid", *overrides]
        output = run(tmp_path / "output", "allattn", "evaluate", *arguments).output
        found = re.search(r"per token ([\d.]+) \(([\d.]+) nats, ([\d.]+) bits\); ([\d,]+) tokens", output)
        assert found is not None, output
        assert found[4] == "131", "132 tokens, of which the first is not scored"
        scores[name] = float(found[2])
        assert float(found[1]) == pytest.approx(math.exp(scores[name]), rel=1e-4)
        assert float(found[3]) == pytest.approx(scores[name] / math.log(2), abs=2e-6)
    assert scores["rows"] == pytest.approx(scores["memory"], abs=2e-6)
    assert scores["window"] == pytest.approx(scores["memory"], abs=2e-6)  # 2 layers * 4
    assert len(set(scores.values())) >= 3, "other memory lengths give other scores"


@pytest.mark.parametrize(("split", "scored_tokens"), [("train", 659), ("valid", 131), ("test", 98)])
def test_the_command_counts_all_tokens_but_the_first(
    tmp_path: Path, dense_without_dropout: RunFolder, split: str, scored_tokens: int
) -> None:
    arguments = [f"checkpoint={dense_without_dropout.last}", f"split={split}"]
    output = run(tmp_path / "output", "allattn", "evaluate", *arguments).output
    assert f"{split}: " in output
    assert f"{scored_tokens:,} tokens, {scored_tokens:,} words scored" in output
