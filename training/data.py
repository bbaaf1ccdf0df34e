"""Where training rows come from: a source of samples, and which of its samples a rank reads at a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from training.config import IGNORE_INDEX
from training.mesh import Mesh


class SampleSource(Protocol):
    """Rows of `seq_length + 1` tokens in the run's order."""

    def tokens(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return (n, seq_length + 1), int64."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """Rows with more than tokens: labels of their own, document numbers, positions."""

    def rows(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> Mapping[str, npt.NDArray[Any]]:
        """Return "inputs" and "labels", each (n, s), int64, with IGNORE_INDEX where no loss is due, and context.

        Context is every other array; its first dimension is n, and its name an argument of the model's `forward`.
        """
        ...


Source = SampleSource | RowSource


@dataclass(frozen=True)
class Batch:
    """This data-parallel rank's rows of one global batch.

    Args:
        inputs: (rows, s), int64.
        labels: (rows, s), int64.
        row_ids: (rows,), int64.
        has_ignored: Some labels may be IGNORE_INDEX.
        context: What else the model is told, by the names of its `forward`; the first dimension is rows.
    """

    inputs: Tensor
    labels: Tensor
    row_ids: Tensor
    has_ignored: bool = False
    context: Mapping[str, Tensor] = field(default_factory=dict)

    def micro_batches(self, size: int) -> "list[Batch]":
        """Cut the batch into parts of `size` rows, in order."""
        return [
            Batch(
                self.inputs[first : first + size],
                self.labels[first : first + size],
                self.row_ids[first : first + size],
                self.has_ignored,
                {name: tensor[first : first + size] for name, tensor in self.context.items()},
            )
            for first in range(0, len(self.inputs), size)
        ]


def step_sample_ids(
    consumed_samples: int, global_batch_size: int, *, dp_rank: int, dp_size: int
) -> npt.NDArray[np.int64]:
    """Samples that data-parallel rank `dp_rank` reads when `consumed_samples` have been used before.

    A global batch is the next `global_batch_size` samples in order, whatever the layout; each rank
    takes an equal, contiguous share.
    """
    share = global_batch_size // dp_size
    first = consumed_samples + dp_rank * share
    return np.arange(first, first + share, dtype=np.int64)


def read_batch(source: Source, sample_ids: npt.NDArray[np.int64], device: torch.device) -> Batch:
    """Read samples: rows as their source describes them, or tokens split into inputs and the next tokens."""
    row_ids = torch.from_numpy(sample_ids).to(device)
    if isinstance(source, RowSource):
        context = {name: _on(device, array) for name, array in source.rows(sample_ids).items()}
        inputs, labels = context.pop("inputs"), context.pop("labels")
        return Batch(inputs, labels, row_ids, has_ignored=True, context=context)
    tokens = _on(device, source.tokens(sample_ids))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), row_ids)


def weigh_pairs(batch: Batch, num_tokens: int, num_rows: int) -> Batch:
    """Give each pair of segments the weight by which the pairs' mean joins the tokens' mean.

    Args:
        batch: This rank's; one without pairs is returned as it is.
        num_tokens: Tokens of the whole global batch that give a loss, by which the engine divides.
        num_rows: Rows of the whole global batch.
    """
    if "pair_labels" not in batch.context:
        return batch
    weights = torch.full(batch.row_ids.shape, num_tokens / num_rows, dtype=torch.float64, device=batch.row_ids.device)
    return replace(batch, context={**batch.context, "pair_weights": weights})


def _on(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)


def count_loss_tokens(batch: Batch, mesh: Mesh) -> int:
    """Tokens of the whole global batch that give a loss, at least 1: what the summed loss is divided by.

    Ranks with fewer such tokens would weigh too much in a mean of means, so the count is of all ranks. Without
    ignored labels every rank has as many, and nothing is sent.
    """
    if not batch.has_ignored:
        return batch.labels.numel() * mesh.size("dp")
    count = (batch.labels != IGNORE_INDEX).sum()
    if mesh.size("dp") > 1:
        dist.all_reduce(count, group=mesh.group("dp"))
    return max(1, int(count))
