"""How the recomputing core draws its dropout masks and keeps its buffers: on a CPU, and elsewhere.

A mask is packed into bits as long as it waits for the backward pass. The two workspaces pack in orders of
their own, so a mask is unpacked by the one that drew it.
"""

import math
import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_BLOCK = 16_384  # bytes of a dropout mask drawn at a time; their words fit into a core's cache


class Workspace(Protocol):
    """What the core needs besides arithmetic."""

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A buffer in the dtype and on the device of `like`, with anything in it."""

    def masks(self, count: int, dropped: int, device: torch.device) -> Iterator[Tensor]:
        """Without end the packed masks of one head after the other, uint8 with a bit for each of `count`
        probabilities: 0 where a random byte is less than `dropped`, and the probability dropped."""

    def unpacked(self, mask: Tensor, count: int) -> Tensor:
        """(count,) of 1 where the packed mask keeps a probability, else 0."""


class OnCpu:
    """Bytes of numpy's SFC64, seeded once a call by torch's default generator; buffers stay with a thread.

    A buffer is there for the thread's next call: fresh memory costs more than the softmax on it.
    """

    def __init__(self) -> None:
        self.kept = threading.local()

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """This thread's buffer of that name, with whatever an earlier call left in it; it never shrinks."""
        if type(like) is not Tensor:  # a stand-in, of torch's shape inference for one
            return like.new_empty(shape)
        elements = math.prod(shape)
        held: Tensor | None = getattr(self.kept, name, None)
        if held is None or held.numel() < elements or held.dtype != like.dtype:
            with torch.inference_mode(False):  # fit for every later call
                held = torch.empty(elements, dtype=like.dtype, device="cpu")
            setattr(self.kept, name, held)
        return held[:elements].view(shape)

    def masks(self, count: int, dropped: int, device: torch.device) -> Iterator[Tensor]:
        """See `Workspace`."""
        generator = np.random.SFC64(int(torch.randint(2**63 - 1, ())))
        while True:
            bits = np.empty((count + 7) // 8, dtype=np.uint8)
            for block in np.split(bits, range(_BLOCK, len(bits), _BLOCK)):  # a word of 8 bytes for 8 bits
                block[:] = np.packbits(generator.random_raw(len(block)).view(np.uint8) >= dropped)
            yield torch.from_numpy(bits)

    def unpacked(self, mask: Tensor, count: int) -> Tensor:
        """See `Workspace`."""
        return torch.from_numpy(np.unpackbits(mask.numpy(), count=count))


class Elsewhere:
    """Bytes of the device's default torch generator; buffers fresh from its caching allocator."""

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A new one, whatever its name."""
        return like.new_empty(shape)

    def masks(self, count: int, dropped: int, device: torch.device) -> Iterator[Tensor]:
        """See `Workspace`; bit i of byte j is of probability i * ceil(count / 8) + j."""
        while True:
            drawn = torch.randint(0, 256, (8, (count + 7) // 8), dtype=torch.uint8, device=device)
            kept = drawn >= dropped
            mask = kept[0].to(torch.uint8)
            for bit in range(1, 8):
                mask |= kept[bit].to(torch.uint8) << bit
            yield mask

    def unpacked(self, mask: Tensor, count: int) -> Tensor:
        """See `Workspace`."""
        bits = torch.arange(8, dtype=torch.uint8, device=mask.device).unsqueeze(1)
        return ((mask >> bits) & 1).flatten()[:count]  # (8, bytes) -> (count,)


ON_CPU, ELSEWHERE = OnCpu(), Elsewhere()
