"""`~` in the settings that are paths."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from allattn.files import user_path

PATHS = (  # of all commands
    "against",
    "articles",
    "checkpoint",
    "data.cache_folder",
    "data.folder",
    "data.test_file",
    "data.tokenizer",
    "data.train_file",
    "data.valid_file",
    "file",
    "folder",
    "picture",
    "pruned",
    "runs",
    "runs_folder",
    "tasks",
)


def expand_home(config: DictConfig) -> None:
    """Put the home folder in the place of a leading `~`, wherever the value was given.

    Raises:
        InputError: names the setting for which no home folder is known.
    """
    for name in PATHS:
        value: Any = OmegaConf.select(config, name)
        if isinstance(value, str) and value.startswith("~"):
            OmegaConf.update(config, name, _expanded(name, value))
        elif OmegaConf.is_list(value):
            OmegaConf.update(config, name, [_expanded(name, one) for one in value])


def _expanded(name: str, path: str) -> str:
    return str(user_path(name, path)) if path.startswith("~") else path
