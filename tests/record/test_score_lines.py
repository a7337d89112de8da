"""Scores in words, where the command's own test does not come."""

from allattn.record.bootstrap import TextInterval
from allattn.record.score_lines import difference_line, score_lines
from allattn.training.scoring import Score

HOW = {"mode": "memory", "memory_length": 3, "segment_length": 4, "precision": "float32", "device": "cpu"}
HOW["core"] = "plain"


def test_without_unseen_words_and_with_nothing_else() -> None:
    """Byte-level BPE lacks no word; a text of another language may lack every one."""
    assert score_lines("test", Score(6.0, 3, 2), HOW, [4])[2] == "unseen words: none"
    line = score_lines("test", Score(6.0, 3, 3, 6.0, 3), HOW, [4])[2]
    assert line == "unseen words: 3 of 3 tokens (100.0%), read as <unk>"


def test_how_far_an_interval_is_to_be_trusted() -> None:
    many = difference_line(TextInterval(1.5, -0.25, 3.0, 60), "articles")
    assert many == (
        "+1.5000 perplexity per token, 95% interval [-0.2500, +3.0000] over the text "
        "(10,000 draws of 60 articles)"
    )
    assert "29 articles, too few" in difference_line(TextInterval(1.5, 0.0, 3.0, 29), "articles")
    one = difference_line(TextInterval(1.5, 1.5, 1.5, 1), "blocks of 1,000 tokens")
    assert one == "+1.5000 perplexity per token; the text has too few blocks of 1,000 tokens for an interval"
