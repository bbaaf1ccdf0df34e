"""Where training rows come from: a source of samples, and which of its samples a rank reads at a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.config import PretrainConfig


class SampleSource(Protocol):
    """Rows of `seq_length + 1` tokens in the run's order."""

    def tokens(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return (n, seq_length + 1), int64."""
        ...


@dataclass(frozen=True)
class Batch:
    """This data-parallel rank's rows of one global batch: inputs and labels (rows, s), row_ids (rows,), int64."""

    inputs: Tensor
    labels: Tensor
    row_ids: Tensor


def step_sample_ids(consumed_samples: int, config: PretrainConfig, dp_rank: int) -> npt.NDArray[np.int64]:
    """Samples that data-parallel rank `dp_rank` reads when `consumed_samples` have been used before.

    A global batch is the next `global_batch_size` samples in order, whatever the layout; each rank
    takes an equal, contiguous share.
    """
    share = config.global_batch_size // config.layout.data_parallel
    first = consumed_samples + dp_rank * share
    return np.arange(first, first + share, dtype=np.int64)


def read_batch(source: SampleSource, sample_ids: npt.NDArray[np.int64], device: torch.device) -> Batch:
    """Read samples and split them into inputs and the next tokens."""
    tokens = torch.from_numpy(np.ascontiguousarray(source.tokens(sample_ids), dtype=np.int64)).to(device)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.from_numpy(sample_ids).to(device))
