"""A study is one command: its jobs, their settings, their folders and their W&B group."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from support.command_fixtures import CommandLine
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from allattn.errors import InputError
from allattn.settings import PruneSettings, prune_settings, register

CONF = Path(__file__).resolve().parents[2] / "conf"
Jobs = Callable[..., list[PruneSettings]]
VARIANTS = ["all_three", "no_lambda_warmup", "no_positive_init", "no_output_scaling", "none_of_three"]


@pytest.fixture
def jobs(composed: CommandLine) -> Callable[..., list[PruneSettings]]:
    """The settings of each job of a pruning command line."""

    def run(*arguments: str) -> list[PruneSettings]:
        done = composed("prune", *arguments, "checkpoint=last.ckpt")
        assert done.status == 0, done.err
        return done.seen

    return run


def test_the_ablation_study_is_the_five_variants_times_the_seeds(jobs: Jobs) -> None:
    seen = jobs("-m", "study=ablation", "seed=1,2,3")
    assert {(job.ablation, job.seed) for job in seen} == {(v, s) for v in VARIANTS for s in (1, 2, 3)}
    assert {job.name for job in seen} == {
        f"ablation-study/ablation-{v}+seed-{s}" for v in VARIANTS for s in (1, 2, 3)
    }
    assert {job.logger.group for job in seen} == {"ablation-study"}
    off = [job for job in seen if job.ablation == "none_of_three"]
    assert {(j.gates.lambda_warmup_steps, j.gates.initial_pi, j.gates.output_scaling) for j in off} == {
        (0, 0.0, False)
    }


def test_the_ablation_at_a_target_is_the_same_five_at_one_sparsity(jobs: Jobs) -> None:
    seen = jobs("-m", "study=ablation_at_target", "seed=1,2")
    assert {(job.ablation, job.seed) for job in seen} == {(v, s) for v in VARIANTS for s in (1, 2)}
    assert {job.gates.target_sparsity for job in seen} == {0.438}
    assert {job.gates.lambda_warmup_steps for job in seen if job.ablation == "no_lambda_warmup"} == {0}
    assert {job.logger.group for job in seen} == {"ablation-at-target"}
    other = jobs("-m", "study=ablation_at_target", "gates.target_sparsity=0.5")
    assert {job.gates.target_sparsity for job in other} == {0.5}


def test_the_lambda_study(jobs: Jobs) -> None:
    assert [job.gates.lambda_max for job in jobs("-m", "study=lambda")] == [0.01, 0.015, 0.02]


def test_two_commands_train_and_prune_both_families(composed: CommandLine) -> None:
    """Three dense models per seed; of two of them a pruned one beside them, in one W&B group."""
    models = ["small", "small_transformer_xl", "small_transformer_xl_narrow"]
    dense = composed("train", "-m", "study=architectures_dense", "experiment=small", "seed=1,2")
    assert dense.status == 0, dense.err
    places = {(job.name, job.seed) for job in dense.seen}
    assert places == {
        (f"architectures/model-{model}+seed-{seed}", seed) for model in models for seed in (1, 2)
    }
    pruned = composed("prune", "-m", "study=architectures", "experiment=small", "seed=1,2")
    assert pruned.status == 0, pruned.err
    assert {(job.checkpoint, job.seed) for job in pruned.seen} == {
        (f"runs/{name}/checkpoints/last.ckpt", seed) for name, seed in places if "narrow" not in name
    }
    assert len({job.name for job in [*dense.seen, *pruned.seen]}) == 10
    assert {job.logger.group for job in [*dense.seen, *pruned.seen]} == {"architectures"}
    assert not any("$" in job.name for job in pruned.seen)


def test_the_selection_study_keeps_one_sparsity(jobs: Jobs) -> None:
    seen = jobs("-m", "study=selection", "gates.target_sparsity=0.5")
    selections = ["l0", "iterative", "gradient", "magnitude", "random"]
    assert [job.gates.selection.value for job in seen] == selections
    assert {job.gates.target_sparsity for job in seen} == {0.5}
    assert len({job.last_step for job in seen}) == 1, "as many updates by each"


def test_a_study_keeps_a_group_and_a_name_that_were_given(jobs: Jobs) -> None:
    seen = jobs("-m", "study=lambda", "name=mine", "logger.group=other")
    assert {job.logger.group for job in seen} == {"other"}
    assert seen[0].name == "mine/gates.lambda_max-0.01"


@pytest.mark.parametrize("swept", ["data.minimum_count=1,2", "trainer.precision=32-true,bf16-mixed"])
def test_jobs_of_any_sweep_have_folders_of_their_own(jobs: Jobs, swept: str) -> None:
    assert len({job.name for job in jobs("-m", swept)}) == 2


@pytest.mark.parametrize("arguments", [("study=ablation",), ("-m", "study=ablation,lambda")])
def test_a_study_that_would_not_be_swept_is_refused(
    composed: CommandLine, arguments: tuple[str, ...]
) -> None:
    """One job of the full method would run under the study's name."""
    done = composed("prune", *arguments, "checkpoint=last.ckpt")
    assert (done.status, done.seen) == (2, [])
    assert "study=ablation" in done.err


