"""Which of W&B's environment variables a run obeys; docs/wandb-variables.md shows the same table.

A variable counts where it is the user's wish for this run, and is kept out where it would join runs that are
not one, or would let W&B state what this run did not use.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum

from allattn.errors import InputError
from allattn.training.config import LoggerConfig, WandbMode

PROJECT = "allattn"  # where neither a setting nor a variable names one
LONGEST_TAG, LONGEST_NAME = 64, 128  # characters that W&B takes of a tag, and of a project or group
_NOT_IN_A_PROJECT = "/\\#?%:"


class Rule(Enum):
    """What becomes of a variable."""

    setting = "a setting's default"  # where the setting is not given
    client = "left to W&B's client"
    agent = "obeyed in the one run of a W&B agent"  # else kept out
    kept_out = "kept out"


RULES: dict[str, tuple[Rule, str]] = {
    "WANDB_PROJECT": (Rule.setting, "logger.project; allattn where neither is given"),
    "WANDB_ENTITY": (Rule.setting, "logger.entity"),
    "WANDB_RUN_GROUP": (Rule.setting, "logger.group; in a multirun in the place of the name"),
    "WANDB_TAGS": (Rule.setting, "added to logger.tags"),
    "WANDB_MODE": (Rule.setting, "online, offline or disabled; logger=online is refused beside offline"),
    "WANDB_DIR": (Rule.setting, "where W&B's records go instead of the run folder"),
    "WANDB_API_KEY": (Rule.client, "the login"),
    "WANDB_IDENTITY_TOKEN_FILE": (Rule.client, "the login"),
    "WANDB_CREDENTIALS_FILE": (Rule.client, "the login"),
    "WANDB_BASE_URL": (Rule.client, "the server"),
    "WANDB_APP_URL": (Rule.client, "the server"),
    "WANDB_ORGANIZATION": (Rule.client, "whose registry"),
    "WANDB_USERNAME": (Rule.client, "who"),
    "WANDB_USER_EMAIL": (Rule.client, "who"),
    "WANDB_ANONYMOUS": (Rule.client, "who"),
    "WANDB_NOTES": (Rule.client, "the run's notes"),
    "WANDB_CACHE_DIR": (Rule.client, "a folder of the client"),
    "WANDB_CONFIG_DIR": (Rule.client, "a folder of the client"),
    "WANDB_DATA_DIR": (Rule.client, "a folder of the client"),
    "WANDB_ARTIFACT_DIR": (Rule.client, "where checkpoint=wandb:... is downloaded to"),
    "WANDB_ARTIFACT_FETCH_FILE_URL_BATCH_SIZE": (Rule.client, "downloads"),
    "WANDB_CONSOLE": (Rule.client, "whether the output is recorded"),
    "WANDB_IGNORE_GLOBS": (Rule.client, "files that are not put up"),
    "WANDB_SAVE_CODE": (Rule.client, "whether code is recorded"),
    "WANDB_DISABLE_CODE": (Rule.client, "whether code is recorded"),
    "WANDB_DISABLE_GIT": (Rule.client, "whether the commit is recorded"),
    "WANDB_GIT_ROOT": (Rule.client, "the commit"),
    "WANDB_GIT_COMMIT": (Rule.client, "the commit"),
    "WANDB_GIT_REMOTE_URL": (Rule.client, "the commit"),
    "WANDB_DOCKER": (Rule.client, "the image that is recorded"),
    "WANDB_HOST": (Rule.client, "the host that is recorded"),
    "WANDB_PROGRAM": (Rule.client, "the program that is recorded"),
    "WANDB_ARGS": (Rule.client, "the arguments that are recorded"),
    "WANDB_X_EXECUTABLE": (Rule.client, "the interpreter that is recorded"),
    "WANDB_NOTEBOOK_NAME": (Rule.client, "notebooks"),
    "WANDB_JUPYTER": (Rule.client, "notebooks"),
    "WANDB_HTTP_TIMEOUT": (Rule.client, "patience"),
    "WANDB_FILE_PUSHER_TIMEOUT": (Rule.client, "patience"),
    "WANDB_CRASH_NOSYNC_TIME": (Rule.client, "patience"),
    "WANDB_INSECURE_DISABLE_SSL": (Rule.client, "the connection"),
    "WANDB_SERVICE": (Rule.client, "the client's own process"),
    "WANDB_ERROR_REPORTING": (Rule.client, "whether the client reports its errors to W&B"),
    "WANDB_DEBUG": (Rule.client, "the client's own log"),
    "WANDB_CORE_DEBUG": (Rule.client, "the client's own log"),
    "WANDB_ENABLE_DCGM_PROFILING": (Rule.client, "measures of the GPU"),
    "WANDB_AGENT_REPORT_INTERVAL": (Rule.client, "the agent"),
    "WANDB_AGENT_KILL_DELAY": (Rule.client, "the agent"),
    "WANDB_AGENT_DISABLE_FLAPPING": (Rule.client, "the agent"),
    "WANDB_AGENT_MAX_INITIAL_FAILURES": (Rule.client, "the agent"),
    "WANDB_RUN_ID": (Rule.agent, "only beside WANDB_SWEEP_ID or WANDB_LAUNCH; else all runs would be one"),
    "WANDB_SWEEP_ID": (
        Rule.agent,
        "only beside WANDB_RUN_ID; not in a multirun: several runs",
    ),
    "WANDB_SWEEP_PARAM_PATH": (Rule.agent, "the sweep's values"),
    "WANDB_LAUNCH": (Rule.agent, "only beside WANDB_RUN_ID"),
    "WANDB_LAUNCH_CONFIG_PATH": (Rule.agent, "the job's values"),
    "WANDB_LAUNCH_QUEUE_NAME": (Rule.agent, "the queue"),
    "WANDB_LAUNCH_QUEUE_ENTITY": (Rule.agent, "the queue"),
    "WANDB_LAUNCH_TRACE_ID": (Rule.agent, "the queue"),
    "WANDB_NAME": (Rule.kept_out, "name= names the folder and the run"),
    "WANDB_JOB_TYPE": (Rule.kept_out, "the stage: pretrain or prune"),
    "WANDB_RESUME": (Rule.kept_out, "a run goes on by the id in its folder"),
    "WANDB_RESUME_FROM": (Rule.kept_out, "a run goes on by the id in its folder"),
    "WANDB_FORK_FROM": (Rule.kept_out, "a run begins with its own first step"),
    "WANDB_REINIT": (Rule.kept_out, "each job ends its own run"),
    "WANDB_RUN_STORAGE_ID": (Rule.kept_out, "another run's"),
    "WANDB_RUN_DIR": (Rule.kept_out, "another run's"),
    "WANDB_INITED": (Rule.kept_out, "another run's"),
    "WANDB_SHOW_RUN": (Rule.kept_out, "no browser is opened"),
    "WANDB_CONFIG_PATHS": (Rule.kept_out, "the recorded configuration is the one that was used"),
    "WANDB_DESCRIPTION": (Rule.kept_out, "an old name of WANDB_NOTES"),
    "WANDB_MAGIC": (Rule.kept_out, "only what metrics.csv has is recorded"),
    "WANDB_SILENT": (Rule.kept_out, "one line says where the run is"),
    "WANDB_QUIET": (Rule.kept_out, "one line says where the run is"),
    "WANDB_INIT_TIMEOUT": (Rule.kept_out, "30 seconds, then the run is recorded offline"),
}


def with_variables(config: LoggerConfig, given: Mapping[str, str]) -> LoggerConfig:
    """The logger settings with the environment's wishes where no setting was given.

    Raises:
        InputError: WANDB_MODE is no mode, or contradicts logger=online; or W&B is on and would not
            take a name, which it says only after the training where it is offline.
    """
    tags = [tag.strip() for tag in given.get("WANDB_TAGS", "").split(",")]
    asked = replace(
        config,
        wandb=_mode(config.wandb, given.get("WANDB_MODE") or "online"),
        project=config.project or given.get("WANDB_PROJECT") or PROJECT,
        entity=config.entity or given.get("WANDB_ENTITY") or None,
        group=config.group or given.get("WANDB_RUN_GROUP") or None,
        tags=list(dict.fromkeys([*config.tags, *filter(None, tags)])),
    )
    if asked.wandb is not WandbMode.none:
        _check_names(asked)
    return asked


def _check_names(config: LoggerConfig) -> None:
    for tag in config.tags:
        if not 1 <= len(tag) <= LONGEST_TAG:
            raise InputError(
                f"logger.tags (or WANDB_TAGS): W&B takes tags of 1 to {LONGEST_TAG} characters, and "
                f"{tag[:20]!r}... has {len(tag)}"
            )
    for name, value in (("project", config.project or ""), ("group", config.group or "")):
        if len(value) > LONGEST_NAME:
            variable = {"project": "WANDB_PROJECT", "group": "WANDB_RUN_GROUP"}[name]
            raise InputError(
                f"logger.{name} (or {variable}): W&B takes at most {LONGEST_NAME} characters, and "
                f"{value[:20]!r}... has {len(value)}"
            )
    if found := sorted(set(_NOT_IN_A_PROJECT) & set(config.project or "")):
        raise InputError(
            f"logger.project={config.project} (or WANDB_PROJECT): W&B takes no {' '.join(found)} in it"
        )


def agents_id(given: Mapping[str, str]) -> str | None:
    """The id of the one run for which a W&B agent started this command; None where none did."""
    by_agent = given.get("WANDB_SWEEP_ID") or given.get("WANDB_LAUNCH")
    return given.get("WANDB_RUN_ID") if by_agent else None


@contextmanager
def hidden(agents_run: bool) -> Iterator[None]:
    """Keep out of the environment, for W&B's client, what the run does not obey."""
    unheard = [Rule.kept_out] if agents_run else [Rule.kept_out, Rule.agent]
    names = [name for name, (rule, _) in RULES.items() if rule in unheard]
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _mode(wanted: WandbMode, asked: str) -> WandbMode:
    if asked in ("online", "run"):
        return wanted
    if asked == "disabled":
        return WandbMode.none
    if asked not in ("offline", "dryrun"):
        raise InputError(f"WANDB_MODE={asked}: must be online, offline or disabled")
    if wanted is WandbMode.online:
        raise InputError(f"logger=online contradicts WANDB_MODE={asked}: unset it, or use logger=offline")
    return WandbMode.offline if wanted is WandbMode.auto else wanted
