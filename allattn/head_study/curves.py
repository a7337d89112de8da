"""What a curve of a model's loss against the share of zeroed heads says: crossings and areas."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.integrate import trapezoid

Curve = Sequence[tuple[float, float]]  # (share of heads really zeroed, value), the unmasked model's at 0


@dataclass(frozen=True)
class Crossing:
    """Up to which share a curve stays within a limit."""

    share: float
    reached: bool  # False: it never leaves the limit for good, and `share` is the largest measured


def last_crossing(curve: Curve, limit: float) -> Crossing:
    """Where a curve that is better the lower it is rises above `limit` for the last time.

    Between the two points around it the curve is a straight line. The unmasked model is within the limit.

    Args:
        curve: at least the point of the unmasked model.
        limit: above its value.
    """
    points = sorted(curve)
    inside = [place for place, (_, value) in enumerate(points) if value <= limit]
    last = max(inside)
    share, value = points[last]
    if last == len(points) - 1:
        return Crossing(share, reached=False)
    after_share, after = points[last + 1]
    if np.isinf(after):
        return Crossing(share, reached=True)
    return Crossing(share + (limit - value) / (after - value) * (after_share - share), reached=True)


def mean_height(curve: Curve, end: float) -> float:
    """The area under a curve of straight lines from 0 to `end`, divided by `end`.

    Args:
        curve: from share 0 to at least `end`.
        end: above 0.
    """
    shares, values = np.array(sorted(curve)).T
    inner = shares < end
    x = np.append(shares[inner], end)
    y = np.append(values[inner], np.interp(end, shares, values))
    return float(trapezoid(y, x) / end)
