"""The two stages, each a story on one page, and the run that both of them are."""

from allattn.stages.pretrain import pretrain
from allattn.stages.prune import prune

__all__ = ["pretrain", "prune"]
