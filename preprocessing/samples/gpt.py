"""Reads samples through an index artifact, in batches, without copying more than the samples."""

from collections.abc import Iterator, Sequence
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
    """The index of one dataset."""

    dataset: TokenDataset
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
        return _Part(self.datasets[number], *(self._load(folder / f"{self.split}_{name}.npy") for name in names))

    @staticmethod
    def _load(path: Path) -> npt.NDArray[Any]:
        try:
            array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
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
        result = np.empty((len(sample_ids), self.seq_length + 1), dtype=np.int64)
        for row, number in enumerate(sample_ids):
            at = 0
            for part, unit, offset, length in self._pieces(int(number)):
                result[row, at : at + length] = part.dataset.sequence(unit, offset, length)
                at += length
        return result

    def documents_of(self, sample: int) -> list[DocumentSpan]:
        """Say which parts of which documents a sample holds, in order; together seq_length + 1 tokens."""
        number = int(self._dataset_index[sample]) if self._is_blend else 0
        return [
            DocumentSpan(number, *part.dataset.place_in_document(unit, offset), length)
            for part, unit, offset, length in self._pieces(sample)
        ]

    def _pieces(self, sample: int) -> Iterator[tuple[_Part, int, int, int]]:
        """Yield the non-empty parts of a sample: dataset, sequence, first token, tokens."""
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples} in {self.path} ({self.split})")
        part = self._parts[int(self._dataset_index[sample])] if self._is_blend else self._parts[0]
        inner = int(self._dataset_sample_index[sample]) if self._is_blend else sample
        row = int(part.shuffle_index[inner])
        first, start = map(int, part.sample_index[row])
        last, stop = map(int, part.sample_index[row + 1])
        for position in range(first, last + 1):
            unit = int(part.document_index[position])
            begin = start if position == first else 0
            end = stop + 1 if position == last else int(part.dataset.lengths[unit])
            if end > begin:
                yield part, unit, begin, end - begin


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
