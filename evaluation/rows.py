"""Rows to score: tokens in, and the positions whose prediction counts. What passes between stage and ranks.

A row of n tokens is fed as its first n - 1; its targets are the last n - 1, of which those from
`first_target` on are scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.config import IGNORE_INDEX

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows laid end to end.

    Args:
        tokens: (total,) ids of all rows.
        bounds: (rows + 1,) where each row begins, and the end.
        first_target: (rows,) place in the row of its first scored token, at least 1.
    """

    tokens: Ints
    bounds: Ints
    first_target: Ints

    def __len__(self) -> int:
        return len(self.first_target)

    @property
    def lengths(self) -> Ints:
        """(rows,) positions fed for each row."""
        return np.diff(self.bounds) - 1

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens, bounds=self.bounds, first_target=self.first_target)

    @classmethod
    def load(cls, path: Path) -> "Rows":
        with np.load(path, allow_pickle=False) as data:
            return cls(data["tokens"], data["bounds"], data["first_target"])


@dataclass(frozen=True)
class RowScores:
    """Result of each row.

    Args:
        log_prob: (rows,) float64, nats, summed over the scored tokens.
        num_scored: (rows,) scored tokens.
        num_greedy: (rows,) scored tokens that were the most probable ones.
    """

    log_prob: npt.NDArray[np.float64]
    num_scored: Ints
    num_greedy: Ints


def rows_of(sequences: Sequence[Sequence[int]], first_targets: Sequence[int]) -> Rows:
    """Lay token lists end to end."""
    lengths = np.fromiter((len(row) for row in sequences), dtype=np.int64, count=len(sequences))
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.concatenate([np.asarray(row, dtype=np.int64) for row in sequences] or [np.empty(0, np.int64)])
    return Rows(tokens, bounds, np.asarray(first_targets, dtype=np.int64))


def batches(rows: Rows, *, batch_tokens: int, multiple: int) -> Iterator[Ints]:
    """Group rows of like length so that a padded batch stays within `batch_tokens`.

    Args:
        multiple: Padded lengths are multiples of this (sequence parallelism cuts them evenly).

    Returns:
        Numbers of the rows of each batch, longest rows first, in an order that depends on the rows alone.
    """
    lengths = rows.lengths
    order = np.lexsort((np.arange(len(rows)), -lengths))
    start = 0
    while start < len(order):
        padded = padded_length(int(lengths[order[start]]), multiple)
        count = max(1, batch_tokens // padded)
        yield order[start : start + count]
        start += count


def padded_length(length: int, multiple: int) -> int:
    """Round a length up to a multiple."""
    return -(-length // multiple) * multiple


def padded_batch(rows: Rows, numbers: Ints, multiple: int) -> tuple[Ints, Ints]:
    """Return inputs and targets of a batch, padded on the right.

    Returns:
        inputs: (batch, length), zeros behind a row's end.
        targets: (batch, length), IGNORE_INDEX where nothing is scored.
    """
    length = padded_length(int(rows.lengths[numbers].max()), multiple)
    inputs = np.zeros((len(numbers), length), dtype=np.int64)
    targets = np.full((len(numbers), length), IGNORE_INDEX, dtype=np.int64)
    for place, number in enumerate(numbers):
        row = rows.tokens[rows.bounds[number] : rows.bounds[number + 1]]
        first = int(rows.first_target[number])
        inputs[place, : len(row) - 1] = row[:-1]
        targets[place, first - 1 : len(row) - 1] = row[first:]
    return inputs, targets
