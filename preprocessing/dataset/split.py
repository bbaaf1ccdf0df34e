"""The split stage: one part of a dataset, whole documents each, chosen by hash, position or subset.

Train, valid and test of one division are three artifacts with one setting different; by hash, a
document is on the same side whatever else the dataset holds.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError
from contracts.files import user_path
from contracts.stage import Stage
from contracts.store import Workspace
from preprocessing.dataset.config import SplitConfig
from preprocessing.dataset.hash_split import document_keys, places, token_keys
from preprocessing.dataset.indexed_dataset import IndexedDataset, PairWriter
from preprocessing.dataset.merge import AGREED
from preprocessing.dataset.token_dataset import TokenDataset, artifact_content, pair_files
from preprocessing.ingestion.document_table import DOCUMENTS
from preprocessing.ingestion.encoding import NO_SUBSET
from preprocessing.ingestion.shards import shard_name
from preprocessing.samples.splits import SPLITS, parse_split, split_range

CHUNK_DOCUMENTS = 2**16


@dataclass(frozen=True)
class _Chunk:
    """Some documents of one shard: their numbers in it and in the dataset, and their rows, if there is a table."""

    shard: IndexedDataset
    start: int
    first: int
    rows: Any
    count: int


def split(settings: SplitConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Write the chosen documents of a dataset into `workspace.path`; return its numbers.

    Raises:
        ConfigError: No dataset is given, or it has no subset of that name, or no subsets at all.
        InputError: The dataset is damaged, or the part holds no document.
    """
    try:
        dataset = _open(settings, inputs)
        return _split(settings, dataset, workspace)
    except (ConfigError, InputError):
        workspace.discard()
        raise


def _split(settings: SplitConfig, dataset: TokenDataset, workspace: Workspace) -> dict[str, Any]:
    if settings.by == "subset":
        _refuse_unknown_subset(settings.part, dataset)
    pair = PairWriter(workspace.path / shard_name(0), dataset.dtype)
    table = _Table(dataset, workspace.path / DOCUMENTS)
    counts: Counter[str] = Counter()
    subsets: dict[str, Counter[str]] = {}
    try:
        for chunk in _chunks(dataset):
            chosen = np.flatnonzero(_is_chosen(chunk, settings, dataset))
            _append(pair, chunk, chosen)
            table.append(chunk, chosen, counts["documents"])
            counts["documents"] += len(chosen)
            _count(chunk, chosen, counts, subsets)
            workspace.progress.update(
                chunk.first + chunk.count, total=dataset.num_documents, unit="documents", chosen=counts["documents"]
            )
        if not counts["documents"]:
            raise InputError(
                f"{dataset.path}: the part {settings.part!r} by {settings.by} holds none of its "
                f"{dataset.num_documents} documents. Give it a larger weight, or use more data."
            )
        counts["tokens"] = pair.num_tokens
        pair.finish()
        table.finish()
    finally:
        pair.close()
        table.close()
    tokenizer = dataset.path / "tokenizer"
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, workspace.path / "tokenizer", dirs_exist_ok=True)
    return {
        **dict(counts),
        "of_documents": dataset.num_documents,
        "of_tokens": dataset.num_tokens,
        "shards": 1,
        "token_dtype": str(dataset.dtype),
        **{name: dataset.summary[name] for name in AGREED if name in dataset.summary},
        **({"subsets": {name: dict(numbers) for name, numbers in sorted(subsets.items())}} if subsets else {}),
        "sources": [
            {"name": source["name"], "path": str(dataset.source_paths[source["name"]])}
            for source in dataset.summary.get("sources", [])
        ],
        "has_document_table": table.is_there,
    }


def _open(settings: SplitConfig, inputs: Mapping[str, Artifact]) -> TokenDataset:
    if inputs:
        (artifact,) = inputs.values()
        return TokenDataset(artifact.path)
    if settings.dataset is None:
        raise ConfigError("split: no dataset. Name one with --dataset.")
    return TokenDataset(user_path(settings.dataset))


def _refuse_unknown_subset(name: str, dataset: TokenDataset) -> None:
    known = dataset.column("subset")
    if known is None:
        raise ConfigError(f"split.by is subset, but {dataset.path} has no {DOCUMENTS} that names subsets.")
    names = sorted({value or NO_SUBSET for value in set(known)})
    if name not in names:
        raise ConfigError(f"split.part is {name!r}; the subsets of {dataset.path} are {', '.join(names)}.")


def _chunks(dataset: TokenDataset) -> Iterator[_Chunk]:
    tables = _row_groups(dataset)
    first = 0
    for shard in dataset.shards:
        for start in range(0, shard.num_documents, CHUNK_DOCUMENTS):
            count = min(CHUNK_DOCUMENTS, shard.num_documents - start)
            yield _Chunk(shard, start, first, tables(first, count), count)
            first += count


