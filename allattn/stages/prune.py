"""Pruning: a trained model -> decide which heads stay -> cut -> fine-tune -> both models' scores.

Whatever decides, learned gates or scores of the heads, the first process writes the cut checkpoint as
last.ckpt, and every process goes on from it.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from allattn.errors import InputError
from allattn.files import file_hash
from allattn.model.config import model_config_from_dict
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import Selection
from allattn.pruning.objective import FrozenGates, learned_gates
from allattn.pruning.phase import Phase
from allattn.pruning.selection import select_heads
from allattn.pruning.surgery import plan_removal
from allattn.randomness import generator
from allattn.settings import PruneSettings
from allattn.stages.run import Run, open_run
from allattn.training.artifacts import local_checkpoint
from allattn.training.checkpoint_text import corpus_of, text_record
from allattn.training.checkpoints import has_gates, read_checkpoint, write_checkpoint
from allattn.training.config import check_distances
from allattn.training.cutting import cut_checkpoint, freeze_plan
from allattn.training.loading import build_model, checked_tokenizer, load_model
from allattn.training.loggers import wandb_runs
from allattn.training.resumable_settings import Changes, refuse_late_changes
from allattn.training.run_folder import result_line
from allattn.training.runner import check_precision, scoring_device
from allattn.training.world import is_first_process


def prune(settings: PruneSettings) -> dict[str, Any]:
    """Decide which heads stay, remove the others, fine-tune, score, write result.json; the result.

    A finished run in the same folder is not run again; an unfinished one goes on, in either phase. Processes
    other than the first return an empty result.

    Raises:
        InputError: settings, checkpoint, text or run folder cannot be used.
    """
    dense = _read_dense(settings)
    tokenizer = checked_tokenizer(dense.path, dense.checkpoint)
    with open_run(settings, Phase.gates, Phase.fine_tune) as run:
        text = partial(corpus_of, settings.data, dense.checkpoint, tokenizer, settings.trainer.progress)
        if done := run.finished(lambda: text()[1]):
            dense.must_be_of(run.folder.result, done, run.folder.changed)
            print(result_line(run.folder, done))
            return done
        data, corpus = text()
        run.begin(corpus, text_record(data, corpus) | {"dense_hash": dense.hash})
        if run.state is not None:
            dense.must_be_of(run.folder.last, run.state["allattn"], run.folder.changed)
            refuse_late_changes(run.folder.changed, run.state["allattn"], settings.gates.freeze_step)
        run.start_logging()
        for wandb in wandb_runs(run.loggers):
            wandb.uses(settings.checkpoint)

        if run.state is None or has_gates(run.state):
            if settings.gates.selection is Selection.l0:
                _learn_gates(run, dense)
            if is_first_process():
                _remove_heads(run, dense)
            run.go_on_from(Phase.fine_tune)
        _fine_tune(run)

        if not is_first_process():
            return {}
        return _conclude(run, dense)


@dataclass(frozen=True)
class _Dense:
    """The model to prune: trained, perhaps with heads removed before."""

    path: Path
    checkpoint: dict[str, Any]
    hash: str  # of the file

    def model(self) -> AllAttentionLM:
        """Built anew from the checkpoint."""
        config = model_config_from_dict(self.checkpoint["allattn"]["model"])
        return build_model(config, self.checkpoint["state_dict"], self.path)

    def must_be_of(self, path: Path, record: dict[str, Any], changed: Changes) -> None:
        """Refuse to take up the pruning run of another dense model, whose `record` lies at `path`."""
        unrecorded = None if "checkpoint" in changed else self.hash
        if record.get("dense_hash", unrecorded) != self.hash:
            raise InputError(
                f"{path}: belongs to another dense checkpoint than checkpoint= names now (which was trained "
                "again?): bring that one back, or give this run another name="
            )


def _read_dense(settings: PruneSettings) -> _Dense:
    path = local_checkpoint(settings.checkpoint)
    checkpoint = read_checkpoint(path)
    if has_gates(checkpoint):
        raise InputError(f"{path}: is from the middle of a pruning run; prune starts from a trained model")
    check_precision(settings.trainer)
    check_distances(model_config_from_dict(checkpoint["allattn"]["model"]), settings.schedule, settings.eval)
    return _Dense(path, checkpoint, file_hash(path))


def _learn_gates(run: Run[PruneSettings], dense: _Dense) -> None:
    """Train weights and gates together up to the freeze."""
    model = dense.model() if run.state is None else run.saved_model()
    gates = run.settings.gates
    run.fit(run.task(model, learned_gates(gates, model.config, run.settings.seed)), gates.freeze_step)


def _remove_heads(run: Run[PruneSettings], dense: _Dense) -> None:
    """Write the cut checkpoint as last.ckpt; with learned gates, gates.ckpt keeps the one before."""
    settings = run.settings
    if settings.gates.selection is Selection.l0:
        uncut = read_checkpoint(run.folder.last)
        plan = freeze_plan(uncut)
        write_checkpoint(run.folder.gates, uncut)
    else:
        model = dense.model()
        uncut = run.task(model, FrozenGates(model.config)).checkpoint()
        gates = select_heads(
            model.to(scoring_device(settings.trainer)),
            ((segment.inputs, segment.targets) for segment in run.valid_segments(model.config)),
            settings.gates,
            generator(settings.seed, "selection"),
        )
        plan = plan_removal(model.config, gates, settings.gates.output_scaling)
    cut = cut_checkpoint(uncut, plan)
    cut["allattn"]["best"] = math.inf  # scores of the larger model do not count for the smaller one
    write_checkpoint(run.folder.last, cut)
    print(plan)


def _fine_tune(run: Run[PruneSettings]) -> None:
    """Train what is left; without gates, for as many steps as follow a gate phase."""
    model = run.saved_model()
    run.fit(run.task(model, FrozenGates(model.config)), run.settings.last_step)


def _conclude(run: Run[PruneSettings], dense: _Dense) -> dict[str, Any]:
    """Score and time the dense model and what was saved beside each other; the result."""
    settings = run.settings
    saved = load_model(run.folder.last)
    about = {
        "steps": saved.meta["step"],
        "ablation": settings.ablation,
        "selection": settings.gates.selection.value,
        "scope": settings.gates.scope.value,
        "lambda_max": settings.gates.lambda_max,
        "target_sparsity": settings.gates.target_sparsity,
        "dense_hash": dense.hash,
    }
    return run.conclude(about, run.measure({"dense": dense.model(), "pruned": saved.model}))
