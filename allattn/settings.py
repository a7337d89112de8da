"""The two commands' settings as typed Hydra configs, and what must hold between the groups."""

from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from allattn.data.config import DataConfig, Source, check_data
from allattn.errors import InputError
from allattn.model.config import ModelConfig, check_model
from allattn.pruning.config import DistillConfig, GatesConfig, Selection, check_distill, check_gates
from allattn.training.config import (
    EvaluationConfig,
    LoggerConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerConfig,
    check_distances,
    check_training,
    in_steps,
)


class Resume(Enum):
    """What a start in an existing run folder does."""

    auto = "auto"  # go on, if the settings are the saved ones
    changed = "changed"  # go on with changed settings


@dataclass
class RunSettings:
    """What both commands share."""

    name: str = MISSING  # the run's folder below runs_folder, and its name in W&B
    runs_folder: str = "runs"
    seed: int = 1
    resume: Resume = Resume.auto
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    stage: ClassVar[str]

    @property
    def tags(self) -> list[str]:
        """What a run is found by, beside its group."""
        return list(self.logger.tags)

    @property
    def last_step(self) -> int:
        """Optimizer steps that the run takes."""
        return self.schedule.steps


@dataclass
class PretrainSettings(RunSettings):
    """Settings of train.py."""

    stage = "pretrain"
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass
class PruneSettings(RunSettings):
    """Settings of prune.py; the model's sizes come from the checkpoint."""

    stage = "prune"
    checkpoint: str = MISSING  # a pretrained checkpoint
    ablation: str = "all_three"  # which of the paper's three techniques are on; the group sets them
    gates: GatesConfig = field(default_factory=GatesConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)

    @property
    def tags(self) -> list[str]:
        """The ablation too."""
        return [*self.logger.tags, self.ablation]

    @property
    def last_step(self) -> int:
        """As many without learned gates as with them, unless gates.selection_steps says otherwise."""
        gates = self.gates
        own = None if gates.selection is Selection.l0 else gates.selection_steps
        return self.schedule.steps if own is None else own


@dataclass
class PrepareSettings:
    """Settings of `allattn prepare`."""

    data: DataConfig = field(default_factory=DataConfig)
    progress: bool = True


def register() -> None:
    """Make the schemas known to Hydra; the files of the same names in conf/ start from them."""
    store = ConfigStore.instance()
    store.store("pretrain_settings", PretrainSettings)
    store.store("prune_settings", PruneSettings)
    store.store("prepare_settings", PrepareSettings)


def pretrain_settings(config: DictConfig) -> PretrainSettings:
    """Typed and checked settings of train.py.

    Raises:
        InputError: a setting is missing or contradicts another.
    """
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, PretrainSettings)
    _check_run(settings)
    check_model(settings.model)
    check_distances(settings.model, settings.schedule, settings.eval)
    if settings.data.source is Source.checkpoint:
        raise InputError("data=checkpoint is for prune.py: train.py has no checkpoint to take the text from")
    return settings


def prune_settings(config: DictConfig) -> PruneSettings:
    """Typed and checked settings of prune.py.

    Raises:
        InputError: a setting is missing or contradicts another.
    """
    if OmegaConf.is_missing(config, "checkpoint"):
        raise InputError("prune.py needs checkpoint=PATH, a checkpoint that train.py wrote")
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, PruneSettings)
    _check_run(settings, vocabulary_given=True)
    check_gates(settings.gates, settings.schedule.steps)
    check_distill(settings.distill)
    if settings.distill.weight and not settings.trainer.accumulation:
        raise InputError("trainer.accumulation=0 does not count what distill.weight takes: give a number")
    if settings.schedule.warmup_steps > settings.last_step:
        raise InputError(
            f"schedule.warmup_steps={settings.schedule.warmup_steps} is not in "
            f"0..gates.selection_steps={settings.last_step}"
        )
    return settings


def prepare_settings(config: DictConfig) -> PrepareSettings:
    """Typed and checked settings of `allattn prepare`.

    Raises:
        InputError: a setting contradicts another.
    """
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, PrepareSettings)
    if settings.data.source is Source.checkpoint:
        raise InputError("data=checkpoint has been prepared where it was trained on: name the text itself")
    check_data(settings.data)
    return settings


def _check_run(settings: RunSettings, vocabulary_given: bool = False) -> None:
    if min(settings.schedule.batch_size, settings.schedule.segment_length) > 0:
        settings.schedule = in_steps(settings.schedule)
    if settings.seed < 0:
        raise InputError(f"seed={settings.seed}: must not be negative")
    parts = Path(settings.name).parts
    if not parts or Path(settings.name).is_absolute() or ".." in parts:
        raise InputError(
            f"name={settings.name}: give the run a name, a folder below runs_folder={settings.runs_folder}"
        )
    check_data(settings.data, vocabulary_given)
    check_training(settings.optimizer, settings.schedule, settings.eval, settings.trainer)


def plain(settings: Any) -> dict[str, Any]:
    """Settings as plain values (enums by name), for config.yaml, W&B and checkpoints."""
    return _plain(asdict(settings))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
