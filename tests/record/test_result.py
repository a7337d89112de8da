"""What records say of a text and of the way it was scored."""

from collections.abc import Callable
from typing import Any

from allattn.data.config import DataConfig
from allattn.data.corpus import prepare
from allattn.model.cores.choose import CORES
from allattn.record.result import corpus_record, evaluation_record, score_record
from allattn.training.config import EvaluationConfig, EvaluationMode
from allattn.training.scoring import Score


def test_unseen_words_of_each_split(files_config: DataConfig) -> None:
    record = corpus_record(prepare(files_config, progress=False))
    assert record["unseen_words"] == {
        "train": {"count": 0, "share": 0.0},
        "valid": {"count": 1, "share": 1 / 3},
        "test": {"count": 1, "share": 1 / 4},
    }


def test_each_mode_is_described_by_its_own_lengths(random_model: Callable[..., Any]) -> None:
    model = random_model()
    memory = evaluation_record(model, EvaluationConfig(memory_length=3, segment_length=11))
    window = evaluation_record(model, EvaluationConfig(mode=EvaluationMode.window, context=5, stride=2))
    shared = {"eos_is_a_word": True, "precision": "float32", "device": memory["device"], "core": "recompute"}
    assert memory == {"mode": "memory", "memory_length": 3, "segment_length": 11, **shared}
    assert window == {"mode": "window", "memory_length": 7, "context": 5, "stride": 2, **shared}
    model.double().use_core(CORES["plain"])
    told = evaluation_record(model, EvaluationConfig())
    assert (told["precision"], told["core"]) == ("float64", "plain")


def test_perplexity_without_unseen_words() -> None:
    record = score_record(Score(6.0, 3, 3, 4.0, 1))
    assert record["unseen_words"] == {"tokens_scored": 1, "perplexity_without": Score(2.0, 2).perplexity}
    assert score_record(Score(6.0, 3, 3, 6.0, 3))["unseen_words"]["perplexity_without"] is None
