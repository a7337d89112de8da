"""Pruning: a trained model -> decide which heads stay -> cut -> fine-tune -> both models' scores.

Whatever decides, learned gates or scores of the heads, and however often: the first process writes the cut
checkpoint as last.ckpt, and every process goes on from it.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from allattn.errors import InputError
from allattn.families import all_attention, for_removal, sizes_from_dict
from allattn.files import file_hash
from allattn.heads.all_attention import OwnModel
from allattn.heads.text_measures import bias_compensation
from allattn.model.cores.choose import CORES
from allattn.model.gated import GatedLM, Sizes
from allattn.pretrained.opening import open_pretrained
from allattn.pruning.config import Removal, Selection, removal_steps
from allattn.pruning.objective import FrozenGates, learned_gates, unit_record
from allattn.pruning.phase import Phase
from allattn.pruning.selection import heads_after, select_heads
from allattn.pruning.surgery import RemovalPlan, plan_removal, train_only
from allattn.randomness import generator
from allattn.settings import PruneSettings
from allattn.stages.run import Run, open_run
from allattn.training.artifacts import local_checkpoint
from allattn.training.batches import as_batches
from allattn.training.checkpoint_text import corpus_of, text_record
from allattn.training.checkpoints import MODEL_PREFIX, has_gates, read_checkpoint, write_checkpoint
from allattn.training.config import check_distances
from allattn.training.cutting import cut_checkpoint, freeze_plan
from allattn.training.distillation import Teacher
from allattn.training.hub_models import PREFIX
from allattn.training.language_task import LanguageTask
from allattn.training.loading import build_model, checked_tokenizer, load_model
from allattn.training.loggers import wandb_runs
from allattn.training.resumable_settings import Changes, refuse_late_changes
from allattn.training.run_folder import result_line
from allattn.training.runner import check_precision, scoring_device, training_core
from allattn.training.world import is_first_process


def prune(settings: PruneSettings) -> dict[str, Any]:
    """Decide which heads stay, remove the others, fine-tune, score, write result.json; the result.

    A finished run in the same folder is not run again; an unfinished one goes on, before and after any
    removal. Processes other than the first return an empty result.

    Raises:
        InputError: settings, checkpoint, text or run folder cannot be used.
    """
    dense = _read_dense(settings)
    with open_run(settings, Phase.gates, Phase.fine_tune) as run:
        text = partial(corpus_of, settings.data, dense.checkpoint, dense.tokenizer, settings.trainer.progress)
        if done := run.finished(lambda: text()[1]):
            dense.must_be_of(run.folder.result, done, run.folder.changed)
            print(result_line(run.folder, done))
            return done
        data, corpus = text()
        run.begin(corpus, text_record(data, corpus) | {"dense_hash": dense.hash})
        if run.state is not None:
            dense.must_be_of(run.folder.last, run.state["allattn"], run.folder.changed)
            refuse_late_changes(run.folder.changed, run.state["allattn"], settings.gates.freeze_step)
        run.start_logging(dense.config)
        for wandb in wandb_runs(run.loggers):
            wandb.uses(settings.checkpoint)

        cuts = removal_steps(settings.gates, settings.last_step)
        for cut, step in enumerate(cuts, 1):
            if run.cuts < cut:
                _train(run, dense, step)
                if is_first_process():
                    _remove_heads(run, dense, cut, len(cuts))
                run.go_on_from(cut)
        _train(run, dense, settings.last_step)

        if not is_first_process():
            return {}
        return _conclude(run, dense)


@dataclass(frozen=True)
class _Dense:
    """The model to prune: trained, perhaps with heads removed before."""

    path: Path
    checkpoint: dict[str, Any]
    tokenizer: Path | Tokenizer
    hash: str  # of the file

    @property
    def config(self) -> Sizes:
        """Its sizes."""
        return sizes_from_dict(self.checkpoint["allattn"]["model"])

    def model(self) -> GatedLM:
        """Built anew from the checkpoint."""
        return build_model(self.config, self.checkpoint["state_dict"], self.path)

    def must_be_of(self, path: Path, record: dict[str, Any], changed: Changes) -> None:
        """Refuse to take up the pruning run of another dense model, whose `record` lies at `path`."""
        unrecorded = None if "checkpoint" in changed else self.hash
        if record.get("dense_hash", unrecorded) != self.hash:
            raise InputError(
                f"{path}: belongs to another dense checkpoint than checkpoint= names now (which was trained "
                "again?): bring that one back, or give this run another name="
            )


def _read_dense(settings: PruneSettings) -> _Dense:
    check_precision(settings.trainer)
    path = local_checkpoint(settings.checkpoint)
    masked = settings.gates.removal is Removal.masked
    if settings.checkpoint.startswith(PREFIX):
        opened = open_pretrained(path)
        sizes = for_removal(opened.sizes, masked)
        state = {f"{MODEL_PREFIX}{name}": tensor for name, tensor in opened.state.items()}
        meta = {"model": sizes.to_dict(), "phase": Phase.pretrain.value}
        dense = _Dense(path, {"state_dict": state, "allattn": meta}, opened.tokenizer, opened.hash)
    else:
        checkpoint = read_checkpoint(path)
        if has_gates(checkpoint):
            raise InputError(
                f"{path}: is from the middle of a pruning run; prune starts from a trained model"
            )
        sizes = for_removal(sizes_from_dict(checkpoint["allattn"]["model"]), masked)
        dense = _Dense(path, checkpoint, checked_tokenizer(path, checkpoint), file_hash(path))
    check_distances(sizes, settings.schedule, settings.eval)
    return dense


def _task(run: Run[PruneSettings], dense: _Dense) -> LanguageTask:
    """The model as the run has it now, what its heads follow, and the dense model as teacher."""
    model, settings = dense.model() if run.state is None else run.saved_model(), run.settings
    learns = settings.gates.selection is Selection.l0 and not run.cuts
    objective = (
        learned_gates(settings.gates, model.config, settings.seed) if learns else FrozenGates(model.config)
    )
    train_only(model, settings.gates.train if learns else settings.gates.train_after)
    teaches = settings.distill.weight > 0 and (settings.distill.gates or not learns)
    return run.task(model, objective, _teacher(run, dense) if teaches else None)


def _teacher(run: Run[PruneSettings], dense: _Dense) -> Teacher:
    """The dense model as teacher, with the attention core of the training."""
    model = dense.model()
    model.use_core(CORES[training_core(run.settings.trainer)])
    return Teacher(model, run.settings.distill)


def _train(run: Run[PruneSettings], dense: _Dense, until: int) -> None:
    """Train up to optimizer step `until`: weights and gates together, or what a removal has left."""
    run.fit(_task(run, dense), until)


def _remove_heads(run: Run[PruneSettings], dense: _Dense, cut: int, cuts: int) -> None:
    """Write the cut checkpoint as last.ckpt; with learned gates, gates.ckpt keeps the one before.

    Args:
        run: that goes on from it.
        dense: the model before the first removal.
        cut: the how-many-th removal this is, from 1.
        cuts: how many there are.
    """
    last = run.folder.last
    uncut = read_checkpoint(last) if last.exists() else _task(run, dense).checkpoint()
    if has_gates(uncut):
        write_checkpoint(run.folder.gates, uncut)
        plan, bias = freeze_plan(uncut), None
    else:
        plan, bias = _selected(run, uncut, dense.config.heads_kept_total, cut, cuts)
    after = cut_checkpoint(uncut, plan, bias)
    after["allattn"] |= {
        "best": math.inf,  # scores of the larger model do not count for the smaller one
        "cuts": cut,
        "cut_step": uncut["allattn"]["step"],
        "cut_tokens": _tokens_seen(run.settings, uncut["allattn"]),
    }
    write_checkpoint(last, after)
    print(plan)


def _selected(
    run: Run[PruneSettings], uncut: dict[str, Any], heads: int, cut: int, cuts: int
) -> tuple[RemovalPlan, list[Tensor] | None]:
    """The removal number `cut` of `cuts` by the scores of the heads, of a model that once had `heads`.

    And per layer (d,) what its bias takes over from the heads that go, where the selection says so.
    """
    settings, gates = run.settings, run.settings.gates
    assert gates.target_sparsity is not None
    config = sizes_from_dict(uncut["allattn"]["model"])
    model = build_model(config, uncut["state_dict"], run.folder.last).to(scoring_device(settings.trainer))
    batches = list(as_batches(run.valid_segments(config)))
    keep = heads_after(gates.target_sparsity, heads, cut, cuts)
    selected = select_heads(model, batches, gates, keep, generator(settings.seed, "selection"))
    bias = None
    if gates.selection is Selection.flap:
        own = OwnModel(all_attention(model, "gates.selection=flap, whose compensation is added to a bias,"))
        bias = bias_compensation(own, batches, selected, memory=True)
    return plan_removal(model.config, selected, gates.output_scaling), bias


def _conclude(run: Run[PruneSettings], dense: _Dense) -> dict[str, Any]:
    """Score and time the dense model and what was saved beside each other; the result."""
    settings = run.settings
    saved = load_model(run.folder.last)
    about = {
        "steps": saved.meta["step"],
        **_after_last_cut(settings, saved.meta),
        "ablation": settings.ablation,
        "selection": settings.gates.selection.value,
        "scope": settings.gates.scope.value,
        "unit": unit_record(settings.gates, dense.config),
        "lambda_max": settings.gates.lambda_max,
        "target_sparsity": settings.gates.target_sparsity,
        "dense_hash": dense.hash,
    }
    return run.conclude(about, run.measure({"dense": dense.model(), "pruned": saved.model}))


def _after_last_cut(settings: PruneSettings, meta: dict[str, Any]) -> dict[str, int]:
    """Updates that the model took with the heads it keeps, and tokens that they read.

    Where an earlier version removed the heads, `meta` of the last checkpoint does not say when that was, but
    the settings do.
    """
    step = meta.get("cut_step", removal_steps(settings.gates, settings.last_step)[0])
    tokens = meta.get("cut_tokens", _tokens_seen(settings, {"step": step}))
    return {
        "updates_after_cut": meta["step"] - step,
        "tokens_after_cut": _tokens_seen(settings, meta) - tokens,
    }


def _tokens_seen(settings: PruneSettings, meta: dict[str, Any]) -> int:
    """Training tokens read up to a checkpoint; one of format 1 does not say."""
    schedule = settings.schedule
    tokens: int = meta.get("tokens_seen", meta["step"] * schedule.batch_size * schedule.segment_length)
    return tokens
