"""Dropout whose mask is a function of what is dropped, not of a generator's state.

The mask of an element follows from (seed, row of training data, site in the model, position,
channel). So recomputation, resuming and every layout drop the same elements, and a checkpoint
holds no random state. Letters: s sequence, b batch, h hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.context_parallel import WHOLE, ContextParallel

# Multipliers of the 64-bit finalizer of SplitMix64 (Steele, Lea & Flood 2014, OOPSLA), as signed numbers.
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_RESOLUTION_BITS = 24


@dataclass(frozen=True)
class Dropout:
    """Drops elements with probability `p` and scales the others by 1 / (1 - p).

    Args:
        p: Probability; 0 returns the input.
        seed: Seed of the run.
        part: Which of the equal parts of a rank's tokens the inputs are (under sequence parallelism).
        parts: How many there are.
        context: Which tokens of the sequence the rank has.
    """

    p: float
    seed: int
    part: int = 0
    parts: int = 1
    context: ContextParallel = WHOLE

    def __call__(self, x_sbh: Tensor, row_ids: Tensor | None, site: int) -> Tensor:
        """Drop elements of `x_sbh`.

        Args:
            x_sbh: (s, b, h).
            row_ids: (b,), int64: place of each row in the run's order of samples; None does not drop.
            site: Number of this use of dropout in the model.
        """
        if self.p == 0.0 or row_ids is None:
            return x_sbh
        s, _, h = x_sbh.shape
        keys = _mix(_mix(row_ids + (self.seed << 20)) + site)
        position = self._places(s, x_sbh.device).view(s, 1, 1)
        channel = torch.arange(h, device=x_sbh.device)
        bits = _mix(keys.view(1, -1, 1) + position * h + channel)
        drawn = _shifted(bits, 64 - _RESOLUTION_BITS)
        is_kept = drawn >= int(self.p * (1 << _RESOLUTION_BITS))
        return x_sbh * is_kept * (1.0 / (1.0 - self.p))

    def _places(self, length: int, device: torch.device) -> Tensor:
        first = self.part * length
        if self.context.size == 1:
            return torch.arange(first, first + length, device=device)
        return self.context.places(length * self.parts * self.context.size, device)[first : first + length]


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
