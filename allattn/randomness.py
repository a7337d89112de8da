"""Seeded random streams: every draw is a function of (seed, purpose, indices), so nothing has to be saved."""

import zlib

import numpy as np
import torch


def stream_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for one purpose; different purposes or indices give unrelated streams."""
    entropy = [seed, zlib.crc32(purpose.encode()), *indices]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def generator(seed: int, purpose: str, *indices: int) -> torch.Generator:
    """A CPU generator on the stream of `stream_seed`."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, *indices))
