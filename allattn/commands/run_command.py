"""What every command shares: compose the settings with Hydra, run, and turn bad input into one line."""

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from allattn.errors import InputError, Interrupted
from allattn.training.signals import hand_on

BAD_INPUT = 2  # exit status


def run_command(
    job: Callable[[DictConfig], Any], config_name: str, config_path: Path | None, schema: type
) -> None:
    """Run `job` with the composed configuration; in a multirun once per combination.

    Exit status: 0, 2 for bad input, 128 + signal for an interrupted run that was saved.

    Args:
        job: what to do.
        config_name: the primary configuration.
        config_path: folder of the YAML files; None where the schema alone is the configuration.
        schema: its dataclass; a mistyped key is answered with the nearest right one.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on instead of printing its own report

    def guarded(config: DictConfig) -> Any:
        try:
            refuse_unknown(config, schema)
            if "name" in config:
                name_job(config, swept)
            return job(config)
        except Interrupted as error:
            print(error, file=sys.stderr, flush=True)
            hand_on(error.number)
            raise SystemExit(128 + error.number) from None
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                _report(error, schema)  # Hydra runs the other jobs, then raises the first job's error alone
            elif isinstance(error, InputError):
                _leave(error, schema)  # past Hydra, which would print a line of its own
            raise

    path = str(config_path) if config_path else None
    try:
        swept = swept_settings(sys.argv[1:])  # here, as a job on a cluster has another command line
        hydra.main(version_base="1.3", config_path=path, config_name=config_name)(guarded)()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, InputError, OSError) as error:
        _leave(error, schema)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def register_command(name: str, schema: type) -> str:
    """Make a command without YAML files known to Hydra; it writes nothing on its own. Its name."""
    store = ConfigStore.instance()
    store.store(f"{name}_settings", schema)
    defaults = [f"{name}_settings", {"override hydra/job_logging": "stdout"}, "_self_"]
    store.store(name, {"defaults": defaults, "hydra": {"run": {"dir": "."}, "output_subdir": None}})
    return name


def swept_settings(arguments: list[str]) -> set[str]:
    """Names of the settings that a command line gives several values for."""
    overrides = [a for a in arguments if "=" in a and not a.startswith("-")]
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException:
        return set()  # Hydra is about to refuse it itself
    return {override.get_key_element() for override in parsed if override.is_sweep_override()}


def name_job(config: DictConfig, swept: set[str]) -> None:
    """In a multirun, give each job a folder named by its own values, and all of them one W&B group.

    Args:
        config: of the job; `name` and `logger.group` are changed.
        swept: settings with several values on the command line; those of a study are Hydra's to know.

    Raises:
        InputError: a study is named but not swept: without -m, or as one of several.
    """
    if not HydraConfig.initialized():
        return
    hydra_config = HydraConfig.get()
    given = [override.split("=")[0] for override in hydra_config.overrides.task]
    of_study = set(hydra_config.sweeper.params or {})
    if not of_study <= set(given):
        raise InputError(
            f"study={hydra_config.runtime.choices['study']} would run one job under the study's name: "
            "give -m, and one study"
        )
    if hydra_config.mode != RunMode.MULTIRUN:
        return
    own = [o for o, name in zip(hydra_config.overrides.task, given, strict=True) if name in swept | of_study]
    own.sort()  # in whatever order they were typed: a finished job is found again
    if config.logger.group is None:
        config.logger.group = config.name
    # In these characters alone, a path needs no quotes when it comes back as checkpoint=PATH.
    folder = "+".join(re.sub(r"[^\w.+-]+", "-", override) for override in own)
    config.name = f"{config.name}/{folder or 'only'}"


def _leave(error: Exception, schema: type) -> None:
    _report(error, schema)
    raise SystemExit(BAD_INPUT) from None


def _report(error: Exception, schema: type) -> None:
    """One line where the user can mend it, else where the program went wrong."""
    if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
        print(f"error: {explain(error, schema)}", file=sys.stderr)
    elif isinstance(error, InputError | OSError):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def refuse_unknown(config: DictConfig, schema: type) -> None:
    """Hydra lets `+key=value` add what no dataclass has; nothing would ever read it.

    Raises:
        InputError: a setting is not one of the schema's; the nearest one is named.
    """
    known = set(setting_names(schema))
    for name in _leaves(config):
        if name not in known:
            raise InputError(_no_such_setting(name, schema))


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        name = f"{prefix}{key!s}"
        inner = None if OmegaConf.is_missing(config, key) else config[key]
        if isinstance(inner, DictConfig):
            yield from _leaves(inner, f"{name}.")
        else:
            yield name


def explain(error: Exception, schema: type) -> str:
    """One line about a configuration error, with the nearest setting where a key is unknown."""
    lines = [line.strip() for cause in _causes(error) for line in str(cause).splitlines()]
    text = "; ".join(dict.fromkeys(line for line in lines if line and not _is_noise(line)))
    unknown = re.search(r"[Kk]ey '([\w.]+)' (?:is )?not in", text)
    if unknown is None:
        return text
    override = re.search(r"Could not (?:override|append to config\.?|.*?) '?\+*([\w.]+)'?", text)
    return _no_such_setting(override.group(1) if override else unknown.group(1), schema)


def _no_such_setting(wanted: str, schema: type) -> str:
    names = setting_names(schema)
    last = {name.rsplit(".", 1)[-1]: name for name in names}
    near = difflib.get_close_matches(wanted, names, 1, 0.7)
    near = near or [last[key] for key in difflib.get_close_matches(wanted.rsplit(".", 1)[-1], last, 1, 0.5)]
    return f"there is no setting {wanted}" + (f"; did you mean {near[0]}?" if near else "")


def _causes(error: BaseException | None) -> list[BaseException]:
    return [] if error is None else [error, *_causes(error.__cause__)]


def _is_noise(line: str) -> bool:
    return line.startswith(("object_type=", "full_key:", "To append to your config", "reference_type="))


def setting_names(schema: type, prefix: str = "") -> list[str]:
    """Dotted names of all settings of a dataclass."""
    names = []
    for entry in fields(schema):
        name = f"{prefix}{entry.name}"
        inner = entry.type
        if isinstance(inner, type) and is_dataclass(inner):
            names += setting_names(inner, f"{name}.")
        else:
            names.append(name)
    return names