def test_every_failed_job_is_reported_and_the_others_run(command_line: CommandLine) -> None:
    """Hydra itself raises the first job's error alone, after the last job."""
    errors = {2: InputError("two"), 3: OSError("three"), 4: RuntimeError("four"), 5: InputError("five")}
    finished = []

    def job(settings: PruneSettings) -> None:
        if settings.seed in errors:
            raise errors[settings.seed]
        finished.append(settings.seed)

    done = command_line("prune", "-m", "seed=1,2,3,4,5,6", "checkpoint=a", do=job)
    assert done.status == 1, "one of them is a fault of the program"
    assert finished == [1, 6]
    for words in ("error: two\n", "error: three\n", "RuntimeError: four\n", "error: five\n"):
        assert words in done.err


def test_a_multirun_leaves_nothing_where_it_is_started(jobs: Jobs, tmp_path: Path) -> None:
    jobs("-m", "study=lambda", "runs_folder=elsewhere")
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere"}


def test_the_order_of_the_command_line_does_not_name_a_job(jobs: Jobs) -> None:
    one, other = ("seed=1,2", "gates.lambda_max=0.01,0.02"), ("gates.lambda_max=0.01,0.02", "seed=1,2")
    assert {job.name for job in jobs("-m", *one)} == {job.name for job in jobs("-m", *other)}


def test_what_is_given_once_does_not_name_a_job(jobs: Jobs) -> None:
    found = jobs("-m", "seed=1,2", "gates.lambda_max=range(1,3)", "gates.freeze_step=5000")
    assert {job.name for job in found} == {
        f"wikitext103-pruned/gates.lambda_max-{x}+seed-{seed}" for x in (1, 2) for seed in (1, 2)
    }


