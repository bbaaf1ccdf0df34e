"""Whether two indices begin with the same samples: may a run go on with the other one?"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.samples.index_files import OpenedIndex, load_array, read_description

Described = list[npt.NDArray[Any]]


def first_difference(a: Path, b: Path, count: int) -> int | None:
    """Return the number of the first training sample, of `count`, in which two indices differ; None if there is none.

    Samples are the same when they begin and end at the same tokens of the same documents of the same datasets.
    An index that ends earlier differs at its end.
    """
    first, second = (_open(path) for path in (a, b))
    own = ("datasets", "seq_length", "objective", "parts")
    if any(first.description.get(key) != second.description.get(key) for key in own):
        return 0
    length = min(count, first.num_samples, second.num_samples)
    ids = np.arange(length, dtype=np.int64)
    is_other = np.zeros(length, dtype=bool)
    for x, y in zip(_described(first, ids), _described(second, ids), strict=True):
        is_other |= x != y
    if is_other.any():
        return int(np.flatnonzero(is_other)[0])
    return length if length < count else None


def _open(path: Path) -> OpenedIndex:
    """Open the training samples of an index without its datasets."""
    description = read_description(path)
    numbers = description["splits"]["train"]
    if "datasets" not in numbers:
        return OpenedIndex(path, "train", description, [], (0,), None, None)
    arrays = (load_array(path / f"train_{name}.npy") for name in ("dataset_index", "dataset_sample_index"))
    return OpenedIndex(path, "train", description, [], tuple(int(n[7:]) for n in numbers["datasets"]), *arrays)


def _described(index: OpenedIndex, ids: npt.NDArray[np.int64]) -> Described:
    """Part, first document, first token, last document, last token and number of documents: (samples,) each."""
    chosen, inner = index.locate(ids)
    found = [np.zeros(len(ids), dtype=np.int64) for _ in range(5)]
    for part in np.unique(chosen).tolist():
        here = np.flatnonzero(chosen == part)
        documents, samples = index.array(part, "document_index"), index.array(part, "sample_index")
        rows = index.array(part, "shuffle_index")[inner[here]].astype(np.int64)
        starts, stops = samples[rows].astype(np.int64), samples[rows + 1].astype(np.int64)
        first, last = starts[:, 0], np.minimum(stops[:, 0], len(documents) - 1)
        values = (documents[first], starts[:, 1], documents[last], stops[:, 1], last - first)
        for array, value in zip(found, values, strict=True):
            array[here] = value
    return [chosen, *found]
