"""A score, and the difference between two, in words: what `evaluate` prints."""

from typing import Any

from allattn.record.bootstrap import CONFIDENCE, DRAWS, TextInterval
from allattn.training.scoring import Score

FEW = 30  # with fewer articles a bootstrap's interval is too narrow
_LENGTHS = ("memory_length", "segment_length", "context", "stride")


def score_lines(split: str, score: Score, how: dict[str, Any], heads: list[int]) -> list[str]:
    """Perplexity, how it was measured, and what unseen words make of it: a line each.

    Args:
        split: of the text.
        score: what was scored.
        how: from `evaluation_record`.
        heads: kept, of each layer.
    """
    return [
        f"{split}: perplexity per word {score.word_perplexity:.4f}, per token {score.perplexity:.4f} "
        f"({score.loss:.6f} nats, {score.bits:.6f} bits); {score.tokens:,} tokens, {score.words:,} words "
        f"scored; heads per layer {heads}",
        how_line(how),
        _unseen_line(score),
    ]


def how_line(how: dict[str, Any]) -> str:
    """How something was scored, from `evaluation_record`."""
    lengths = ", ".join(f"{name.replace('_', ' ')} {how[name]}" for name in _LENGTHS if name in how)
    where = f"{how['precision']}, {how['device']}, {how['core']} core"
    ends = "<eos> scored as a word; " if how.get("eos_is_a_word", True) else ""
    return f"mode {how['mode']}, {lengths}; {ends}{where}"


def difference_line(found: TextInterval, unit: str) -> str:
    """A difference of perplexities and how sure the text makes it.

    Args:
        found: the difference.
        unit: what was drawn, as `ByArticle` names it.
    """
    difference = f"{found.difference:+.4f} perplexity per token"
    if found.articles < 2:
        return f"{difference}; the text has too few {unit} for an interval"
    doubt = ", too few for the interval to be wide enough" if found.articles < FEW else ""
    return (
        f"{difference}, {CONFIDENCE:.0%} interval [{found.low:+.4f}, {found.high:+.4f}] over the text "
        f"({DRAWS:,} draws of {found.articles} {unit}{doubt})"
    )


def _unseen_line(score: Score) -> str:
    if not score.unseen_tokens:
        return "unseen words: none"
    share = f"{score.unseen_tokens:,} of {score.tokens:,} tokens ({score.unseen_tokens / score.tokens:.1%})"
    if score.seen is None:
        return f"unseen words: {share}, read as <unk>"
    return (
        f"unseen words: {share}, read as <unk>; perplexity per token {score.perplexity:.4f} with and "
        f"{score.seen.perplexity:.4f} without them"
    )
