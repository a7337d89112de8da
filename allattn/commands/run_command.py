"""What every command shares: compose the settings with Hydra, run, and turn bad input into one line."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from allattn.commands.choices import check_choices, groups_of
from allattn.commands.labels import check_labels, check_typed_labels
from allattn.commands.mistakes import explain, refuse_missing, refuse_unknown, setting_kinds
from allattn.commands.overrides import flags_first, is_multirun, parsed, with_quoted_home
from allattn.commands.paths import expand_home
from allattn.commands.streams import end_output, make_output_last
from allattn.errors import InputError, Interrupted
from allattn.settings import register
from allattn.training.signals import hand_on

BAD_INPUT, FAULT = 2, 1  # exit status
_OF_SETTINGS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
_ANSWERED = (*_OF_SETTINGS, InputError, OSError)  # in one line, for the user to mend
CONF = Path(__file__).parents[1] / "conf"  # of a checkout, a link to the one at its top


@dataclass(frozen=True)
class Command:
    """One command: its settings, and what it does with them."""

    name: str
    schema: type  # dataclass of its settings
    do: Callable[[Any], Any]  # takes what `typed` gives
    typed: Callable[[DictConfig], Any] = OmegaConf.to_object  # from the composed settings to checked ones
    in_files: bool = False  # conf/NAME.yaml and its groups give the values; else the schema's are all
    respelled: Callable[[list[str]], list[str]] = list  # from its own ways to type a setting to Hydra's


def run_command(command: Command, arguments: Sequence[str]) -> None:
    """Run a command with the settings of a command line; in a multirun once per combination.

    Exit status: 0, 2 for bad input, 1 where the program went wrong or the output was lost, 128 + signal for
    an interrupted run that was saved. In a multirun every job runs, whatever becomes of the others.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on instead of printing its own report
    make_output_last()
    for name in ("httpx", "httpx2"):  # they log a line for each file of the hub, among the results
        logging.getLogger(name).setLevel(logging.WARNING)
    as_typed = sys.argv
    reported: list[Exception] = []

    def job(config: DictConfig) -> Any:
        here = sys.argv is for_hydra  # not in a job on a cluster
        if here:
            sys.argv = as_typed  # by which Lightning starts a run's other processes
        try:
            refuse_unknown(config, command.schema)
            refuse_missing(config, command.name)
            expand_home(config)
            check_labels(config)
            if "name" in config:
                own = name_job(config, swept)
                if here and own is not None:
                    script = as_typed[: len(as_typed) - len(arguments)]
                    sys.argv = [*script, *alone(arguments, swept, own, config)]
            return command.do(command.typed(config))
        except Interrupted as error:
            print(error, file=sys.stderr, flush=True)
            hand_on(error.number)
            raise SystemExit(128 + error.number) from None
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                _report(error, command.schema)
                reported.append(error)
                if here:
                    return None  # the other jobs run, and Hydra has nothing to add in its own words
            elif isinstance(error, InputError | OmegaConfBaseException):
                _leave(error, command.schema)  # past Hydra, which would print a line of its own
            raise
        finally:
            if here:
                sys.argv = for_hydra

    try:
        _refuse_lost_folder()
        words = [word.rstrip("\r") for word in arguments]  # of a script with Windows' line ends
        words = flags_first(with_quoted_home(command.respelled(words)))
        kinds = setting_kinds(command.schema)
        overrides = parsed(words, kinds)
        groups = groups_of(CONF / f"{command.name}.yaml") if command.in_files else set()
        check_choices(overrides, kinds, groups, CONF)
        check_typed_labels(overrides, is_multirun(words), CONF)
        # Noted here, as a job on a cluster has another command line.
        swept = {override.get_key_element() for override in overrides if override.is_sweep_override()}
        for_hydra = [f"allattn {command.name}", *words]
        sys.argv = for_hydra
        path = _register(command)
        hydra.main(version_base="1.3", config_path=path, config_name=command.name)(job)()
        if reported:
            raise SystemExit(BAD_INPUT if all(isinstance(error, _ANSWERED) for error in reported) else FAULT)
    except SystemExit as end:
        if not end.code:  # --help
            end_output()
        raise
    except _ANSWERED as error:
        if any(error is earlier for earlier in reported):
            raise SystemExit(BAD_INPUT) from None
        _leave(error, command.schema)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        sys.argv = as_typed
    end_output()


def _refuse_lost_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InputError("the current folder has been deleted: go to another one (cd)") from None


def _register(command: Command) -> str | None:
    """Make a command's settings known to Hydra; the folder of its YAML files, if it has any."""
    if command.in_files:
        register()
        return str(CONF)
    store = ConfigStore.instance()
    store.store(f"{command.name}_settings", command.schema)
    defaults = [f"{command.name}_settings", {"override hydra/job_logging": "stdout"}, "_self_"]
    writes_nothing = {"job": {"name": command.name}, "run": {"dir": "."}, "output_subdir": None}
    store.store(command.name, {"defaults": defaults, "hydra": writes_nothing})
    return None


def name_job(config: DictConfig, swept: set[str]) -> list[str] | None:
    """In a multirun, give each job a folder named by its own values, and all of them one W&B group.

    Args:
        config: of the job; `name` and `logger.group` are changed.
        swept: settings with several values on the command line; those of a study are Hydra's to know.

    Returns:
        The job's own values, as overrides; None where there is one job.

    Raises:
        InputError: a study is named but not swept: without -m, or as one of several.
    """
    if not HydraConfig.initialized():
        return None
    hydra_config = HydraConfig.get()
    given = [override.split("=")[0] for override in hydra_config.overrides.task]
    of_study = set(hydra_config.sweeper.params or {})
    if not of_study <= set(given):
        raise InputError(
            f"study={hydra_config.runtime.choices['study']} would run one job under the study's name: "
            "give -m, and one study"
        )
    if hydra_config.mode != RunMode.MULTIRUN:
        return None
    own = [o for o, name in zip(hydra_config.overrides.task, given, strict=True) if name in swept | of_study]
    own.sort()  # in whatever order they were typed: a finished job is found again
    if config.logger.group is None:
        config.logger.group = os.environ.get("WANDB_RUN_GROUP") or config.name
    os.environ.pop("WANDB_RUN_ID", None)  # of one run, and these are several
    # In these characters alone, a path needs no quotes when it comes back as checkpoint=PATH.
    folder = "+".join(re.sub(r"[^\w.+-]+", "-", override) for override in own)
    config.name = f"{config.name}/{folder or 'only'}"
    return own


def alone(arguments: Sequence[str], swept: set[str], own: list[str], config: DictConfig) -> list[str]:
    """The arguments that run one job of a multirun by itself: its other processes are started with them.

    With those of the whole multirun, they would begin with its first job.

    Args:
        arguments: of the multirun.
        swept: settings with several values among them.
        own: the job's values, as overrides.
        config: of the job, named.
    """
    shared = [a for a in arguments if a not in ("-m", "--multirun") and a.split("=")[0] not in swept]
    named = [f"name='{config.name}'", f"logger.group='{config.logger.group}'"]
    return [*shared, *own, *named]


def _leave(error: Exception, schema: type) -> None:
    _report(error, schema)
    raise SystemExit(BAD_INPUT) from None


def _report(error: Exception, schema: type) -> None:
    """One line where the user can mend it, else where the program went wrong."""
    if isinstance(error, _OF_SETTINGS):
        print(f"error: {explain(error, schema)}", file=sys.stderr)
    elif isinstance(error, InputError | OSError):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
