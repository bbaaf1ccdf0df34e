"""A dataset: the shards of an artifact (or one foreign pair) as one row of token sequences.

Sequences and documents are numbered through all shards. Nothing is copied: tokens stay
memory-mapped, and only lengths are held (4 bytes a sequence).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.artifact import MANIFEST, Artifact, read_artifact
from contracts.errors import ConfigError, InputError
from contracts.files import user_path
from preprocessing.dataset.indexed_dataset import IndexedDataset, pair_prefix
from preprocessing.ingestion.document_table import DOCUMENTS
from preprocessing.reading.recorded import found_place
from preprocessing.tokenization.loading import load_tokenizer
from preprocessing.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer


class TokenDataset:
    """All sequences of a dataset.

    Args:
        path: A dataset artifact, a folder of pairs, or the prefix of one pair.

    Raises:
        ConfigError: There is no dataset at `path`.
        InputError: It is unfinished or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = user_path(path)
        self.artifact = _artifact_at(self.path)
        self.shards = [IndexedDataset(prefix) for prefix in self._prefixes()]
        dtypes = {shard.dtype for shard in self.shards}
        if len(dtypes) > 1:
            raise InputError(f"{self.path}: its shards hold different token types ({', '.join(map(str, dtypes))}).")
        self.dtype: np.dtype[Any] = self.shards[0].dtype
        counts = [0, *(len(shard) for shard in self.shards)]
        self.shard_starts: npt.NDArray[np.int64] = np.cumsum(np.array(counts, dtype=np.int64))

    def _prefixes(self) -> list[Path]:
        if self.artifact is not None:
            names = sorted(entry.path for entry in self.artifact.manifest.files if entry.path.endswith(".idx"))
        elif self.path.is_dir():
            names = sorted(path.name for path in self.path.glob("*.idx"))
        else:
            return [pair_prefix(self.path)]
        if not names:
            raise ConfigError(f"{self.path}: holds no .bin/.idx pair, so it is no dataset.")
        return [pair_prefix(self.path / name) for name in names]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every sequence: (sequences,); a copy where there are several shards."""
        if len(self.shards) == 1:
            return self.shards[0].lengths
        return np.concatenate([shard.lengths for shard in self.shards])

    @cached_property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every document: (documents,)."""
        parts = [np.empty(0, np.int64)]
        for shard in self.shards:
            totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(shard.lengths, dtype=np.int64)])
            parts.append(np.diff(totals[np.asarray(shard.document_bounds)]))
        return np.concatenate(parts)

    @property
    def num_sequences(self) -> int:
        return int(self.shard_starts[-1])

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def summary(self) -> Mapping[str, Any]:
        """Numbers of the ingest stage; empty for foreign pairs."""
        return self.artifact.summary if self.artifact is not None else {}

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this dataset from another: content digest of an artifact, sizes of a foreign pair."""
        content = self.artifact.manifest.content if self.artifact is not None else None
        return {"content": content, "sequences": self.num_sequences, "tokens": self.num_tokens}

    @property
    def vocab_size(self) -> int | None:
        """Highest token id + 1 of the tokenizer; None where no tokenizer is known."""
        return self.summary.get("vocab_size")

    @property
    def eod_id(self) -> int | None:
        return self.summary.get("eod_id")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the dataset.

        Raises:
            ConfigError: The dataset keeps no copy of it, as foreign pairs do not.
        """
        return load_tokenizer(self.path)

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer" / TOKENIZER_FILE).is_file()

    def document(self, number: int) -> npt.NDArray[Any]:
        """Return the tokens of a document."""
        for shard in self.shards:
            if number < shard.num_documents:
                return shard.document(number)
            number -= shard.num_documents
        raise IndexError(f"{self.path} has {self.num_documents} documents")

    def sequences_of(self, document: int) -> list[npt.NDArray[Any]]:
        """Return the tokens of each sequence of a document."""
        for shard in self.shards:
            if document < shard.num_documents:
                first, stop = shard.document_bounds[document : document + 2].tolist()
                return [shard.sequence(number) for number in range(first, stop)]
            document -= shard.num_documents
        raise IndexError(f"{self.path} has {self.num_documents} documents")

    def last_tokens(self, count: int) -> npt.NDArray[np.int64]:
        """Return the last token of each of the first documents, -1 of an empty one; reads no other token.

        Returns:
            (count,).
        """
        parts = [np.empty(0, np.int64)]
        for shard in self.shards:
            parts.append(shard.last_tokens(min(count, shard.num_documents)))
            count -= len(parts[-1])
        return np.concatenate(parts)

    def sequence(self, number: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Return the tokens of a sequence, or a part of them, as a view of the file."""
        shard = int(np.searchsorted(self.shard_starts, number, side="right")) - 1
        return self.shards[shard].sequence(number - int(self.shard_starts[shard]), offset, length)

    def gather(
        self,
        numbers: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
    ) -> None:
        """Copy stretches of sequences one after the other into `out`: (tokens,).

        Args:
            numbers, offsets, lengths: (stretches,) sequence, first token in it, tokens.

        Raises:
            ValueError: The stretches do not fill `out`.
        """
        ends = np.cumsum(lengths)
        if (int(ends[-1]) if len(ends) else 0) != len(out):
            raise ValueError(f"{len(out)} tokens were asked; the stretches hold {int(ends[-1]) if len(ends) else 0}")
        if len(self.shards) == 1:
            self.shards[0].gather(numbers, offsets, ends - lengths, ends, out)
            return
        shard_numbers = np.searchsorted(self.shard_starts, numbers, side="right") - 1
        for shard in np.unique(shard_numbers).tolist():
            chosen = np.flatnonzero(shard_numbers == shard)
            inner = numbers[chosen] - int(self.shard_starts[shard])
            stops = ends[chosen]
            self.shards[shard].gather(inner, offsets[chosen], stops - lengths[chosen], stops, out)

    def place_in_document(self, number: int, offset: int) -> tuple[int, int]:
        """Return the document that holds token `offset` of a sequence, and the token's place in it."""
        shard_number = int(np.searchsorted(self.shard_starts, number, side="right")) - 1
        shard = self.shards[shard_number]
        inner = number - int(self.shard_starts[shard_number])
        document = int(np.searchsorted(shard.document_bounds, inner, side="right")) - 1
        earlier = shard.lengths[int(shard.document_bounds[document]) : inner].sum(dtype=np.int64)
        first = sum(item.num_documents for item in self.shards[:shard_number])
        return first + document, int(earlier) + offset

    def column(self, name: str) -> list[Any] | None:
        """Return one column of `documents.parquet`, by document; None where there is no such table."""
        import pyarrow.parquet as pq

        table_path = self.path / DOCUMENTS
        if not table_path.is_file():
            return None
        values: list[Any] = pq.read_table(table_path, columns=[name]).column(0).to_pylist()
        return values

    @cached_property
    def source_paths(self) -> dict[str, str]:
        """Where each source file lay at ingest; files inside the store are found after it was moved."""
        sources = self.summary.get("sources", [])
        return {item["name"]: found_place(item["path"], self.path) for item in sources}

    def document_rows(self, documents: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
        """Return the rows of `documents.parquet` for some documents, in their order.

        Raises:
            InputError: The dataset has no such table, as foreign pairs have none.
        """
        import pyarrow.parquet as pq

        table_path = self.path / DOCUMENTS
        if not table_path.is_file():
            raise InputError(f"{self.path}: has no {DOCUMENTS}, so documents cannot be traced to their sources.")
        file = pq.ParquetFile(table_path)
        wanted = np.unique(documents)
        rows: dict[int, dict[str, Any]] = {}
        first = 0
        for group in range(file.num_row_groups):
            last = first + file.metadata.row_group(group).num_rows
            inside = wanted[(wanted >= first) & (wanted < last)]
            if len(inside):
                for row in file.read_row_group(group).take(inside - first).to_pylist():
                    rows[row["document"]] = row
            first = last
        return [rows[int(number)] for number in documents]

    def document_subsets(self) -> tuple[npt.NDArray[np.int64], list[str]]:
        """Return the subset of every document as a number, and the names that the numbers stand for.

        Raises:
            InputError: The dataset has no `documents.parquet`, as foreign pairs have none.
        """
        import pyarrow.parquet as pq

        table_path = self.path / DOCUMENTS
        if not table_path.is_file():
            raise InputError(f"{self.path}: has no {DOCUMENTS}, so it is not known which subset a document is of.")
        column = pq.read_table(table_path, columns=["subset"]).column("subset").combine_chunks().dictionary_encode()
        names = [str(name) for name in column.dictionary.to_pylist()]
        return column.indices.fill_null(len(names)).to_numpy().astype(np.int64), [*names, "none"]


def refuse_mixed_tokenizers(datasets: Sequence[TokenDataset]) -> None:
    """Make sure that ids mean the same in all datasets whose tokenizer is known.

    Raises:
        ConfigError: Two of them keep different tokenizers.
    """
    known = [dataset for dataset in datasets if dataset.has_tokenizer]
    for dataset in known[1:]:
        if dataset.tokenizer.definition != known[0].tokenizer.definition:
            raise ConfigError(
                f"{dataset.path} and {known[0].path} were made with different tokenizers: their tokenizer.json differ, "
                "so their ids do not mean the same. Ingest one of them again with the other's tokenizer."
            )


def pair_files(path: str | Path) -> dict[str, Path]:
    """Name the files of foreign pairs, for the digests of a stage that is given them by path.

    Args:
        path: As for `TokenDataset`.

    Returns:
        `.bin` and `.idx` of a prefix; `/NAME.bin` and `/NAME.idx` of each pair in a folder; {} of an artifact.
    """
    path = user_path(path)
    if (path / MANIFEST).is_file():
        return {}
    prefixes = {"": pair_prefix(path)}
    if path.is_dir():
        prefixes = {f"/{file.stem}": pair_prefix(file) for file in sorted(path.glob("*.idx"))}
    return {
        f"{name}{suffix}": prefix.with_name(f"{prefix.name}{suffix}")
        for name, prefix in prefixes.items()
        for suffix in (".bin", ".idx")
    }


def artifact_content(path: str | Path) -> str | None:
    """Return the content digest of a dataset artifact that is given by path; None for foreign pairs.

    The manifest itself also tells when and where it was built, so its digest would tell equal datasets apart.
    """
    path = user_path(path)
    return read_artifact(path).manifest.content if (path / MANIFEST).is_file() else None


def artifact_contents(paths: Sequence[str]) -> dict[str, str]:
    """Name the dataset artifacts among `paths` by their content: `dataset{number}` to digest."""
    found = {f"dataset{number}": artifact_content(path) for number, path in enumerate(paths)}
    return {name: content for name, content in found.items() if content is not None}


def _artifact_at(path: Path) -> Artifact | None:
    if not path.is_dir():
        return None
    if not (path / MANIFEST).exists():
        if (path / "recipe.json").exists():
            read_artifact(path)  # says that it is unfinished
        return None
    artifact = read_artifact(path)
    if artifact.kind != "dataset":
        raise ConfigError(f"{path} is an artifact of kind {artifact.kind}; a dataset is needed here.")
    return artifact
