"""A causal language model of transformers and its tokenizer, from a folder. No code in it is run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from allattn.errors import InputError, first_line
from allattn.files import file_hash
from allattn.huggingface.foreign import ForeignModel
from allattn.pretrained.opening import free_memory
from allattn.training.foreign_settings import Dtype
from allattn.training.hub_models import gguf_file

_NO_CODE = {"trust_remote_code": False}


@dataclass(frozen=True)
class Foreign:
    """A model of others, opened."""

    folder: Path
    model: ForeignModel  # in evaluation mode, on its device
    tokenizer: Any  # of transformers

    def weights_hash(self) -> str:
        """SHA-256 of the files that hold the weights: what a measurement depends on."""
        gguf = gguf_file(self.folder)
        files = [gguf] if gguf else sorted(self.folder.glob("*.safetensors"))
        return sha256("".join(map(file_hash, files)).encode()).hexdigest()


def open_foreign(folder: Path, device: torch.device, dtype: Dtype, projection: str | None) -> Foreign:
    """Load a model and its tokenizer.

    Args:
        folder: see `is_foreign`.
        device: the model goes there.
        dtype: of its weights.
        projection: see `ForeignModel`.

    Raises:
        InputError: there is no causal language model, a file is missing or damaged, the architecture is
            unknown, or the weights are larger than the memory that is free.
    """
    gguf = gguf_file(folder)
    if gguf is None and not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder}: holds no weights, neither *.safetensors nor one .gguf file")
    source: dict[str, Any] = {"gguf_file": gguf.name} if gguf else {}
    with _naming(folder):
        config = AutoConfig.from_pretrained(folder, **source, **_NO_CODE)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise InputError(f"a {config.model_type} is no causal language model")
        kind = _kind(config, dtype)
        refuse_too_large(_sizes_only(config, projection), kind, device)
        options: dict[str, Any] = {"dtype": kind, "output_loading_info": True, **source, **_NO_CODE}
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise InputError(f"its weights lack {missing[0]}, so they are no whole {type(model).__name__}")
        tokenizer = AutoTokenizer.from_pretrained(folder, **source, **_NO_CODE)
        if len(tokenizer) > config.get_text_config().vocab_size:
            raise InputError(f"its tokenizer has {len(tokenizer)} tokens, more than the model knows")
    return Foreign(folder, ForeignModel(_on(model, device), projection), tokenizer)


def refuse_too_large(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a model whose weights do not fit into the memory that is free, here and on the device.

    Args:
        model: of any device, such as meta.
        dtype: that its weights will have.
        device: where they go.

    Raises:
        InputError: says how much is needed and free.
    """
    needed = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
    free = {"this machine": free_memory()}
    if device.type == "cuda":
        free[str(device)] = torch.cuda.mem_get_info(device)[0]
    for where, there in free.items():
        if there is not None and needed > there:
            raise InputError(
                f"its weights take {needed / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}, and "
                f"{where} has {there / 2**30:.1f} GiB free: give a smaller dtype, or take a smaller model"
            )


def _sizes_only(config: PreTrainedConfig, projection: str | None) -> PreTrainedModel:
    """The model on the device meta, its heads found."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **_NO_CODE)
    ForeignModel(model, projection)
    return model


def _kind(config: PreTrainedConfig, dtype: Dtype) -> torch.dtype:
    stored = getattr(config, "dtype", None) or torch.float32
    kind: torch.dtype = stored if dtype is Dtype.auto else getattr(torch, dtype.value)
    return kind


def _on(model: Any, device: torch.device) -> PreTrainedModel:
    try:
        moved: PreTrainedModel = model.to(device)
        return moved
    except RuntimeError as error:
        raise InputError(f"device={device}: does not take the model ({first_line(error)})") from None


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Whatever transformers meets in files of strangers is one line that names the folder."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    except Exception as error:
        raise InputError(f"{folder}: transformers cannot read it ({first_line(error)})") from None
    finally:
        if shown:
            logging.enable_progress_bar()
