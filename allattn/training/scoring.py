"""Exact scoring of a split: nats and tokens, never means of means. The only evaluation loop."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor

from allattn.data.corpus import Corpus
from allattn.data.segments import NOT_SCORED, EvaluationStream, Segment, WindowStream
from allattn.model.config import ModelConfig
from allattn.model.language_model import AllAttentionLM
from allattn.training.config import EvaluationConfig, EvaluationMode

_NOTHING = Segment(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), NOT_SCORED), 0, starts_over=True)


@dataclass(frozen=True)
class Score:
    """Sum of negative log-likelihoods over the tokens scored."""

    nats: float
    tokens: int
    words: int | None = None  # words that the scored tokens spell, where a token is not a word

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bits(self) -> float:
        """Bits per token."""
        return self.loss / math.log(2)

    @property
    def word_perplexity(self) -> float:
        """exp(total nats / words), which compares with word-level numbers; word level: the perplexity."""
        loss = self.nats / (self.tokens if self.words is None else self.words)
        return math.exp(loss) if loss < 700 else math.inf

    @property
    def perplexity(self) -> float:
        """exp(total nats / tokens scored); infinite where it overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def score(
    model: AllAttentionLM,
    segments: Iterable[Segment],
    multipliers: list[Tensor] | None = None,
    memory_length: int | None = None,
    words: int | None = None,
    progress: bool = False,
) -> Score:
    """Score the segments in order with memory, in evaluation mode.

    Args:
        model: left in the mode it was in.
        segments: evaluation rows; a negative target is not scored.
        multipliers: per layer (h,), the deterministic gates' s_g * g_i; None = no gates.
        memory_length: M in evaluation; None = the model's.
        words: words after the text's first, where tokens are not words.
        progress: show a bar on standard error.
    """
    device = model.positions.table.device
    training = model.training
    model.eval()
    nats, tokens = 0.0, 0
    memory = None
    with torch.no_grad():
        console = Console(stderr=True)
        for segment in track(segments, "scoring", console=console, transient=True, disable=not progress):
            if memory is None or segment.starts_over:
                memory = model.empty_memory(len(segment.inputs))
            targets = segment.targets.to(device)
            losses, memory = model(segment.inputs.to(device), targets, memory, multipliers, memory_length)
            nats += float(losses.cpu().double().sum())
            tokens += int((targets >= 0).sum())
    model.train(training)
    return Score(nats, tokens, words)


def score_split(
    model: AllAttentionLM,
    corpus: Corpus,
    split: str,
    settings: EvaluationConfig,
    multipliers: list[Tensor] | None = None,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = False,
) -> Score:
    """Score one split of a corpus as the settings say; with several processes each scores its share."""
    stream = evaluation_stream(model.config, corpus, split, settings, rank, world_size)
    words = corpus.splits[split].words - 1  # the text's first word is not scored
    missing = _missing(model, len(stream)) if world_size > 1 else 0
    segments = chain(stream, repeat(_NOTHING, missing)) if missing else stream
    own = score(model, segments, multipliers, settings.memory_length, words, progress)
    if world_size == 1:
        return own
    device = model.positions.table.device
    nats = torch.tensor(own.nats, dtype=torch.float64, device=device)
    tokens = torch.tensor(own.tokens, dtype=torch.int64, device=device)
    for total in (nats, tokens):
        dist.all_reduce(total)
    return Score(float(nats), int(tokens), words)


def _missing(model: AllAttentionLM, segments: int) -> int:
    """Segments that another process has more, where weights are sharded: every process must run as many."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        return 0
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, segments)
    return max(counts) - segments


def evaluation_stream(
    config: ModelConfig,
    corpus: Corpus,
    split: str,
    settings: EvaluationConfig,
    rank: int = 0,
    world_size: int = 1,
) -> EvaluationStream | WindowStream:
    """What scores `split` exactly: rows with memory, or windows."""
    ids = corpus.splits[split].ids
    if settings.mode is EvaluationMode.window:
        return WindowStream(ids, settings.rows, settings.context, settings.stride, rank, world_size)
    memory_length = settings.memory_length or config.memory_length
    warm_up = config.layers * memory_length
    return EvaluationStream(ids, settings.rows, settings.segment_length, warm_up, rank, world_size)
