"""Text that a checkpoint writes on from a prompt: allattn generate checkpoint=PATH prompt="..."."""

import signal
import sys
from dataclasses import dataclass

from tokenizers import Tokenizer

from allattn.commands.opened import SavedSettings, open_saved
from allattn.commands.overrides import quoted
from allattn.commands.run_command import Command
from allattn.data.text_stream import TextStream
from allattn.data.vocabulary import (
    EOS,
    UNK,
    encode_subwords,
    encode_words,
    is_word_level,
    load_tokenizer,
    word_table,
)
from allattn.errors import InputError
from allattn.families import all_attention
from allattn.model.generation import generate_tokens
from allattn.model.sampling import check_sampling, sampler
from allattn.randomness import generator


@dataclass
class GenerateSettings(SavedSettings):
    """Settings of the command."""

    prompt: str = ""  # taken as it is; empty = the start of a line
    length: int = 100  # tokens to generate
    temperature: float = 1.0  # divides the log-probabilities; 0 = always the likeliest token
    top_k: int = 0  # choose among this many likeliest tokens; 0 = all
    top_p: float = 1.0  # choose among the fewest likeliest tokens whose probabilities reach this sum
    seed: int = 1
    memory_length: int | None = None  # positions before its own that a token sees; None = the model's


def generate(settings: GenerateSettings) -> str:
    """Print the prompt and what follows it as it comes; the whole text.

    Raises:
        InputError: a setting, the checkpoint or the prompt cannot be used.
    """
    check_settings(settings)
    opened = open_saved(settings.checkpoint, settings.device, settings.progress)
    model = all_attention(opened.model, "generate")
    tokenizer = load_tokenizer(opened.tokenizer())
    prompt = prompt_ids(settings.prompt, tokenizer)
    noise = generator(settings.seed, "generation")
    choose = sampler(settings.temperature, settings.top_k, settings.top_p, noise)
    stream, text = TextStream(tokenizer), ""

    def show(piece: str) -> None:
        nonlocal text
        text += piece
        print(piece, end="", flush=True)

    if settings.prompt:
        show("".join(map(stream.add, prompt)))
    for token in generate_tokens(model, prompt, settings.length, choose, settings.memory_length):
        show(stream.add(token))
    show(stream.end())
    print()
    return text


def check_settings(settings: GenerateSettings) -> None:
    """Refuse what cannot be generated with, before anything is loaded.

    Raises:
        InputError: names the setting.
    """
    for name in ("length", "memory_length"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise InputError(f"{name}={value}: must be at least 1")
    if settings.seed < 0:
        raise InputError(f"seed={settings.seed}: must not be negative")
    check_sampling(settings.temperature, settings.top_k, settings.top_p)


def prompt_ids(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a prompt, encoded as a text but with no `<eos>` after its last line; `<eos>` where it is empty.

    Words that the vocabulary lacks are counted on standard error.

    Raises:
        InputError: the prompt is not empty but has no token, or is not UTF-8.
    """
    if not prompt:
        eos = tokenizer.token_to_id(EOS)
        assert eos is not None
        return [eos]
    try:
        lines = f"{prompt}\n".encode()
    except UnicodeEncodeError:
        raise InputError("prompt: is not UTF-8; type it on a UTF-8 terminal") from None
    words = is_word_level(tokenizer)
    ids = encode_words(lines, word_table(tokenizer)).ids if words else encode_subwords(lines, tokenizer)
    tokens: list[int] = ids.tolist()[:-1]
    if not tokens:
        raise InputError(
            f'prompt="{prompt}": has no token of the vocabulary; give words, or prompt= for a line\'s start'
        )
    typed = prompt.replace("\n", " ").split(" ").count(UNK)
    unknown = sum(token == tokenizer.token_to_id(UNK) for token in tokens) - typed
    if unknown > 0:
        kind = "words" if words else "tokens"
        print(f"{unknown} of the prompt's {kind} are not in the vocabulary: read as {UNK}", file=sys.stderr)
    return tokens


def literal_prompt(arguments: list[str]) -> list[str]:
    """The command line with the prompt quoted, so that no character of it means anything to Hydra."""
    return [quoted(each) if each.startswith("prompt=") else each for each in arguments]


def _generate_for_a_reader(settings: GenerateSettings) -> str:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # one that has enough, as head, ends the command
    return generate(settings)


COMMAND = Command("generate", GenerateSettings, _generate_for_a_reader, respelled=literal_prompt)
