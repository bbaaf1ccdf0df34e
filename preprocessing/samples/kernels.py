"""Loops over documents and samples: compiled by numba for large inputs, numpy for small ones.

Both ways give the same bits. Importing numba and loading compiled loops costs about a second, so
it is left alone where numpy is done sooner.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

COMPILE_ABOVE = 3_000_000  # elements; below, numpy needs less than numba's import


def legacy_shuffle(array: npt.NDArray[Any], random: np.random.RandomState) -> None:
    """Shuffle a 1-D array in place as `random.shuffle(array)` does, and leave `random` in the same state."""
    if len(array) < COMPILE_ABOVE or not _has_numba():
        random.shuffle(array)
        return
    state: Any = random.get_state(legacy=True)
    name, key, position, has_gauss, gauss = state
    position = _compiled()["shuffle"](array, key, position)
    random.set_state((name, key, position, has_gauss, gauss))


def sample_starts(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra_tokens: int,
    dtype: Any = np.int64,
) -> npt.NDArray[Any]:
    """Return where each sample begins: (num_samples + 1, 2) position in document_index, token offset.

    Row k >= 1 is the first position whose running token count, itself included, reaches
    k * seq_length + extra_tokens; row 0 is (0, 0).
    """
    if len(document_index) + num_samples >= COMPILE_ABOVE and _has_numba():
        result = np.zeros((num_samples + 1, 2), dtype=dtype)
        _compiled()["starts"](lengths, document_index, seq_length, extra_tokens, result)
        return result
    found = _sample_starts_numpy(lengths, document_index, seq_length, num_samples, extra_tokens)
    return found.astype(dtype, copy=False)


def _sample_starts_numpy(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra_tokens: int,
) -> npt.NDArray[np.int64]:
    read = lengths[document_index]
    ends = np.cumsum(read, dtype=np.int64)
    targets = np.arange(1, num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, targets + extra_tokens, side="left")
    positions = np.minimum(positions, max(0, len(ends) - 1))  # a kept partial sample ends beyond the last token
    result = np.zeros((num_samples + 1, 2), dtype=np.int64)
    result[1:, 0] = positions
    result[1:, 1] = targets - (ends[positions] - read[positions])
    return result


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
    loop = _compiled()["blend"] if size * len(weights) >= COMPILE_ABOVE // 10 and _has_numba() else _blend
    loop(weights, dataset_index, dataset_sample_index)
    return dataset_index, dataset_sample_index


def blend_exhaustively(sizes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Choose as `blend` does with weights by size, until every dataset has given all its samples."""
    size = int(sizes.sum())
    dataset_index = np.zeros(size, dtype=np.int16)
    dataset_sample_index = np.zeros(size, dtype=np.int64)
    is_large = size * len(sizes) >= COMPILE_ABOVE // 10
    loop = _compiled()["blend_exhaustively"] if is_large and _has_numba() else _blend_exhaustively
    loop(sizes, sizes / size, dataset_index, dataset_sample_index)
    return dataset_index, dataset_sample_index


def _shuffle(array: Any, key: Any, position: int) -> int:  # pragma: no cover - compiled
    """Fisher-Yates with masked rejection on MT19937's 32-bit outputs (numpy legacy `shuffle`)."""
    for i in range(len(array) - 1, 0, -1):
        mask = np.uint32(i)
        mask |= mask >> np.uint32(1)
        mask |= mask >> np.uint32(2)
        mask |= mask >> np.uint32(4)
        mask |= mask >> np.uint32(8)
        mask |= mask >> np.uint32(16)
        while True:
            if position == 624:
                for n in range(624):
                    y = (key[n] & np.uint32(0x80000000)) | (key[(n + 1) % 624] & np.uint32(0x7FFFFFFF))
                    value = key[(n + 397) % 624] ^ (y >> np.uint32(1))
                    if y & np.uint32(1):
                        value ^= np.uint32(0x9908B0DF)
                    key[n] = value
                position = 0
            y = key[position]
            position += 1
            y ^= y >> np.uint32(11)
            y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
            y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
            y ^= y >> np.uint32(18)
            j = y & mask
            if j <= np.uint32(i):
                break
        array[i], array[j] = array[j], array[i]
    return position


def _starts(lengths: Any, document_index: Any, seq_length: int, extra: int, result: Any) -> None:  # pragma: no cover
    position = 0
    before = 0  # tokens before `position`
    last = len(document_index) - 1
    for k in range(1, len(result)):
        target = k * seq_length
        while position < last and before + lengths[document_index[position]] < target + extra:
            before += lengths[document_index[position]]
            position += 1
        result[k, 0] = position
        result[k, 1] = target - before


def _blend(weights: Any, dataset_index: Any, dataset_sample_index: Any) -> None:
    taken = np.zeros(len(weights), dtype=np.int64)
    for i in range(len(dataset_index)):
        factor = float(max(i, 1))
        chosen = 0
        largest = weights[0] * factor - taken[0]
        for d in range(1, len(weights)):
            deficit = weights[d] * factor - taken[d]
            if deficit > largest:
                chosen = d
                largest = deficit
        dataset_index[i] = chosen
        dataset_sample_index[i] = taken[chosen]
        taken[chosen] += 1


def _blend_exhaustively(sizes: Any, weights: Any, dataset_index: Any, dataset_sample_index: Any) -> None:
    taken = np.zeros(len(weights), dtype=np.int64)
    for i in range(len(dataset_index)):
        factor = float(max(i, 1))
        chosen = -1
        largest = 0.0
        for d in range(len(weights)):
            if taken[d] < sizes[d]:
                deficit = weights[d] * factor - taken[d]
                if chosen < 0 or deficit > largest:
                    chosen = d
                    largest = deficit
        dataset_index[i] = chosen
        dataset_sample_index[i] = taken[chosen]
        taken[chosen] += 1


@cache
def _has_numba() -> bool:
    from importlib.util import find_spec

    return find_spec("numba") is not None


@cache
def _compiled() -> dict[str, Any]:
    import numba

    loops = {"shuffle": _shuffle, "starts": _starts, "blend": _blend, "blend_exhaustively": _blend_exhaustively}
    # No fastmath: a fused multiply-add would decide near ties of a blend the other way.
    return {name: numba.njit(cache=True)(loop) for name, loop in loops.items()}
