"""Reads samples through an index artifact, in batches, without copying more than the samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.index_files import open_index


@dataclass(frozen=True)
class DocumentSpan:
    """A part of a document inside a sample.

    Args:
        dataset: Number of the dataset in the index.
        document: Number of the document in the dataset.
        offset: First token, counted in the document (EOD and BOS included).
        length: Tokens taken. The last token of a sample is the first of the sample that follows it.
    """

    dataset: int
    document: int
    offset: int
    length: int


class DocumentSamples(Protocol):
    """Causal samples that say which documents they hold."""

    @property
    def datasets(self) -> Sequence[TokenDataset]:
        """Those that `DocumentSpan.dataset` numbers."""
        ...

    def tokens(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the tokens of samples: (n, row_tokens), int64."""
        ...

    def documents_of(self, sample: int) -> list[DocumentSpan]:
        """Say which parts of which documents a sample holds, in the order of its tokens."""
        ...


@dataclass(frozen=True)
class _Part:
    """The index of one dataset, or of one subset of it.

    Args:
        dataset: Its number in the index.
    """

    dataset: int
    tokens: TokenDataset
    document_index: npt.NDArray[Any]
    sample_index: npt.NDArray[Any]
    shuffle_index: npt.NDArray[Any]


class GPTSamples:
    """Samples of one split: rows of `seq_length + 1` tokens.

    Args:
        index_path: An index artifact, or a folder that `build_index` filled.
        split: "train", "valid" or "test".
        datasets: The datasets it was made for, in its order. Empty: where its manifest says.
        kinds: Objectives whose windows are wanted; other modules make their samples of them.

    Attributes:
        row_tokens: Tokens of a row: `seq_length + 1` for causal samples, the window of others.

    Raises:
        ConfigError: There is no index, no such split, or the datasets are not found.
        InputError: The datasets are not those of the index.
    """

    def __init__(
        self,
        index_path: str | Path,
        split: str = "train",
        datasets: Sequence[str | Path | TokenDataset] = (),
        *,
        kinds: Sequence[str] = ("causal",),
    ) -> None:
        self.index = open_index(Path(index_path), split, datasets, kinds=kinds)
        description = self.index.description
        self.seq_length: int = description["seq_length"]
        self.row_tokens: int = description.get("row_tokens", self.seq_length + 1)
        # Neighbouring causal samples share a token: the label of one's last position is the next one's first input.
        self._shared_tokens = 1 if "row_tokens" not in description else 0
        self.datasets = self.index.datasets
        self.num_samples = self.index.num_samples
        self._parts = {number: self._part(number) for number in self.index.parts}

    def _part(self, number: int) -> _Part:
        dataset = self.index.dataset_number(number)
        arrays = (self.index.array(number, name) for name in ("document_index", "sample_index", "shuffle_index"))
        return _Part(dataset, self.datasets[dataset], *arrays)

    def __len__(self) -> int:
        return self.num_samples

    def tokens(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the tokens of samples: (n, row_tokens), int64; of causal ones inputs are [:, :-1], labels [:, 1:].

        Raises:
            IndexError: A number is not in [0, num_samples).
        """
        ids = np.asarray(sample_ids, dtype=np.int64)
        chosen, inner = self.index.locate(ids)
        if self.index.chosen is None:
            return self._rows(self._parts[0], inner)
        result = np.empty((len(ids), self.row_tokens), dtype=np.int64)
        for number in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == number)
            result[rows] = self._rows(self._parts[number], inner[rows])
        return result

    __getitems__ = tokens
    """What a torch DataLoader asks for a batch; iterating over the answer gives one row for each sample."""

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Return the tokens of one sample: (seq_length + 1,), int64."""
        row: npt.NDArray[np.int64] = self.tokens([sample])[0]
        return row

    def _rows(self, part: _Part, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the tokens of samples of one part; neighbours in the result are copied piece by piece, in order."""
        pieces = _pieces(part, numbers, self._shared_tokens)
        result = np.empty((len(numbers), self.row_tokens), dtype=np.int64)
        part.tokens.gather(pieces.units, pieces.begins, pieces.lengths, result.reshape(-1))
        return result

    def documents_of(self, sample: int) -> list[DocumentSpan]:
        """Say which parts of which documents a sample holds, in order; together seq_length + 1 tokens."""
        chosen, inner = self.index.locate(np.array([sample], dtype=np.int64))
        part = self._parts[int(chosen[0])]
        found = _pieces(part, inner, self._shared_tokens)
        rows = zip(found.units.tolist(), found.begins.tolist(), found.lengths.tolist(), strict=True)
        return [
            DocumentSpan(part.dataset, *part.tokens.place_in_document(unit, begin), length)
            for unit, begin, length in rows
            if length
        ]


@dataclass(frozen=True)
class _Pieces:
    """Stretches of sequences that make up samples, in order: (pieces,) sequence, first token, tokens."""

    units: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def _pieces(part: _Part, numbers: npt.NDArray[Any], shared_tokens: int) -> _Pieces:
    rows = part.shuffle_index[numbers].astype(np.int64)
    starts, stops = part.sample_index[rows].astype(np.int64), part.sample_index[rows + 1].astype(np.int64)
    counts = stops[:, 0] - starts[:, 0] + 1
    lasts = np.cumsum(counts)
    firsts = lasts - counts
    positions = np.arange(int(counts.sum())) + np.repeat(starts[:, 0] - firsts, counts)
    units = part.document_index[positions].astype(np.int64)
    begins = np.zeros(len(units), dtype=np.int64)
    begins[firsts] = starts[:, 1]
    ends = part.tokens.lengths[units].astype(np.int64)
    ends[lasts - 1] = stops[:, 1] + shared_tokens
    return _Pieces(units, begins, np.maximum(ends - begins, 0))
