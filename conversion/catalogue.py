"""Tensors of a checkpoint under canonical names, readable piece by piece, whatever the format.

A format module gives a `Catalogue`; writers ask it for boxes (a start and a stop for every
dimension) and never see files. So every format meets every layout without code for the pair.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from training.step_folders import CheckpointInfo

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]

BLOCK_BYTES = 2 * 2**20


@dataclass(frozen=True)
class TensorEntry:
    """One uncut tensor: its name, shape and type."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return num_elements(self.shape) * self.dtype.itemsize

    @property
    def box(self) -> Box:
        """The box that is the whole tensor."""
        return tuple((0, size) for size in self.shape)


class Catalogue(Protocol):
    """All tensors of a source, and how to read any part of one."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Name to description, in the order in which they are best read."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return a new contiguous tensor with the elements of `box`.

        Raises:
            InputError: The file that holds them is damaged.
        """

    def close(self) -> None:
        """Close the files."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is open for reading.

    Args:
        path: What the user named, or the step folder that was chosen in it.
        format: As `conversion.detect` names it.
        info: Step, position in the data, model and layout; for a foreign format, as far as it says.
        tensors: Weights under canonical names, and moments as `optim.<name>.exp_avg(_sq)`.
        notes: What was seen and left aside, one line each.
        facts: What else `inspect` shows of a foreign format: kind of optimizer, padding and the like.
    """

    path: Path
    format: str
    info: CheckpointInfo
    tensors: Catalogue
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def num_elements(shape: Shape) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def box_shape(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def common_box(a: Box, b: Box) -> Box | None:
    """Return what two boxes have in common; None if they have nothing."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def shifted(box: Box, by: Shape) -> Box:
    """Return a box counted from another origin."""
    return tuple((start - n, stop - n) for (start, stop), n in zip(box, by, strict=True))


def row_blocks(box: Box, itemsize: int, block_bytes: int = BLOCK_BYTES) -> Iterator[Box]:
    """Cut a box along its first dimension into boxes of about `block_bytes` each."""
    if not box:
        yield box
        return
    (first, last), *rest = box
    row_bytes = max(1, num_elements(box_shape(tuple(rest))) * itemsize)
    rows = max(1, block_bytes // row_bytes)
    for start in range(first, last, rows):
        yield ((start, min(start + rows, last)), *rest)


def memory_of(tensor: Tensor) -> memoryview:
    """View a contiguous tensor as its bytes, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have one type, one shape and the same bits (NaN equals NaN, 0 is not -0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(as_integer), b.contiguous().view(as_integer))
