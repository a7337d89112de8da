"""What result.json says of a run's text, models and scores. Nothing in it is typed by hand."""

from typing import Any

from allattn.data.corpus import Corpus
from allattn.model.counts import count_parameters, multiply_adds
from allattn.model.gated import GatedLM
from allattn.pruning.surgery import sparsity
from allattn.training.config import EvaluationConfig, EvaluationMode
from allattn.training.environment import device_name
from allattn.training.scoring import Score


def corpus_record(corpus: Corpus) -> dict[str, Any]:
    """Tokens of each split, vocabulary, what identifies both, and the words that the vocabulary lacks.

    An unseen word is one that no entry of the vocabulary stands for, so that it is read and scored as
    `<unk>`: it does not occur in the training text, or more rarely than data.minimum_count asks. The text's
    own word `<unk>`, which WikiText puts in place of rare words, is an entry, so it is not unseen. Byte-level
    BPE lacks no word; of another tokenizer with an unknown token, the tokens that are it are counted.
    """
    return {
        "tokens": {name: split.tokens for name, split in corpus.splits.items()},
        "vocabulary_size": corpus.vocabulary_size,
        "vocabulary_hash": corpus.tokenizer_hash,
        "data_fingerprint": corpus.fingerprint,
        "unseen_words": {
            name: {"count": len(split.unseen), "share": len(split.unseen) / split.tokens}
            for name, split in corpus.splits.items()
        },
    }


def model_record(model: GatedLM, scores: dict[str, Score], evaluation: EvaluationConfig) -> dict[str, Any]:
    """Parameters, heads, multiply-adds and scores of one model, and how it was scored."""
    config, counts = model.config, count_parameters(model)
    cache = config.cache_bytes_per_token(model.dtype.itemsize)
    return {
        "family": config.family,
        "parameters": {
            "layers": counts.layers,
            "embedding_side": counts.embedding_side,
            "total": counts.total,
            "per_head": config.parameters_per_head,
        },
        "heads_kept": [config.kept(layer) for layer in range(config.layers)],
        "heads_kept_total": config.heads_kept_total,
        "heads_total": config.heads_total,
        "sparsity": sparsity(config),
        "multiply_adds_per_token_layers": multiply_adds(config),
        **({} if cache is None else {"cache_bytes_per_token": cache}),
        "evaluation": evaluation_record(model, evaluation),
        **{split: score_record(score) for split, score in scores.items()},
    }


def evaluation_record(model: GatedLM, settings: EvaluationConfig) -> dict[str, Any]:
    """What perplexity depends on beside text and weights, or could to the last digits.

    memory_length: positions before its own that a token sees in every layer; in window mode no more than
    its window has. segment_length: tokens of a forward pass in memory mode. context, stride: tokens that a
    window reads before those it scores, and those. eos_is_a_word: the `<eos>` that ends a line is scored, and
    counts as a word. core: the attention core (see allattn/model/cores/choose.py).
    """
    spans = ("context", "stride") if settings.mode is EvaluationMode.window else ("segment_length",)
    return {
        "mode": settings.mode.value,
        "memory_length": settings.memory_length or model.config.memory_length,
        **{name: getattr(settings, name) for name in spans},
        "eos_is_a_word": model.config.eos_ends_lines,
        "precision": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "core": model.core_name,
    }


def score_record(score: Score) -> dict[str, Any]:
    """Perplexity per token and per word, nats and bits per token, and how many were scored.

    unseen_words: tokens of words that the vocabulary lacks, and the perplexity without them (None where none
    is left).
    """
    return {
        "perplexity": score.perplexity,
        "word_perplexity": score.word_perplexity,
        "nats_per_token": score.loss,
        "bits_per_token": score.bits,
        "tokens_scored": score.tokens,
        "words_scored": score.words,
        "unseen_words": {
            "tokens_scored": score.unseen_tokens,
            "perplexity_without": score.seen.perplexity if score.seen else None,
        },
    }
