"""Compare finished pruning runs in local folders: python -m allattn.compare [runs=FOLDER]."""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from allattn.command import register_command, run_command
from allattn.errors import InputError
from allattn.report.compare import compare, markdown, read_runs


@dataclass
class CompareSettings:
    """Settings of the command."""

    runs: list[str] = field(default_factory=lambda: ["runs"])  # folders; runs are looked for below them


def main(config: DictConfig) -> None:
    """Print the table; name what was left out.

    Raises:
        InputError: there is nothing to compare, or runs that do not belong into one ranking.
    """
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, CompareSettings)
    runs, unfinished = read_runs(Path(folder).expanduser() for folder in settings.runs)
    for folder in unfinished:
        print(f"without a readable result, left out: {folder}")
    if not runs:
        raise InputError(f"no finished pruning run below {', '.join(settings.runs)}")
    if len({run.comparable for run in runs}) > 1:
        raise InputError(
            "the runs differ in text, vocabulary or tokens scored, so their perplexities do not compare: "
            "give runs=[FOLDER,...] of one text"
        )
    seen: dict[tuple[str, int], Path] = {}
    for run in runs:
        if (run.variant, run.seed) in seen:
            raise InputError(
                f"{seen[run.variant, run.seed]} and {run.folder} are both {run.variant} with seed {run.seed} "
                "and differ in other settings: give runs=[FOLDER,...] of one study"
            )
        seen[run.variant, run.seed] = run.folder
    print(markdown(compare(runs)))


if __name__ == "__main__":
    run_command(main, register_command("compare", CompareSettings), None, CompareSettings)