def test_the_wandb_sweep_file_makes_commands_that_prune_understands() -> None:
    """Filled in by the client's own functions, as its agent does."""
    sweep = yaml.safe_load((CONF / "wandb_sweep" / "lambda.yaml").read_text())
    assert sweep["method"] == "grid"
    assert sweep["metric"]["name"] == "pruned/test/perplexity"
    chosen = {
        name: {"value": p.get("value", p.get("values", [None])[-1])}
        for name, p in sweep["parameters"].items()
    }
    filled = create_sweep_command_args({"args": chosen})
    command = [
        part
        for piece in create_sweep_command(sweep["command"])
        for part in (filled.get(piece[2:-1], [piece]) if piece.startswith("${") else [piece])
    ]
    assert command[:3] == ["${env}", "${interpreter}", "${program}"]
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = prune_settings(compose("prune", command[3:]))
    assert settings.gates.lambda_max == 0.03
    assert settings.seed == 3
    assert settings.name == "lambda-sweep/lambda-0.03+seed-3"
    assert settings.checkpoint == "runs/wikitext103/checkpoints/last.ckpt"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["-m", "study=ablation", "gates.lambda_warmup_steps=30"],
            ["ablation=no_lambda_warmup means gates.lambda_warmup_steps=0", "gates.lambda_warmup_steps=30"],
        ),
        (["ablation=no_lambda_warmup", "gates.lambda_warmup_steps=30"], ["ablation=no_lambda_warmup", "=30"]),
        (
            ["ablation=no_positive_init", "gates.output_scaling=false"],
            ["ablation=no_positive_init has output scaling", "gates.output_scaling=False"],
        ),
        (["gates.initial_pi=-1"], ["ablation=all_three has positive initialization", "gates.initial_pi=-1"]),
        (
            ["-m", "gates.lambda_warmup_steps=0,4000", "seed=1,2"],
            ["ablation=all_three has lambda warm-up", "gates.lambda_warmup_steps=0"],
        ),
        (
            ["-m", "study=ablation", "gates.selection=random", "gates.target_sparsity=0.5"],
            ["ablation=no_lambda_warmup", "gates.selection=random"],
        ),
        (["-m", "study=lambda", "gates.lambda_max=0.5"], ["study=lambda sweeps gates.lambda_max"]),
        (["-m", "study=ablation", "ablation=all_three"], ["study=ablation sweeps ablation"]),
        (["-m", "study=selection", "gates.selection=l0"], ["study=selection sweeps gates.selection"]),
        (["-m", "study=lambda", "gates.target_sparsity=0.5"], ["study=lambda", "gates.target_sparsity=0.5"]),
        (
            ["-m", "study=selection", "gates.target_sparsity=0.5", "ablation=no_positive_init"],
            ["ablation=no_positive_init", "gates.selection=iterative"],
        ),
    ],
)
def test_labels_that_the_settings_contradict_are_refused(
    composed: CommandLine, arguments: list[str], named: list[str]
) -> None:
    done = composed("prune", *arguments, "checkpoint=last.ckpt")
    assert (done.status, done.seen) == (2, []), "refused before the first job"
    assert all(part in done.err for part in named), done.err


def test_a_label_that_an_experiment_contradicts_is_refused(composed: CommandLine, tmp_path: Path) -> None:
    """No setting was typed: the composed values are looked at."""
    (tmp_path / "own" / "experiment" / "prune").mkdir(parents=True)
    for folder in ("experiment", "experiment/prune"):
        copied = (CONF / folder / "demo.yaml").read_text()
        (tmp_path / "own" / folder / "mine.yaml").write_text(copied)
    stage = tmp_path / "own" / "experiment" / "prune" / "mine.yaml"
    stage.write_text(stage.read_text().replace("lambda_max: 0.1", "initial_pi: 0.0"))
    mine = ("--config-dir=own", "experiment=mine", "checkpoint=last.ckpt")
    done = composed("prune", *mine)
    assert (done.status, done.seen) == (2, [])
    assert "ablation=all_three has positive initialization" in done.err
    assert composed("prune", *mine, "ablation=no_positive_init").status == 0


def test_an_ablation_of_ones_own_fixes_what_its_file_says(composed: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "own" / "ablation").mkdir(parents=True)
    label = "# @package _global_\nablation: sharp\ngates:\n  beta: 0.1\n"
    (tmp_path / "own" / "ablation" / "sharp.yaml").write_text(label)
    arguments = ("--config-dir=own", "ablation=sharp", "checkpoint=last.ckpt")
    assert composed("prune", *arguments).seen[0].ablation == "sharp"
    done = composed("prune", *arguments, "gates.beta=0.2")
    assert (done.status, done.seen) == (2, [])
    assert "ablation=sharp means gates.beta=0.1, but the settings say gates.beta=0.2" in done.err
