"""What the paper reports: Shim et al., test perplexity on WikiText-103, lambda 0.02 in all of it."""

from allattn.comparison.variants import NONE_OF_THREE
from allattn.pruning.techniques import TECHNIQUES

# Parameters of the layers and perplexity.
PAPER_DENSE = (54_566_912, 23.24)
PAPER_FULL = (30_704_640, 24.85)
# Of the ablations, from the full method; their parameters are not published.
PAPER_DIFFERENCES = {
    f"without {TECHNIQUES[0]}": 0.12,
    f"without {TECHNIQUES[1]}": 0.61,
    f"without {TECHNIQUES[2]}": 1.25,
    NONE_OF_THREE: 1.48,
}
