import pytest
from omegaconf import OmegaConf

from allattn.data.config import DataConfig, Source, check_data
from allattn.errors import InputError


def test_works_as_a_structured_config() -> None:
    config = OmegaConf.merge(OmegaConf.structured(DataConfig), {"source": "wikitext103", "minimum_count": 3})
    assert config.source is Source.wikitext103
    assert config.minimum_count == 3


def test_accepts() -> None:
    for config in (
        DataConfig(),
        DataConfig(source=Source.files, folder="somewhere", minimum_count=2),
        DataConfig(source=Source.files, train_file="a", valid_file="b", test_file="c"),
        DataConfig(source=Source.wikitext103_raw, tokenizer="bpe", vocabulary_size=1000),
        DataConfig(tokenizer="some/tokenizer.json"),
    ):
        check_data(config)


def test_refuses_naming_the_settings() -> None:
    refused = [
        (DataConfig(folder="x"), ["data.folder=x", "data.source=pydoc"]),
        (DataConfig(source=Source.wikitext2, test_file="x"), ["data.test_file=x", "data.source=wikitext2"]),
        (DataConfig(source=Source.files), ["data.source=files", "data.folder"]),
        (DataConfig(source=Source.files, train_file="a"), ["data.train_file", "data.test_file"]),
        (DataConfig(source=Source.files, folder="x", valid_file="a"), ["data.folder", "data.valid_file"]),
        (DataConfig(source=Source.wikitext103_raw), ["data.tokenizer=word", "wikitext103_raw", "<unk>"]),
        (DataConfig(tokenizer="bpe"), ["data.vocabulary_size, a number", "data.tokenizer=bpe"]),
        (DataConfig(tokenizer="bpe", vocabulary_size=256), ["data.vocabulary_size=256", "257"]),
        (DataConfig(vocabulary_size=300), ["data.vocabulary_size=300", "data.tokenizer=word"]),
        (DataConfig(minimum_count=0), ["data.minimum_count=0"]),
        (
            DataConfig(tokenizer="bpe", vocabulary_size=300, minimum_count=2),
            ["data.minimum_count=2", "data.tokenizer=bpe"],
        ),
        (DataConfig(tokenizer=""), ["data.tokenizer"]),
    ]
    for config, named in refused:
        with pytest.raises(InputError) as caught:
            check_data(config)
        message = str(caught.value)
        assert "\n" not in message
        assert all(part in message for part in named), (named, message)


def test_what_the_experiment_set_is_not_blamed_on_the_user() -> None:
    """The demo's text counts words; whoever asks for bpe gave neither of these settings."""
    with pytest.raises(InputError, match=r"^data.tokenizer=bpe needs data.vocabulary_size"):
        check_data(DataConfig(tokenizer="bpe", minimum_count=2))
    with pytest.raises(InputError, match=r"the experiment's.*give data.minimum_count=1$"):
        check_data(DataConfig(tokenizer="bpe", vocabulary_size=300, minimum_count=2))
