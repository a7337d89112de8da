"""Perplexity of a model, dense or pruned, or of two on one text: allattn evaluate A [B] [split=test]."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from allattn.commands.opened import SavedSettings, open_saved
from allattn.commands.run_command import Command
from allattn.data.config import DataConfig, Source, Split
from allattn.data.corpus import Corpus
from allattn.errors import InputError
from allattn.files import write_atomically
from allattn.record.articles import articles_record
from allattn.record.bootstrap import perplexity_difference
from allattn.record.result import evaluation_record, score_record
from allattn.record.score_lines import difference_line, score_lines
from allattn.training.checkpoint_text import corpus_of
from allattn.training.config import EvaluationConfig, check_evaluated_distances, check_evaluation
from allattn.training.scoring import score_split


@dataclass
class EvaluateSettings(SavedSettings):
    """Settings of the command; the text is the checkpoint's own unless `data` names another."""

    split: Split = Split.test
    data: DataConfig = field(default_factory=lambda: DataConfig(source=Source.checkpoint))
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)
    against: str | None = None  # a second checkpoint: both are scored, and their difference is given
    articles: str | None = None  # a JSON file to write the nats of every article to


def evaluate(settings: EvaluateSettings) -> dict[str, Any]:
    """Score one split exactly and print it; with `against`, by both models and with their difference.

    Raises:
        InputError: a checkpoint or the text cannot be used, or the models do not read the same tokens.
    """
    check_evaluation(settings.eval)
    split, places = settings.split.value, [settings.checkpoint]
    if settings.against is not None:
        places.append(settings.against)
    opened = [open_saved(place, settings.device, settings.progress) for place in places]
    models = [each.model for each in opened]
    for model in models:
        check_evaluated_distances(model.config, settings.eval)
    if settings.data.source is Source.checkpoint and "data" not in opened[0].meta:
        raise InputError(
            f"{settings.checkpoint}: an export does not say on what text it was trained; name one by "
            "data.source=wikitext103 (or another of the hub), or data.source=files data.folder=FOLDER"
        )
    _, corpus = corpus_of(settings.data, opened[0].checkpoint, opened[0].tokenizer(), settings.progress)
    for other in opened[1:]:
        _check_same_tokens(settings, corpus, other.meta)
    scores, records = [], []
    for place, model in zip(places, models, strict=True):
        score = score_split(model, corpus, split, settings.eval, progress=settings.progress)
        how = evaluation_record(model, settings.eval)
        lines = score_lines(split, score, how, model.config.heads_present)
        print("\n".join(lines if settings.against is None else [place, *lines]))
        scores.append(score)
        records.append({**score_record(score), "evaluation": how})
    if settings.articles is not None:
        kept = {place: articles_record({split: score}) for place, score in zip(places, scores, strict=True)}
        _write(Path(settings.articles), kept)
    if settings.against is None:
        return records[0]
    one, another = (score.articles for score in scores)
    difference = perplexity_difference(one, another)
    print(f"{settings.checkpoint} minus {settings.against}: {difference_line(difference, one.unit)}")
    return {**records[0], "against": records[1], "difference": asdict(difference)}


def _check_same_tokens(settings: EvaluateSettings, corpus: Corpus, other: dict[str, Any]) -> None:
    """Refuse a second model whose perplexity is not of the same tokens.

    Raises:
        InputError: says what differs.
    """
    pair = f"against={settings.against}: has"
    if other["tokenizer_hash"] != corpus.tokenizer_hash:
        raise InputError(
            f"{pair} another vocabulary than checkpoint={settings.checkpoint}, so their perplexities do not "
            "compare: train both with one data.tokenizer"
        )
    its_own = other.get("fingerprint", corpus.fingerprint)  # an export names none
    if settings.data.source is Source.checkpoint and its_own != corpus.fingerprint:
        raise InputError(
            f"{pair} another text than checkpoint={settings.checkpoint}: name the one to score both on by "
            "data.source=files data.folder=FOLDER"
        )


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        write_atomically(path, json.dumps(record) + "\n")
    except OSError as error:
        raise InputError(f"articles={path}: cannot be written ({error.strerror})") from None


def with_places_as_settings(arguments: list[str]) -> list[str]:
    """`A` and `A B` written as `checkpoint=A` and `checkpoint=A against=B`.

    Raises:
        InputError: there are more than two, or one of them is named as a setting too.
    """
    places = [each for each in arguments if "=" not in each and not each.startswith("-")]
    if len(places) > 2:
        raise InputError(f"{' '.join(places)}: evaluate takes one checkpoint, or two to compare")
    settings = dict(zip(("checkpoint", "against"), places, strict=False))
    for name, place in settings.items():
        if again := [each for each in arguments if each.startswith(f"{name}=")]:
            raise InputError(f"{place} and {again[0]} both say which checkpoint: leave one of them out")
    named = [f"{name}={place}" for name, place in settings.items()]
    return [*named, *(each for each in arguments if each not in places)]


COMMAND = Command("evaluate", EvaluateSettings, evaluate, respelled=with_places_as_settings)
