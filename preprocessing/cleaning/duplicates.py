"""Duplicates among all documents of a corpus: which ones stay, in bounded memory.

Documents are numbered in corpus order; of equal or similar ones the first stays. Digests and
bands of signatures are sorted, at most GROUP_DOCUMENTS of them at a time: about 250 MB, and at most 48 bytes for
every document besides. Candidates of a band are compared by their whole signatures; those that are
similar enough are joined to clusters, so that a document may be similar to the one that stays only by way
of others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.cleaning.config import MinHashConfig
from preprocessing.cleaning.ngrams import Keys
from preprocessing.cleaning.signatures import NO_WORDS, Signatures, band_keys

GROUP_DOCUMENTS = 2**22
ROWS_AT_ONCE = 2**14  # signatures in memory at a time
MAX_LEADERS = 16  # documents of one group that the others are compared with; bounds the time of a huge group
KEPT = -1

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """A table whose rows, one for each document, lie in several files."""

    parts: Sequence[npt.NDArray[Any]]
    starts: Numbers

    @classmethod
    def of(cls, parts: Sequence[npt.NDArray[Any]]) -> "Columns":
        return cls(parts, np.cumsum([0, *map(len, parts)], dtype=np.int64))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def chunks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield all rows some at a time, each with the number of the first."""
        for part, start in zip(self.parts, self.starts.tolist(), strict=False):
            for first in range(0, len(part), ROWS_AT_ONCE):
                yield start + first, part[first : first + ROWS_AT_ONCE]

    def rows(self, documents: Numbers) -> npt.NDArray[Any]:
        """Return some rows."""
        owners = np.searchsorted(self.starts, documents, side="right") - 1
        result = np.empty((len(documents), *self.parts[0].shape[1:]), self.parts[0].dtype)
        for owner in np.unique(owners).tolist():
            mine = owners == owner
            result[mine] = self.parts[owner][documents[mine] - self.starts[owner]]
        return result


def exact_duplicates(digests: Sequence[Keys]) -> Numbers:
    """Find documents of equal digests.

    Args:
        digests: (documents, 2) of each part.

    Returns:
        (documents,) number of the first document with the same digest; KEPT for the first itself.
    """
    table = Columns.of(digests)
    result = np.full(len(table), KEPT, np.int64)
    num_groups = -(-len(table) // GROUP_DOCUMENTS)
    for group in range(num_groups):
        numbers, keys = _rows_of_group(table, lambda first, rows: (rows, True), group, num_groups)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal ones stay in corpus order
        numbers, keys = numbers[order], keys[order]
        is_first = np.ones(len(keys), dtype=bool)
        is_first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
        firsts = numbers[is_first][np.cumsum(is_first) - 1]
        result[numbers[~is_first]] = firsts[~is_first]
    return result


def near_duplicates(
    signatures: Sequence[Signatures],
    is_left: Flags,
    config: MinHashConfig,
    *,
    tell: Callable[[int], None] = lambda band: None,
) -> Numbers:
    """Find clusters of documents with similar signatures.

    Args:
        signatures: (documents, permutations) of each part.
        is_left: (documents,) those that take part; exact duplicates do not.
        tell: Told the number of each band before its work.

    Returns:
        (documents,) number of the first document of the same cluster; KEPT for the first itself.
    """
    table = Columns.of(signatures)
    clusters = Clusters(len(table))
    num_groups = -(-len(table) // GROUP_DOCUMENTS)
    for band in range(config.bands):
        tell(band)
        for group in range(num_groups):
            numbers, keys = _rows_of_group(table, partial(_keys_of_band, band, config, is_left), group, num_groups)
            order = np.argsort(keys, kind="stable")
            numbers, keys = numbers[order], keys[order]
            is_first = np.ones(len(keys), dtype=bool)
            is_first[1:] = keys[1:] != keys[:-1]
            groups = np.cumsum(is_first) - 1
            is_shared = np.bincount(groups)[groups] > 1 if len(groups) else is_first
            _join_similar(numbers[is_shared], groups[is_shared], table, config.threshold, clusters)
    roots = clusters.roots(np.arange(len(table)))
    return np.where(roots == np.arange(len(table)), KEPT, roots)


class Clusters:
    """Joined documents; a cluster is known by its first."""

    def __init__(self, count: int) -> None:
        self._parents = np.arange(count, dtype=np.int64)

    def roots(self, documents: Numbers) -> Numbers:
        """Return the first document of each one's cluster."""
        found = self._parents[documents]
        while True:
            further = self._parents[found]
            if (further == found).all():
                return found
            found = further

    def join(self, one: int, other: int) -> None:
        """Make the clusters of two documents one."""
        first, second = sorted((self._root(one), self._root(other)))
        self._parents[second] = first

    def _root(self, document: int) -> int:
        parents = self._parents
        while (parent := int(parents[document])) != document:
            parents[document] = parents[parent]  # halves the way for the next
            document = parent
        return document


def _keys_of_band(band: int, config: MinHashConfig, is_left: Flags, first: int, rows: Signatures) -> tuple[Keys, Flags]:
    """Hash one band of some rows; documents without words and those that do not take part are not wanted."""
    return band_keys(rows, band, config.bands), is_left[first : first + len(rows)] & (rows[:, 0] != NO_WORDS)


def _rows_of_group(
    table: Columns, keys_of: Callable[[int, npt.NDArray[Any]], tuple[Keys, Any]], group: int, num_groups: int
) -> tuple[Numbers, Keys]:
    """Return numbers and keys of the documents whose key falls into a group; equal keys fall into one.

    Args:
        keys_of: Returns of some rows, given the number of the first, their keys and which of them are wanted.
    """
    numbers, keys = [], []
    for first, rows in table.chunks():
        found, is_wanted = keys_of(first, rows)
        leading = found if found.ndim == 1 else found[:, 0]
        keep = is_wanted & (leading % np.uint64(num_groups) == group)
        numbers.append(first + np.flatnonzero(keep))
        keys.append(found[keep])
    return np.concatenate(numbers), np.concatenate(keys)


def _join_similar(members: Numbers, groups: Numbers, table: Columns, threshold: float, clusters: Clusters) -> None:
    """Join documents of one group that are similar.

    Args:
        members, groups: Ascending groups, and in each its documents in corpus order. Each is compared with the
            group's first; those that differ from it with the first of the rest, and so on.
    """
    for _ in range(MAX_LEADERS):
        if not len(members):
            return
        is_leader = np.ones(len(groups), dtype=bool)
        is_leader[1:] = groups[1:] != groups[:-1]
        leaders = members[is_leader][np.cumsum(is_leader) - 1]
        members, groups, leaders = members[~is_leader], groups[~is_leader], leaders[~is_leader]
        is_similar = np.empty(len(members), dtype=bool)
        for start in range(0, len(members), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            is_similar[some] = _similarity(table, members[some], leaders[some]) >= threshold
        # Pairs that are joined already are compared too, so that the order of bands and groups makes no difference.
        apart = is_similar & (clusters.roots(members) != clusters.roots(leaders))
        for member, leader in zip(members[apart].tolist(), leaders[apart].tolist(), strict=True):
            clusters.join(member, leader)
        members, groups = members[~is_similar], groups[~is_similar]


def _similarity(table: Columns, some: Numbers, others: Numbers) -> npt.NDArray[np.float64]:
    """Estimate the Jaccard similarity of pairs of documents: (pairs,)."""
    result: npt.NDArray[np.float64] = (table.rows(some) == table.rows(others)).mean(axis=1)
    return result
