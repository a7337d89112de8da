"""Exact scoring of a split: nats and tokens, never means of means. The only evaluation loop."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

import torch
import torch.distributed as dist
from torch import Tensor

from allattn.data.corpus import Corpus
from allattn.data.segments import NOT_SCORED, EvaluationStream, Segment, WindowStream
from allattn.model.gated import GatedLM, Sizes
from allattn.model.words import words_of
from allattn.training.config import EvaluationConfig, EvaluationMode
from allattn.training.display import watched
from allattn.training.tally import NO_ARTICLES, ByArticle, Tally

_NOTHING = Segment(
    torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), NOT_SCORED), 0, True, torch.zeros(1).long()
)


@dataclass(frozen=True)
class Score:
    """Sum of negative log-likelihoods over the tokens scored."""

    nats: float
    tokens: int
    words: int | None = None  # words that the scored tokens spell, where a token is not a word
    unseen_nats: float = 0.0  # of tokens whose word the vocabulary lacks
    unseen_tokens: int = 0
    articles: ByArticle = field(default=NO_ARTICLES, compare=False)  # the same nats and tokens by article

    @property
    def seen(self) -> "Score | None":
        """The score without the tokens of unseen words; None where no others were scored."""
        tokens = self.tokens - self.unseen_tokens
        return Score(self.nats - self.unseen_nats, tokens) if tokens else None

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
    model: GatedLM,
    segments: Iterable[Segment],
    multipliers: list[Tensor] | None = None,
    memory_length: int | None = None,
    tally: Tally | None = None,
    progress: bool = False,
) -> Score:
    """Score the segments in order with memory, in evaluation mode.

    Args:
        model: left in the mode it was in.
        segments: evaluation rows; a negative target is not scored.
        multipliers: per layer (h,), the deterministic gates' s_g * g_i; None = no gates.
        memory_length: M in evaluation; None = the model's.
        tally: of the segments' text, not used before; None = no sums by article.
        progress: show a bar on standard error, or lines where that is no terminal.
    """
    training = model.training
    model.eval()
    nats, tokens = 0.0, 0
    memory = None
    with torch.no_grad():
        for segment in watched(segments, "scoring", progress):
            if memory is None or segment.starts_over:
                memory = model.empty_memory(len(segment.inputs))
            words = words_of(segment.inputs, segment.targets, model)
            losses, memory = model(
                words.inputs, words.targets, memory, multipliers, memory_length, words.counts
            )
            losses = losses.cpu()  # the only wait for the device
            nats += float(losses.double().sum())
            tokens += int((segment.targets >= 0).sum())
            if tally is not None:
                tally.add(segment, losses)
    model.train(training)
    if tally is None:
        return Score(nats, tokens)
    return Score(nats, tokens, None, tally.unseen_nats, tally.unseen_tokens, tally.articles)


def score_split(
    model: GatedLM,
    corpus: Corpus,
    split: str,
    settings: EvaluationConfig,
    multipliers: list[Tensor] | None = None,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = False,
) -> Score:
    """Score one split of a corpus as the settings say; with several processes each scores its share."""
    encoded = corpus.splits[split]
    stream = evaluation_stream(model.config, corpus, split, settings, rank, world_size)
    missing = _missing(model, len(stream)) if world_size > 1 else 0
    segments = chain(stream, repeat(_NOTHING, missing)) if missing else stream
    own = score(model, segments, multipliers, settings.memory_length, Tally(encoded), progress)
    own = replace(own, words=encoded.words - 1)  # the text's first word is not scored
    return own if world_size == 1 else _of_all_processes(own, model.device)


def _of_all_processes(own: Score, device: torch.device) -> Score:
    floats = torch.tensor([own.nats, own.unseen_nats, *own.articles.nats], dtype=torch.float64, device=device)
    counts = torch.tensor([own.tokens, own.unseen_tokens, *own.articles.tokens], device=device)
    for total in (floats, counts):
        dist.all_reduce(total)
    (nats, unseen_nats), (tokens, unseen_tokens) = floats[:2].tolist(), counts[:2].tolist()
    articles = replace(own.articles, nats=floats[2:].cpu().numpy(), tokens=counts[2:].cpu().numpy())
    return Score(nats, tokens, own.words, unseen_nats, unseen_tokens, articles)


def _missing(model: GatedLM, segments: int) -> int:
    """Segments that another process has more, where weights are sharded: every process must run as many."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        return 0
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, segments)
    return max(counts) - segments


def evaluation_stream(
    config: Sizes,
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
