"""Sample indices of one dataset, bit-identical to Megatron-LM's GPTDataset for the same seed.

Units are the sequences of a dataset. For one split:

    document_index  (units x epochs,)   unit numbers in reading order
    sample_index    (samples + 1, 2)    where sample k begins: position in document_index, token offset
    shuffle_index   (samples,)          number of a sample as training counts -> row of sample_index

Sample k covers tokens k*seq_length up to and including (k+1)*seq_length of the units joined in
reading order: neighbours share one token, the label of one's last position being the next one's
first input. Rules after Megatron-LM d98e8a64, megatron/core/datasets/gpt_dataset.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.samples.kernels import legacy_shuffle, sample_starts

# A final epoch of which less than this share is used is shuffled apart, so that its documents do
# not displace those of the whole epochs (gpt_dataset.py, _build_document_sample_shuffle_indices).
SEPARATE_BELOW = 0.80
CHUNK_UNITS = 2**17

Units = range | npt.NDArray[Any]
"""Sequences of a dataset by number, ascending."""


@dataclass(frozen=True)
class EpochPlan:
    """How often a split is read.

    Args:
        tokens_per_epoch: Tokens of its units.
        num_epochs: Times the units are read.
        num_samples: Full samples in all epochs; may be more than asked for.
        samples_per_epoch: Full samples of one epoch.
        samples_before_final: Full samples of all but the last epoch; None unless the last is apart.
        seq_length: Tokens the model sees in a sample.
        extra_tokens: 1 if a sample has the label of its last position too, else 0.
    """

    tokens_per_epoch: int
    num_epochs: int
    num_samples: int
    samples_per_epoch: int
    samples_before_final: int | None
    seq_length: int
    extra_tokens: int

    @property
    def ends_beyond_the_tokens(self) -> bool:
        """The last sample is a partial one that was kept."""
        needed = self.num_samples * self.seq_length + self.extra_tokens
        return self.num_samples > 0 and needed > self.num_epochs * self.tokens_per_epoch

    @property
    def has_separate_final_epoch(self) -> bool:
        return self.samples_before_final is not None


@dataclass(frozen=True)
class SampleIndex:
    """The three indices of one split."""

    document_index: npt.NDArray[Any]
    sample_index: npt.NDArray[Any]
    shuffle_index: npt.NDArray[Any]
    plan: EpochPlan


def plan_epochs(
    tokens_per_epoch: int,
    seq_length: int,
    num_samples: int | None,
    *,
    extra_tokens: int = 1,
    keeps_partial: bool = False,
) -> EpochPlan:
    """Work out epochs and samples of a split.

    Args:
        num_samples: Samples asked for; None means one epoch.
        extra_tokens: 1 if a sample has the label of its last position too, else 0.
        keeps_partial: Keep the last, partial sample (Megatron-LM's option for validation).

    Raises:
        ValueError: There is no token, so no number of epochs gives a sample.
    """
    total = tokens_per_epoch
    num_epochs = 1
    if num_samples:
        if total == 0:
            raise ValueError("a split without tokens cannot give samples")
        num_epochs = max(1, -(-(num_samples * seq_length + extra_tokens) // total))
    per_epoch = (total - extra_tokens) // seq_length
    before: int | None = None
    if num_epochs > 1 and num_samples is not None:
        before = ((num_epochs - 1) * total - extra_tokens) // seq_length
        from_final = num_samples - before
        if not 0 <= from_final <= per_epoch + 1:
            raise RuntimeError(f"{from_final} samples of the final epoch, which has {per_epoch}; this is a defect")
        if from_final >= int(SEPARATE_BELOW * per_epoch):
            before = None
    quotient = num_epochs * total - extra_tokens
    built = quotient // seq_length
    if keeps_partial:  # in float32, as there
        built = int(np.ceil(np.float32(quotient) / np.float32(seq_length)))
    return EpochPlan(total, num_epochs, max(0, built), max(0, per_epoch), before, seq_length, extra_tokens)


def build_sample_index(
    lengths: npt.NDArray[np.int32],
    units: Units,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra_tokens: int = 1,
    keeps_partial: bool = False,
) -> SampleIndex:
    """Build the indices of some units of a dataset in memory.

    Args:
        lengths: (sequences,) tokens of every sequence of the dataset.
        units: The sequences to read: a range, or ascending numbers.
        num_samples: Samples asked for; None means one epoch.
    """
    plan = plan_units(lengths, units, seq_length, num_samples, extra_tokens=extra_tokens, keeps_partial=keeps_partial)
    random = np.random.RandomState(seed)
    document_index = shuffled_units(units, plan, random)
    rows = np.concatenate(list(sample_rows(lengths, document_index, plan)))
    return SampleIndex(document_index, rows, shuffled_samples(plan, random), plan)


def save_sample_index(
    lengths: npt.NDArray[np.int32], units: Units, plan: EpochPlan, *, seed: int, folder: Path, prefix: str
) -> None:
    """Build the same indices into `{prefix}_{document,sample,shuffle}_index.npy`, one in memory at a time."""
    random = np.random.RandomState(seed)
    document_index = shuffled_units(units, plan, random)
    save_array(folder / f"{prefix}_document_index.npy", [document_index], document_index.shape)
    rows = sample_rows(lengths, document_index, plan)
    save_array(folder / f"{prefix}_sample_index.npy", rows, (plan.num_samples + 1, 2))
    del document_index, rows
    shuffle_index = shuffled_samples(plan, random)
    save_array(folder / f"{prefix}_shuffle_index.npy", [shuffle_index], shuffle_index.shape)


def save_array(path: Path, chunks: Iterable[npt.NDArray[Any]], shape: tuple[int, ...]) -> None:
    """Write chunks that join to one array of `shape` as a `.npy` file."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        rest = iter(chunks)
        first = next(rest)
        header = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(first.data)
        for chunk in rest:
            file.write(chunk.data)
    temporary.replace(path)


def plan_units(
    lengths: npt.NDArray[np.int32],
    units: Units,
    seq_length: int,
    num_samples: int | None,
    *,
    extra_tokens: int = 1,
    keeps_partial: bool = False,
) -> EpochPlan:
    """Plan the epochs of some units; see `plan_epochs`."""
    if isinstance(units, range):
        tokens = int(lengths[units.start : units.stop].sum(dtype=np.int64))
    else:
        tokens = int(lengths[units].sum(dtype=np.int64))
    return plan_epochs(tokens, seq_length, num_samples, extra_tokens=extra_tokens, keeps_partial=keeps_partial)


def shuffled_units(units: Units, plan: EpochPlan, random: np.random.RandomState) -> npt.NDArray[Any]:
    """Repeat the units for every epoch and shuffle them, a separate final epoch by itself: (units x epochs,)."""
    highest = units[-1] if len(units) else 0
    dtype = np.int32 if highest <= np.iinfo(np.int32).max else np.int64
    result = np.empty(len(units) * plan.num_epochs, dtype=dtype)
    by_epoch = result.reshape(plan.num_epochs, len(units))
    for start in range(0, len(units), CHUNK_UNITS):
        chunk = units[start : start + CHUNK_UNITS]
        numbers = np.arange(chunk.start, chunk.stop, dtype=dtype) if isinstance(chunk, range) else chunk
        by_epoch[:, start : start + CHUNK_UNITS] = numbers
    if plan.has_separate_final_epoch:
        legacy_shuffle(result[: -len(units)], random)
        legacy_shuffle(result[-len(units) :], random)
    else:
        legacy_shuffle(result, random)
    return result


def sample_rows(
    lengths: npt.NDArray[np.int32], document_index: npt.NDArray[Any], plan: EpochPlan
) -> Iterator[npt.NDArray[Any]]:
    """Yield the rows of the sample index: (samples + 1, 2) in all."""
    fits = max(len(document_index), int(lengths.max(initial=0))) <= np.iinfo(np.int32).max
    dtype = np.int32 if fits else np.int64
    chunks = sample_starts(lengths, document_index, plan.seq_length, plan.num_samples, plan.extra_tokens, dtype)
    if not plan.ends_beyond_the_tokens:
        yield from chunks
        return
    left = plan.num_samples + 1
    for chunk in chunks:
        left -= len(chunk)
        if not left:  # the partial sample ends where the tokens end
            chunk[-1] = len(document_index) - 1, int(lengths[document_index[-1]]) - plan.extra_tokens
        yield chunk


def shuffled_samples(plan: EpochPlan, random: np.random.RandomState) -> npt.NDArray[Any]:
    """Return the order of the samples: (samples,); those of a separate final epoch come last."""
    dtype = np.int64 if plan.num_samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    result = np.arange(plan.num_samples, dtype=dtype)
    head = plan.num_samples if plan.samples_before_final is None else plan.samples_before_final
    legacy_shuffle(result[:head], random)
    if head < plan.num_samples:
        legacy_shuffle(result[head:], random)
    return result
