"""A causal language model of others without its least active heads: allattn remove checkpoint=huggingface:...

heads=K folder=OUT.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from torch import Tensor

from allattn.commands.opened import SavedSettings, device_named
from allattn.commands.run_command import Command
from allattn.data.config import DataConfig
from allattn.errors import InputError, first_line
from allattn.files import new_folder
from allattn.head_study.config import CalibrationConfig, TextConfig
from allattn.head_study.texts import Text, first_tokens, refuse_same
from allattn.heads.scores import SCORES, importance, text_scores
from allattn.randomness import generator
from allattn.training.artifacts import local_checkpoint
from allattn.training.foreign_settings import Dtype, Form, Unit
from allattn.training.hub_models import PREFIX, is_foreign
from allattn.training.model_card import CardLabels

SCORED = 16384  # tokens of the test text, unless told otherwise


@dataclass
class RemoveSettings(SavedSettings):
    """Settings of the command."""

    folder: str = MISSING  # is created
    heads: int = MISSING  # query heads to remove, over all layers
    score: str = "circuit_ahon_ln"  # the lowest go; of docs/head-study.md
    form: Form = Form.uniform
    unit: Unit = Unit.auto
    data: DataConfig = field(default_factory=DataConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    test: TextConfig = field(default_factory=lambda: TextConfig(tokens=SCORED))
    length: int = 512  # tokens of a window, of both texts
    rows: int = 8  # windows at once
    seed: int = 1  # of the random score
    dtype: Dtype = Dtype.auto
    projection: str | None = None  # output projection of a layer, * = its number; null = known by its name
    license: str = "unknown"  # for the model card: an identifier of the hub, such as apache-2.0
    language: str | None = None  # for the model card, such as en


def remove(settings: RemoveSettings) -> dict[str, Any]:
    """Score, remove, measure, and write the folder; before and after by name.

    Raises:
        InputError: a setting, the model or the text cannot be used, or the folder exists.
    """
    _check(settings)
    try:
        from allattn.huggingface.foreign import ForeignModel
        from allattn.huggingface.foreign_card import foreign_card, how_fast, measure, original_heads
        from allattn.huggingface.opening import open_foreign
        from allattn.huggingface.removal import without_heads
        from allattn.huggingface.texts import check_context
        from allattn.huggingface.units import lowest
    except ImportError as error:
        raise InputError(f'{first_line(error)}; the command needs: pip install "allattn[hf]"') from None
    folder, source = Path(settings.folder), local_checkpoint(settings.checkpoint)
    if not is_foreign(source):
        raise InputError(
            f"checkpoint={settings.checkpoint}: is no causal language model of others; ours are pruned by "
            "allattn prune"
        )
    opened = open_foreign(source, device_named(settings.device), settings.dtype, settings.projection)
    model = opened.model
    check_context(model.config, settings.length)
    groups = [layer.groups for layer in model.layers]
    alike = [torch.zeros(layer.heads) for layer in model.layers]
    lowest(alike, groups, settings.heads, settings.form, settings.unit)  # refused before anything is scored
    (calibration, _), (test, words) = _texts(settings, opened.tokenizer)
    noise = generator(settings.seed, "random score")
    found = text_scores(model, calibration.batches(), [settings.score], noise=noise)
    ranking = importance(settings.score, found[settings.score])
    gates = lowest(ranking, groups, settings.heads, settings.form, settings.unit)
    cut = ForeignModel(without_heads(model, gates, settings.form), settings.projection)
    both = {"before": model, "after": cut}
    measured = measure(both, test, words, settings.progress)
    closed = original_heads(model, _closed(gates))
    facts = {
        **measured,
        "kind": model.config.model_type,
        "form": settings.form.value,
        "score": settings.score,
        "heads": sum(layer.heads for layer in model.layers),
        "removed": settings.heads,
        "closed": closed,
        "calibration_tokens": calibration.tokens,
        "test_tokens": test.tokens,
        "length": settings.length,
        "text": settings.data.source.value,
        "how_fast": how_fast(model, test),
    }
    name = settings.checkpoint.removeprefix(PREFIX)
    name = source.name if Path(name).is_dir() else name
    labels = CardLabels(settings.license, settings.language)
    _write(folder, cut.model, opened.tokenizer, foreign_card(folder.name, name, labels, facts))
    _say(settings, facts)
    return facts


def _check(settings: RemoveSettings) -> None:
    if Path(settings.folder).exists():
        raise InputError(f"folder={settings.folder}: exists already; give the name of a new one")
    if settings.score not in SCORES:
        near = difflib.get_close_matches(settings.score, SCORES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"score={settings.score}: there is no such score; {hint}there are {', '.join(SCORES)}"
        )
    for name, least in (("length", 2), ("rows", 1), ("seed", 0)):
        if getattr(settings, name) < least:
            raise InputError(f"{name}={getattr(settings, name)}: must be at least {least}")
    for name, part in (("calibration", settings.calibration), ("test", settings.test)):
        if part.tokens is not None and part.tokens < 1:
            raise InputError(f"{name}.tokens={part.tokens}: must be at least 1")


def _texts(settings: RemoveSettings, tokenizer: Any) -> list[tuple[Text, int]]:
    """Calibration and test text in windows, each with its words.

    Raises:
        InputError: a text cannot be used or is too short, or both are the same.
    """
    from allattn.huggingface.texts import read_tokens, windows

    parts = {"calibration": settings.calibration, "test": settings.test}
    read = [read_tokens(settings.data, part.split.value, tokenizer, part.tokens) for part in parts.values()]
    for name, tokens in zip(parts, read, strict=True):
        first_tokens(tokens.ids, name, None, settings.length)
    if not settings.calibration.same:
        refuse_same(*(tokens.ids for tokens in read))
    return [(windows(tokens, settings.rows, settings.length), tokens.words) for tokens in read]


def _closed(gates: Sequence[Tensor]) -> list[list[int]]:
    return [(gate == 0).nonzero().flatten().tolist() for gate in gates]


def _write(folder: Path, model: Any, tokenizer: Any, card: str) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        with new_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            (partial / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"folder={folder}: cannot be written ({error.strerror or first_line(error)})"
        ) from None


def _say(settings: RemoveSettings, facts: dict[str, Any]) -> None:
    print(f"{settings.folder}: without {facts['removed']} of {facts['heads']} heads, form={facts['form']}")
    for layer, heads in enumerate(facts["closed"]):
        if heads:
            print(f"  layer {layer}: heads {', '.join(map(str, heads))}")
    before, after = facts["before"], facts["after"]
    for what, form in (
        ("parameters", ",d"),
        ("cache_bytes", ",d"),
        ("tokens_per_second", ".0f"),
        ("perplexity", ".4f"),
        ("word_perplexity", ".4f"),
    ):
        one, other = (format(getattr(model, what), form) for model in (before, after))
        print(f"{what.replace('_', ' ')}: {one} before, {other} after")
    print(facts["how_fast"])


COMMAND = Command("remove", RemoveSettings, remove)
