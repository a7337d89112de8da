"""The figures of docs/huggingface.md: python tests/huggingface/figures.py

Largest differences over all kinds of made-up models, in 4 texts of 40 tokens, and the speed of generation
of a model of the sizes of `model=small` with 20,000 words and random weights.
"""

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import _random_model as random_model
from support.checkpoint_files import TOKENIZER, cut
from support.huggingface_fixtures import KINDS
from support.reference import random_ids
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import allattn.huggingface  # noqa: F401
from allattn.data.vocabulary import save_tokenizer, tokenizer_hash, word_tokenizer
from allattn.model.config import ModelConfig
from allattn.model.generation import generate_tokens
from allattn.model.language_model import AllAttentionLM
from allattn.model.sampling import sampler
from allattn.training.exports import load_export, write_export

ROUNDS, WRITTEN = 7, 200


def exported(model: AllAttentionLM, tokenizer: Tokenizer, folder: Path) -> Path:
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    write_export(
        model, {"tokenizer_hash": tokenizer_hash(tokenizer)}, folder / "tokenizer.json", folder / "OUT"
    )
    return folder / "OUT"


def word_by_word(model: AllAttentionLM, ids: Tensor) -> Tensor:
    memory, parts = model.empty_memory(len(ids)), []
    for column in ids.split(1, dim=1):
        found, memory = model.log_probs(column, memory)
        parts.append(found)
    return torch.cat(parts, dim=1)


@torch.no_grad()
def differences(folder: Path) -> dict[str, float]:
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), load_export(folder)
    ids = random_ids(4, 40, vocabulary=50)
    logits, expected = theirs(ids).logits, word_by_word(ours, ids)
    nats = -expected[:, :-1].gather(2, ids[:, 1:, None])
    mask = torch.ones_like(ids)
    for row, length in enumerate((3, 40, 12, 7)):
        mask[row, : 40 - length] = 0
    rows, apart = theirs(ids, attention_mask=mask).logits, []
    for row in range(4):
        real = mask[row].bool()
        apart.append((rows[row][real] - word_by_word(ours, ids[row][real].unsqueeze(0))[0]).abs().max())
    written = theirs.generate(ids[:1], max_new_tokens=100)[0, 40:].tolist()
    plain = theirs.generate(ids[:1], max_new_tokens=100, use_cache=False)[0, 40:].tolist()
    greedy = list(generate_tokens(ours, ids[0].tolist(), 100, sampler(0, 0, 1.0, torch.Generator())))
    unlike = sum(a != c or b != c for a, b, c in zip(written, plain, greedy, strict=True))
    return {
        "logits": float((logits - expected).abs().max()),
        "softmax of the logits, sum - 1": float((logits.exp().sum(-1) - 1).abs().max()),
        "loss": abs(float(theirs(ids, labels=ids).loss) - float(nats.mean())),
        "rows of a batch padded on the left": float(max(apart)),
        "greedy words unlike ours, of 100": float(unlike),
    }


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def speed(folder: Path) -> None:
    prompt = "w1 w2 w3 w4 w5"

    def first_token() -> None:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=1)

    first = statistics.median(seconds(first_token) for _ in range(ROUNDS))
    print(f"from_pretrained to the first token: {first:.2f} s, imports aside")
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), load_export(folder)
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    greedy = sampler(0, 0, 1.0, torch.Generator())
    pairs = []
    for _ in range(ROUNDS):  # in turn
        own = seconds(lambda: list(generate_tokens(ours, ids["input_ids"][0].tolist(), WRITTEN, greedy)))
        pairs.append((own, seconds(lambda: theirs.generate(**ids, max_new_tokens=WRITTEN))))
    own, other = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"allattn generate {WRITTEN / own:.0f} tokens/s, transformers {WRITTEN / other:.0f}: {ratio:.2f}x")


def main() -> None:
    """Print both."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    largest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for number, (sizes, heads) in enumerate(KINDS.values()):
            folder = Path(place) / str(number)
            folder.mkdir()
            model = random_model(torch.float32, **sizes)
            with torch.no_grad():
                for table in model.embedding.tables:
                    table *= 0.1  # log-probabilities of size 1 to 10
            model = model if heads is None else cut(model, heads)
            for name, value in differences(exported(model, TOKENIZER, folder)).items():
                largest[name] = max(largest.get(name, 0.0), value)
        for name, value in largest.items():
            print(f"{name}: {value:.1e}" if name[:6] != "greedy" else f"{name}: {value:.0f}")
        tokenizer = word_tokenizer(Counter({f"w{i}".encode(): 30_000 - i for i in range(20_000)}))
        size = {"layers": 4, "width": 192, "heads": 8, "persistent_vectors": 256, "memory_length": 64}
        small = ModelConfig(
            tokenizer.get_vocab_size(), **size, position_rows=256, cutoffs=[2000, 6000], div=2
        )
        (Path(place) / "small").mkdir()
        speed(exported(AllAttentionLM(small), tokenizer, Path(place) / "small"))


if __name__ == "__main__":
    main()
