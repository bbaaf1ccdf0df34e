"""Parts of a blend: whole datasets, or the subsets of one; and which of their sequences a split reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError
from preprocessing.dataset.hash_split import document_keys, places, token_keys
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.ingestion.document_table import DOCUMENTS
from preprocessing.ingestion.encoding import NO_SUBSET
from preprocessing.samples.sample_index import Units
from preprocessing.samples.splits import split_range

Asked = int | Callable[[int], int] | None
"""Samples asked of a part, or a function that tells them by the samples of one epoch; None for one epoch."""
MAX_PARTS = 2**15 - 1  # parts are numbered in 16 bits, as in Megatron-LM's blends


@dataclass(frozen=True)
class Part:
    """What a blend draws from under one weight.

    Args:
        dataset: Number of the dataset.
        tokens: It, opened.
        subset: Only documents of this subset; None means all.
    """

    dataset: int
    tokens: TokenDataset
    subset: str | None = None

    @property
    def name(self) -> str:
        return str(self.tokens.path) if self.subset is None else f"{self.subset} of {self.tokens.path}"

    @cached_property
    def _documents(self) -> Units:
        """Numbers of the documents."""
        if self.subset is None:
            return range(self.tokens.num_documents)
        names = np.array([name or NO_SUBSET for name in _column(self.tokens, "subset")], dtype=object)
        return np.flatnonzero(names == self.subset)

    def units(self, bounds: tuple[float, float], *, by: str, seed: int) -> Units:
        """Return the sequences that a split reads.

        Args:
            bounds: Of the split, from 0 to 1.
            by: "position" (Megatron-LM's rule, over sequences), or "hash" of each document.
            seed: Of the division by hash.
        """
        if by == "hash":
            return self._sequences(self.documents(bounds, by=by, seed=seed))
        if self.subset is None:
            return split_range(bounds, self.tokens.num_sequences)
        units = self._sequences(np.asarray(self._documents))
        chosen = split_range(bounds, len(units))
        return units[chosen.start : chosen.stop]

    def documents(self, bounds: tuple[float, float], *, by: str, seed: int) -> npt.NDArray[np.int64]:
        """Return the documents that a split reads, by number; arguments as for `units`, positions over documents."""
        numbers = np.arange(self.tokens.num_documents)[_indexer(self._documents)]
        if by == "hash":
            at = places(_keys(self.tokens)[numbers], seed)
            return np.asarray(numbers[(at >= bounds[0]) & (at < bounds[1])])
        chosen = split_range(bounds, len(numbers))
        return np.asarray(numbers[chosen.start : chosen.stop])

    def sentences(self, documents: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first sequence of each document, and one past its last: (documents,) each."""
        firsts, counts = _sequences_of_documents(self.tokens)
        return firsts[documents], firsts[documents] + counts[documents]

    def _sequences(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of all sequences of some documents."""
        firsts, counts = _sequences_of_documents(self.tokens)
        firsts, counts = firsts[documents], counts[documents]
        return np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def find_parts(datasets: Sequence[TokenDataset], subsets: Sequence[str]) -> list[Part]:
    """List the parts of a blend, in the order of their weights.

    Raises:
        ConfigError: Subsets are named for several datasets, or the dataset has no such subset; or there are too many.
    """
    if len(datasets) > MAX_PARTS:
        raise ConfigError(f"index: {len(datasets)} datasets; the format of a blend ends at {MAX_PARTS}. Merge some.")
    if not subsets:
        return [Part(number, dataset) for number, dataset in enumerate(datasets)]
    if len(datasets) != 1:
        raise ConfigError(f"index.subsets names subsets of one dataset; {len(datasets)} datasets were given.")
    known = sorted({name or NO_SUBSET for name in set(_column(datasets[0], "subset"))})
    for name in subsets:
        if name not in known:
            raise ConfigError(f"index.subsets: {datasets[0].path} has no subset {name!r}; it has {', '.join(known)}.")
    if len(set(subsets)) < len(subsets):
        raise ConfigError("index.subsets names a subset twice.")
    return [Part(0, datasets[0], name) for name in subsets]


def _column(dataset: TokenDataset, name: str) -> list[Any]:
    column = dataset.column(name)
    if column is None:
        raise ConfigError(f"{dataset.path} has no {DOCUMENTS}, so its documents have no {name}.")
    return column


def _keys(dataset: TokenDataset) -> npt.NDArray[np.uint64]:
    digests = dataset.column("digest")
    if digests is not None:
        return document_keys(digests)
    return token_keys([dataset.document(number) for number in range(dataset.num_documents)])


def _indexer(units: Units) -> Any:
    return slice(units.start, units.stop) if isinstance(units, range) else units


def _sequences_of_documents(dataset: TokenDataset) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first sequence of each document in the dataset, and how many it has."""
    firsts = [
        shard.document_bounds[:-1] + start
        for shard, start in zip(dataset.shards, dataset.shard_starts[:-1], strict=True)
    ]
    counts = [np.diff(shard.document_bounds) for shard in dataset.shards]
    return np.concatenate(firsts).astype(np.int64), np.concatenate(counts).astype(np.int64)
