"""Read, check and encode a text before any run needs it: allattn prepare [data=wikitext103]."""

from allattn.commands.run_command import Command
from allattn.data.corpus import Corpus, prepare
from allattn.settings import PrepareSettings, prepare_settings


def prepare_text(settings: PrepareSettings) -> Corpus:
    """Encode the text, or find it encoded, and print its counts and what identifies it.

    Raises:
        InputError: the text is missing or is not the published one, or there is no place for the ids.
    """
    corpus = prepare(settings.data, settings.progress)
    for name, split in corpus.splits.items():
        print(f"{name}: {split.tokens:,} tokens")
    print(f"vocabulary: {corpus.vocabulary_size:,} entries, {corpus.tokenizer_hash}")
    print(f"text: {corpus.fingerprint}")
    return corpus


COMMAND = Command("prepare", PrepareSettings, prepare_text, prepare_settings, in_files=True)