def _row_groups(dataset: TokenDataset) -> Any:
    """Return a function that gives rows `first` up to `first + count`; None where there is no table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = dataset.path / DOCUMENTS
    if not path.is_file():
        return lambda first, count: None
    batches = pq.ParquetFile(path).iter_batches(CHUNK_DOCUMENTS)
    waiting: list[Any] = []

    def rows(first: int, count: int) -> Any:
        while sum(map(len, waiting)) < count:
            waiting.append(next(batches))
        table = pa.Table.from_batches(waiting)
        waiting[:] = table.slice(count).combine_chunks().to_batches()
        return table.slice(0, count).combine_chunks()

    return rows


def _is_chosen(chunk: _Chunk, settings: SplitConfig, dataset: TokenDataset) -> npt.NDArray[np.bool_]:
    if settings.by == "subset":
        names = chunk.rows.column("subset").to_pylist()
        return np.array([(name or NO_SUBSET) == settings.part for name in names], dtype=bool)
    bounds = parse_split(settings.weights)[SPLITS.index(settings.part)]
    if bounds is None:
        return np.zeros(chunk.count, dtype=bool)
    if settings.by == "position":
        chosen = split_range(bounds, dataset.num_documents)
        numbers = np.arange(chunk.first, chunk.first + chunk.count)
        return np.asarray((numbers >= chosen.start) & (numbers < chosen.stop))
    if chunk.rows is not None:
        keys = document_keys(chunk.rows.column("digest").to_pylist())
    else:
        keys = token_keys([chunk.shard.document(chunk.start + n) for n in range(chunk.count)])
    at = places(keys, settings.seed)
    return np.asarray((at >= bounds[0]) & (at < bounds[1]))


def _append(pair: PairWriter, chunk: _Chunk, chosen: npt.NDArray[np.int64]) -> None:
    """Copy documents in runs of neighbours, which lie side by side in the file."""
    if not len(chosen):
        return
    breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
    for run in np.split(chosen + chunk.start, breaks):
        bounds = chunk.shard.document_bounds[run[0] : run[-1] + 2]
        lengths = np.array(chunk.shard.lengths[bounds[0] : bounds[-1]])
        begin = int(chunk.shard.pointers[bounds[0]]) // chunk.shard.dtype.itemsize if len(lengths) else 0
        ids = chunk.shard.tokens[begin : begin + int(lengths.sum(dtype=np.int64))]
        counts = np.diff(bounds)
        if (counts == 1).all():
            pair.append(ids, lengths)
        else:
            pair.append_sequences(ids, lengths, counts.astype(np.int64))


def _count(
    chunk: _Chunk, chosen: npt.NDArray[np.int64], counts: Counter[str], subsets: dict[str, Counter[str]]
) -> None:
    if chunk.rows is None:
        return
    taken = chunk.rows.take(chosen).select(["subset", "bytes", "tokens"]).to_pydict()
    for name, size, tokens in zip(taken["subset"], taken["bytes"], taken["tokens"], strict=True):
        numbers = subsets.setdefault(name or NO_SUBSET, Counter())
        numbers.update(documents=1, tokens=tokens, bytes=size or 0)
        counts["bytes"] += size or 0


class _Table:
    """Writes `documents.parquet` of the part, where the dataset has one."""

    def __init__(self, dataset: TokenDataset, target: Path) -> None:
        self._source = dataset.path / DOCUMENTS
        self.is_there = self._source.is_file()
        self._target = target
        self._writer: Any = None

    def append(self, chunk: _Chunk, chosen: npt.NDArray[np.int64], first: int) -> None:
        """Add the rows of the chosen documents, numbered from `first` on."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self.is_there:
            return
        rows = chunk.rows.take(chosen)
        if self._writer is None:
            schema = rows.schema.remove_metadata()
            self._writer = pq.ParquetWriter(
                self._target.with_name(f"{self._target.name}.tmp"), schema, compression="zstd"
            )
        new = {
            "shard": pa.array(np.zeros(len(chosen), dtype=np.int32)),
            "document": pa.array(np.arange(first, first + len(chosen), dtype=np.int64)),
        }
        arrays = [new.get(name, rows.column(name)) for name in rows.schema.names]
        self._writer.write_table(pa.table(arrays, schema=rows.schema.remove_metadata()))

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._target.with_name(f"{self._target.name}.tmp").replace(self._target)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _raw(settings: SplitConfig) -> dict[str, str]:
    content = None if settings.dataset is None else artifact_content(settings.dataset)
    return {} if content is None else {"dataset": content}


def _raw_files(settings: SplitConfig) -> dict[str, Path]:
    if settings.dataset is None:
        return {}
    files = pair_files(settings.dataset).items()
    return {f"dataset{name if name.startswith('/') else '/pair' + name}": file for name, file in files}


SPLIT = Stage(
    name="split",
    version=1,
    kind="dataset",
    settings=SplitConfig,
    work=split,
    raw_files=_raw_files,
    raw=_raw,
    refuses_changes=True,
)
