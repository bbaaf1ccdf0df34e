"""An index on disk, opened: its description, its datasets, and which part of a blend gives each sample."""

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

INDEX_FILE = "index.json"
INDEX_FORMAT = 1


@dataclass(frozen=True)
class OpenedIndex:
    """One split of an index.

    Args:
        description: Content of `index.json`.
        datasets: Those that the index was made for, in its order.
        parts: Numbers of the parts that are drawn from: datasets, or subsets of the one dataset.
        chosen, inner: (samples,) which part gives a sample, and which of the part's samples it is; None where
            there is no blend.
    """

    path: Path
    split: str
    description: dict[str, Any]
    datasets: list[TokenDataset]
    parts: tuple[int, ...]
    chosen: npt.NDArray[Any] | None
    inner: npt.NDArray[Any] | None

    @property
    def num_samples(self) -> int:
        samples: int = self.description["splits"][self.split]["samples"]
        return samples

    @property
    def objective(self) -> dict[str, Any]:
        """Settings of the objective that the index was built for."""
        found: dict[str, Any] = self.description.get("objective", {"kind": "causal"})
        return found

    def array(self, part: int, name: str) -> npt.NDArray[Any]:
        """Map one of the arrays of a part, such as "document_index"."""
        folder = self.path if self.chosen is None else self.path / f"dataset{part}"
        return load_array(folder / f"{self.split}_{name}.npy")

    def dataset_number(self, part: int) -> int:
        """Return the number of the dataset that a part belongs to."""
        parts = self.description.get("parts")
        return int(parts[part]["dataset"]) if parts else part

    def check(self, sample_ids: npt.NDArray[np.int64]) -> None:
        """Raise IndexError if a number is not in [0, num_samples)."""
        is_wrong = (sample_ids < 0) | (sample_ids >= self.num_samples)
        if is_wrong.any():
            wrong = int(sample_ids[is_wrong][0])
            raise IndexError(f"sample {wrong} of {self.num_samples} in {self.path} ({self.split})")

    def locate(self, sample_ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the part of each sample, and its number in the part: (samples,) each.

        Raises:
            IndexError: A number is not in [0, num_samples).
        """
        self.check(sample_ids)
        if self.chosen is None or self.inner is None:
            return np.zeros(len(sample_ids), dtype=np.int16), sample_ids
        return self.chosen[sample_ids], self.inner[sample_ids]


def open_index(
    path: Path, split: str, datasets: Sequence[str | Path | TokenDataset], *, kinds: Sequence[str]
) -> OpenedIndex:
    """Open one split of an index.

    Args:
        datasets: The datasets it was made for, in its order. Empty: where its manifest says.
        kinds: Objectives that the caller can read.

    Raises:
        ConfigError: There is no index, no such split, it is for another objective, or datasets are not found.
        InputError: The datasets are not those of the index.
    """
    description = read_description(path)
    if split not in description["splits"]:
        has = ", ".join(description["splits"])
        raise ConfigError(f"{path} has no split {split!r}; it has {has}. See index.split and index.{split}_samples.")
    kind = description.get("objective", {"kind": "causal"})["kind"]
    if kind not in kinds:
        raise ConfigError(
            f"{path} is an index of {kind} samples; {' or '.join(kinds)} is needed here. See index.objective."
        )
    numbers = description["splits"][split]
    opened = _open(path, description, datasets)
    if "datasets" not in numbers:
        return OpenedIndex(path, split, description, opened, (0,), None, None)
    return OpenedIndex(
        *(path, split, description, opened, tuple(int(name[7:]) for name in numbers["datasets"])),
        load_array(path / f"{split}_dataset_index.npy"),
        load_array(path / f"{split}_dataset_sample_index.npy"),
    )


def load_array(path: Path) -> npt.NDArray[Any]:
    """Map a `.npy` file.

    Raises:
        InputError: It is missing or damaged.
    """
    try:
        # A plain view: each slice of a memmap object costs a microsecond more.
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}). Remove the index and build it again.") from error
    return array


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
