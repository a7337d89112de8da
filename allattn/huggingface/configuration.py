"""An export's config.json as transformers reads and writes it."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from allattn.errors import InputError
from allattn.model.config import ModelConfig, model_config_from_dict
from allattn.training.exports import EXPORT_VERSION, MODEL_TYPE, check_export_config

WIKITEXT_103 = 267_735  # words


class CodeInFolderError(RuntimeError):
    """A tokenizer_config.json names code to run. No ValueError: AutoTokenizer would go on and run it."""


class AllAttentionConfig(PreTrainedConfig):
    """Sizes of a model, dense or cut. Names that transformers knows are read from them and are not settings.

    Args:
        model: the sizes, as `ModelConfig.to_dict` gives them; None = those of the paper on WikiText-103.
        format_version: of the export.
        tokenizer_hash: of the vocabulary; empty where there is none yet.

    Raises:
        InputError: they contradict each other, are of another format, or an entry names code to run.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    model: dict[str, Any] | None = None
    format_version: int = EXPORT_VERSION
    tokenizer_hash: str = ""
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Check what the fields say; `kwargs` are the entries that are none."""
        if self.model is None:
            self.model = ModelConfig(vocabulary_size=WIKITEXT_103).to_dict()
        own = {name: getattr(self, name) for name in ("model", "format_version", "tokenizer_hash")}
        sizes = check_export_config({**kwargs, **own}, "config.json")
        if self.format_version != EXPORT_VERSION:
            raise InputError(
                f"config.json: is of export format {self.format_version}, which allattn.load reads and "
                "transformers does not: allattn export checkpoint=FOLDER folder=NEW writes today's"
            )
        derived = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        said = {name: kwargs.pop(name) for name in derived if name in kwargs}
        super().__post_init__(**kwargs)
        for name, value in said.items():
            if value != getattr(self, name):
                raise InputError(f"config.json: {name}={value} contradicts model={sizes.to_dict()}")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of a config.json; whoever reads one of a folder with a tokenizer reads it first.

        Raises:
            CodeInFolderError: the tokenizer_config.json beside it names code to run.
        """
        if (place := kwargs.get("name_or_path")) is not None:
            revision = config_dict.get("_commit_hash") or kwargs.get("revision")
            if get_tokenizer_config(place, revision=revision).get("auto_map"):
                raise CodeInFolderError(
                    f"{place}: tokenizer_config.json names code to run (auto_map), which no export of "
                    "allattn does: remove it"
                )
        return super().from_dict(config_dict, **kwargs)

    @property
    def sizes(self) -> ModelConfig:
        """The sizes, checked."""
        assert self.model is not None
        return model_config_from_dict(self.model)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.sizes.band_ends[-1]

    @property
    def hidden_size(self) -> int:
        """d."""
        return self.sizes.width

    @property
    def num_hidden_layers(self) -> int:
        """L."""
        return self.sizes.layers

    @property
    def num_attention_heads(self) -> int:
        """H, the heads of a layer before any removal."""
        return self.sizes.heads

    def to_diff_dict(self) -> dict[str, Any]:
        """All entries but the model's place: what reads it without transformers knows no defaults."""
        values: dict[str, Any] = self.to_dict()
        return {name: value for name, value in values.items() if name != "_name_or_path"}
