"""What result.json says of a run's text, models and scores. Nothing in it is typed by hand."""

from typing import Any

from allattn.data.corpus import Corpus
from allattn.model.counts import count_parameters, multiply_adds, parameters_per_head
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.surgery import sparsity
from allattn.training.scoring import Score


def corpus_record(corpus: Corpus) -> dict[str, Any]:
    """Tokens of each split, vocabulary, and what identifies both."""
    return {
        "tokens": {name: split.tokens for name, split in corpus.splits.items()},
        "vocabulary_size": corpus.vocabulary_size,
        "vocabulary_hash": corpus.tokenizer_hash,
        "data_fingerprint": corpus.fingerprint,
    }


def model_record(model: AllAttentionLM, scores: dict[str, Score]) -> dict[str, Any]:
    """Parameters, heads, multiply-adds and scores of one model."""
    config, counts = model.config, count_parameters(model)
    return {
        "family": config.family,
        "parameters": {
            "layers": counts.layers,
            "embedding_side": counts.embedding_side,
            "total": counts.total,
            "per_head": parameters_per_head(config),
        },
        "heads_kept": [config.kept(layer) for layer in range(config.layers)],
        "heads_kept_total": config.heads_kept_total,
        "heads_total": config.heads_total,
        "sparsity": sparsity(config),
        "multiply_adds_per_token_layers": multiply_adds(config),
        **{split: score_record(score) for split, score in scores.items()},
    }


def score_record(score: Score) -> dict[str, Any]:
    """Perplexity per token and per word, nats and bits per token, and how many were scored."""
    return {
        "perplexity": score.perplexity,
        "word_perplexity": score.word_perplexity,
        "nats_per_token": score.loss,
        "bits_per_token": score.bits,
        "tokens_scored": score.tokens,
        "words_scored": score.words,
    }
