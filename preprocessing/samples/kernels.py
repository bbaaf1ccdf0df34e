"""Loops over documents and samples: compiled by numba for large inputs, numpy for small ones.

Both ways give the same bits. Importing numba and loading compiled loops costs about a second, so
it is left alone where numpy is done sooner.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK_ROWS = 2**16
COMPILE_ABOVE = 3_000_000  # elements; below, numpy needs less than numba's import


def legacy_shuffle(array: npt.NDArray[Any], random: np.random.RandomState) -> None:
    """Shuffle a 1-D array in place as `random.shuffle(array)` does, and leave `random` in the same state."""
    if not COMPILE_ABOVE <= len(array) < 2**32 or not _has_numba():  # beyond, numpy draws 64 bits
        random.shuffle(array)
        return
    from preprocessing.samples import compiled

    state: Any = random.get_state(legacy=True)
    name, key, position, has_gauss, gauss = state
    position = compiled.shuffle(array, key, position)
    random.set_state((name, key, position, has_gauss, gauss))


def sample_starts(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[Any],
    seq_length: int,
    num_samples: int,
    extra_tokens: int,
    dtype: Any = np.int64,
) -> Iterator[npt.NDArray[Any]]:
    """Yield where each sample begins: (rows, 2) position in document_index, token offset; num_samples + 1 rows in all.

    Row k >= 1 is the first position whose running token count, itself included, reaches
    k * seq_length + extra_tokens; row 0 is (0, 0).
    """
    yield np.zeros((1, 2), dtype=dtype)
    if len(document_index) + num_samples < COMPILE_ABOVE or not _has_numba():
        found = _sample_starts_numpy(lengths, document_index, seq_length, num_samples, extra_tokens)
        yield found.astype(dtype, copy=False)
        return
    from preprocessing.samples import compiled

    state = np.array([1, 0, 0], dtype=np.int64)
    for first in range(0, num_samples, CHUNK_ROWS):
        rows = np.empty((min(CHUNK_ROWS, num_samples - first), 2), dtype=dtype)
        compiled.starts(lengths, document_index, seq_length, extra_tokens, state, rows)
        yield rows


def _sample_starts_numpy(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[Any],
    seq_length: int,
    num_samples: int,
    extra_tokens: int,
) -> npt.NDArray[np.int64]:
    """Return rows 1 and up."""
    read = lengths[document_index]
    ends = np.cumsum(read, dtype=np.int64)
    targets = np.arange(1, num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, targets + extra_tokens, side="left")
    positions = np.minimum(positions, max(0, len(ends) - 1))  # a kept partial sample ends beyond the last token
    return (
        np.stack([positions, targets - (ends[positions] - read[positions])], axis=1)
        if len(ends)
        else (np.zeros((num_samples, 2), dtype=np.int64))
    )


def blend(weights: npt.NDArray[np.float64], size: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Choose the dataset of each sample of a blend by largest deficit, as Megatron-LM does.

    For sample i, dataset d has the deficit weights[d] * max(i, 1) - samples taken of d so far; the
    largest wins, the lowest number on a tie.

    Args:
        weights: (datasets,), their sum is 1.

    Returns:
        dataset_index: (size,) which dataset.
        dataset_sample_index: (size,) which of its samples.
    """
    dataset_index = np.zeros(size, dtype=np.int16)
    dataset_sample_index = np.zeros(size, dtype=np.int64)
    _blend_loops(size * len(weights)).blend(weights, dataset_index, dataset_sample_index)
    return dataset_index, dataset_sample_index


WeightedPhase = tuple[int, npt.NDArray[np.float64]]
"""Samples of a phase, and the weight of each dataset in it, of sum 1."""


def blend_phases(
    phases: Sequence[WeightedPhase], num_datasets: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Choose as `blend` does, phase by phase; every dataset goes on where the phase before left it.

    A dataset of weight 0 gives nothing to a phase: it would win ties.
    """
    if len(phases) == 1:
        return blend(phases[0][1], phases[0][0])
    taken = np.zeros(num_datasets, dtype=np.int64)
    chosen: list[npt.NDArray[np.int16]] = []
    samples: list[npt.NDArray[np.int64]] = []
    for size, weights in phases:
        used = np.flatnonzero(weights)
        places, numbers = blend(np.ascontiguousarray(weights[used]), size)
        datasets = used[places].astype(np.int16)
        chosen.append(datasets)
        samples.append(numbers + taken[datasets])
        taken += np.bincount(datasets, minlength=num_datasets)
    return np.concatenate(chosen), np.concatenate(samples)


def blend_exhaustively(sizes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Choose as `blend` does with weights by size, until every dataset has given all its samples."""
    size = int(sizes.sum())
    dataset_index = np.zeros(size, dtype=np.int16)
    dataset_sample_index = np.zeros(size, dtype=np.int64)
    loops = _blend_loops(size * len(sizes))
    loops.blend_exhaustively(sizes, sizes / max(1, size), dataset_index, dataset_sample_index)
    return dataset_index, dataset_sample_index


def _blend_loops(work: int) -> Any:
    """Return the module whose loops are the faster for so many steps."""
    if work < COMPILE_ABOVE // 10 or not _has_numba():
        from preprocessing.samples import loops

        return loops
    from preprocessing.samples import compiled

    return compiled


@cache
def _has_numba() -> bool:
    from importlib.util import find_spec

    return find_spec("numba") is not None
