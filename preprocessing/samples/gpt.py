"""Reads samples through an index artifact, in batches, without copying more than the samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.artifact import MANIFEST, read_artifact
from contracts.errors import ConfigError, InputError
from contracts.json_text import parse_json
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.reading.recorded import found_path
from preprocessing.samples.index import INDEX_FILE, INDEX_FORMAT


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

    Raises:
        ConfigError: There is no index, no such split, or the datasets are not found.
        InputError: The datasets are not those of the index.
    """

    def __init__(
        self, index_path: str | Path, split: str = "train", datasets: Sequence[str | Path | TokenDataset] = ()
    ) -> None:
        self.path = Path(index_path)
        self.split = split
        self.description = read_description(self.path)
        self.seq_length: int = self.description["seq_length"]
        if split not in self.description["splits"]:
            has = ", ".join(self.description["splits"])
            raise ConfigError(
                f"{self.path} has no split {split!r}; it has {has}. See index.split and index.{split}_samples."
            )
        self.datasets = _open(self.path, self.description, datasets)
        numbers = self.description["splits"][split]
        self.num_samples: int = numbers["samples"]
        self._is_blend = "datasets" in numbers
        if self._is_blend:
            self._parts = {int(name[7:]): self._part(int(name[7:]), self.path / name) for name in numbers["datasets"]}
            self._dataset_index = self._load(self.path / f"{split}_dataset_index.npy")
            self._dataset_sample_index = self._load(self.path / f"{split}_dataset_sample_index.npy")
        else:
            self._parts = {0: self._part(0, self.path)}

    def _part(self, number: int, folder: Path) -> _Part:
        names = ("document_index", "sample_index", "shuffle_index")
        parts = self.description.get("parts")
        dataset = parts[number]["dataset"] if parts else number
        arrays = (self._load(folder / f"{self.split}_{name}.npy") for name in names)
        return _Part(dataset, self.datasets[dataset], *arrays)

    @staticmethod
    def _load(path: Path) -> npt.NDArray[Any]:
        try:
            # A plain view: each slice of a memmap object costs a microsecond more.
            array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read ({error}). Remove the index and build it again.") from error
        return array

    def __len__(self) -> int:
        return self.num_samples

    def tokens(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the tokens of samples: (n, seq_length + 1), int64; inputs are [:, :-1], labels [:, 1:].

        Raises:
            IndexError: A number is not in [0, num_samples).
        """
        ids = np.asarray(sample_ids, dtype=np.int64)
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_samples):
            wrong = int(ids[(ids < 0) | (ids >= self.num_samples)][0])
            raise IndexError(f"sample {wrong} of {self.num_samples} in {self.path} ({self.split})")
        if not self._is_blend:
            return self._rows(self._parts[0], ids)
        result = np.empty((len(ids), self.seq_length + 1), dtype=np.int64)
        chosen, inner = self._dataset_index[ids], self._dataset_sample_index[ids]
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
        pieces = _pieces(part, numbers)
        result = np.empty((len(numbers), self.seq_length + 1), dtype=np.int64)
        part.tokens.gather(pieces.units, pieces.begins, pieces.lengths, result.reshape(-1))
        return result

    def documents_of(self, sample: int) -> list[DocumentSpan]:
        """Say which parts of which documents a sample holds, in order; together seq_length + 1 tokens."""
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples} in {self.path} ({self.split})")
        part = self._parts[int(self._dataset_index[sample])] if self._is_blend else self._parts[0]
        inner = int(self._dataset_sample_index[sample]) if self._is_blend else sample
        found = _pieces(part, np.array([inner], dtype=np.int64))
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


def _pieces(part: _Part, numbers: npt.NDArray[Any]) -> _Pieces:
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
    ends[lasts - 1] = stops[:, 1] + 1
    return _Pieces(units, begins, np.maximum(ends - begins, 0))


def read_description(path: Path) -> dict[str, Any]:
    """Read `index.json`.

    Raises:
        ConfigError: There is no index at `path`.
        InputError: It is damaged, or of another format.
    """
    if (path / MANIFEST).is_file() and read_artifact(path).kind != "index":
        raise ConfigError(f"{path} is an artifact of kind {read_artifact(path).kind}; an index is needed here.")
    try:
        description: dict[str, Any] = parse_json((path / INDEX_FILE).read_text(encoding="utf-8"))
        if not isinstance(description, dict) or not isinstance(description.get("datasets"), list):
            raise ValueError("it lists no datasets")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no sample index here ({INDEX_FILE} is missing).") from None
    except ValueError as error:
        raise InputError(f"{path / INDEX_FILE}: damaged ({error}). Remove the index and build it again.") from error
    if description.get("format") != INDEX_FORMAT:
        raise InputError(f"{path / INDEX_FILE}: has format {description.get('format')}; {INDEX_FORMAT} is known.")
    return description


def _open(path: Path, description: dict[str, Any], datasets: Sequence[str | Path | TokenDataset]) -> list[TokenDataset]:
    given = list(datasets) or _recorded_datasets(path)
    wanted = description["datasets"]
    if len(given) != len(wanted):
        raise ConfigError(f"{path} is the index of {len(wanted)} datasets; {len(given)} were given.")
    opened = [item if isinstance(item, TokenDataset) else TokenDataset(item) for item in given]
    for number, (dataset, identity) in enumerate(zip(opened, wanted, strict=True)):
        if dataset.identity != identity:
            raise InputError(
                f"{dataset.path} is not dataset {number} of the index {path}: it has {dataset.identity}, the index was "
                f"made for {identity}. Build the index again."
            )
    return opened


def _recorded_datasets(path: Path) -> list[Path]:
    """Find the datasets that the index's manifest names."""
    if not (path / MANIFEST).is_file():
        raise ConfigError(f"{path} has no {MANIFEST} that names its datasets; give them.")
    paths = [found_path(recorded, path) for recorded in read_artifact(path).summary["datasets"]]
    for dataset in paths:
        if not dataset.exists() and not dataset.with_name(f"{dataset.name}.idx").exists():
            raise ConfigError(f"{path} was made for {dataset}, which is not there. Move it back, or its store.")
    return paths
