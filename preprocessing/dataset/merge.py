"""The merge stage: several datasets become one pair, in constant memory.

The kernel copies the tokens from file to file (`copy_file_range`); the indices are joined a chunk
at a time. The result is byte for byte what Megatron-LM's builder makes with `add_index`, document
bounds included.
"""

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError
from contracts.files import user_path
from contracts.progress import Progress
from contracts.stage import Stage
from contracts.store import Workspace
from preprocessing.dataset.config import MergeConfig
from preprocessing.dataset.indexed_dataset import CHUNK_SEQUENCES, IndexedDataset, index_header
from preprocessing.dataset.token_dataset import TokenDataset, artifact_contents, pair_files, refuse_mixed_tokenizers
from preprocessing.ingestion.document_table import DOCUMENTS
from preprocessing.ingestion.shards import REJECTS, shard_name

COPY_BYTES = 2**27  # asked of the kernel at a time, so that progress moves
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)

# What a summary counts, added up; and what must agree, because it says how the tokens were made.
ADDED = (
    *("lines", "documents", "empty", "filtered", "rejected", "tokens", "bytes", "damaged_files"),
    *("replaced_characters", "replaced_records", "byte_order_marks", "special_tokens_in_text"),
)
AGREED = ("vocab_size", "append_eod", "eod_id", "eod_token", "add_bos", "bos_id")


def merge(settings: MergeConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Join datasets into `workspace.path`; return the numbers of the whole.

    Raises:
        ConfigError: No dataset is given, or they were made with different tokenizers.
        InputError: A dataset is damaged, or their token types differ.
    """
    try:
        datasets = [TokenDataset(path) for path in _paths(settings, inputs)]
        agreed = _agreed(datasets)
        _refuse_mixed_types(datasets)
        for problem in (problem for item in datasets for shard in item.shards for problem in shard.problems()):
            raise InputError(f"{problem}. Repair or leave out the dataset; merging would spread the damage.")
    except (ConfigError, InputError):
        workspace.discard()
        raise
    shards = [shard for dataset in datasets for shard in dataset.shards]
    merge_pairs(shards, workspace.path / shard_name(0), progress=workspace.progress)
    names = merged_names(datasets)
    has_table = all((dataset.path / DOCUMENTS).is_file() for dataset in datasets)
    if has_table:
        _join_document_tables(datasets, names, workspace.path / DOCUMENTS)
    else:
        workspace.progress.note(f"no {DOCUMENTS}: not every dataset has one, so documents cannot be traced")
    _join_rejects(datasets, names, workspace.path / REJECTS)
    tokenizer = datasets[0].path / "tokenizer"
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, workspace.path / "tokenizer", dirs_exist_ok=True)
    return {**_summary(datasets, names), **agreed, "has_document_table": has_table}


def merge_pairs(shards: Sequence[IndexedDataset], prefix: Path, *, progress: Progress) -> None:
    """Join pairs of one token type into the pair `prefix`, in constant memory."""
    bin_path, idx_path = (prefix.with_name(f"{prefix.name}{suffix}") for suffix in (".bin", ".idx"))
    with bin_path.with_name(f"{bin_path.name}.tmp").open("wb") as target:
        total = sum(shard.num_tokens for shard in shards) * shards[0].dtype.itemsize
        done = 0
        for shard in shards:
            for copied in copy_bytes(shard.bin_path, target):
                done += copied
                progress.update(done, total=total, unit="bytes")
        target.flush()
        os.fsync(target.fileno())
    with idx_path.with_name(f"{idx_path.name}.tmp").open("wb") as index:
        sequences = sum(len(shard) for shard in shards)
        documents = sum(shard.num_documents for shard in shards)
        index.write(index_header(shards[0].dtype, sequences, documents))
        for piece in _joined_index(shards):
            index.write(piece.data)
        index.flush()
        os.fsync(index.fileno())
    for path in (bin_path, idx_path):
        path.with_name(f"{path.name}.tmp").replace(path)


def _joined_index(shards: Sequence[IndexedDataset]) -> Iterator[npt.NDArray[Any]]:
    """Yield lengths, byte offsets and document bounds of the whole, a chunk at a time."""
    for shard in shards:
        yield from _chunks(shard.lengths)
    at = 0
    for shard in shards:
        for lengths in _chunks(shard.lengths):
            ends = np.cumsum(lengths, dtype="<i8")
            yield (ends - lengths) * shard.dtype.itemsize + at
            at += int(ends[-1]) * shard.dtype.itemsize
    yield np.zeros(1, dtype="<i8")
    first = 0
    for shard in shards:
        for bounds in _chunks(shard.document_bounds[1:]):
            yield bounds + first
        first += len(shard)


def _chunks(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(array), CHUNK_SEQUENCES):
        yield np.array(array[start : start + CHUNK_SEQUENCES])  # aligned, as the map is not


def copy_bytes(source: Path, target: BinaryIO) -> Iterator[int]:
    """Append a file to `target` inside the kernel where that can be done; yield the bytes of each step.

    Raises:
        InputError: The file became shorter meanwhile.
    """
    left = source.stat().st_size
    target.flush()
    with source.open("rb") as file:
        while left:
            wanted = min(COPY_BYTES, left)
            try:
                copied = os.copy_file_range(file.fileno(), target.fileno(), wanted)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                copied = target.write(file.read(min(wanted, 2**20)))
                target.flush()
            if not copied:
                raise InputError(f"{source}: ends {left} bytes early; it changed while it was merged.")
            left -= copied
            yield copied


def _paths(settings: MergeConfig, inputs: Mapping[str, Artifact]) -> list[Path]:
    names = sorted(inputs, key=lambda name: int(name.removeprefix("dataset") or 0))
    paths = [inputs[name].path for name in names] or [user_path(path) for path in settings.datasets]
    if not paths:
        raise ConfigError("merge: no dataset. Name them with --dataset, in the order to join them.")
    return paths


def _refuse_mixed_types(datasets: Sequence[TokenDataset]) -> None:
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise InputError(
                f"{dataset.path} holds tokens of {dataset.dtype.name}, {first.path} of {first.dtype.name}: they were "
                "made with different vocabularies. Ingest one of them again with the other's tokenizer."
            )
        for shard in dataset.shards:
            if shard.has_modes:
                raise InputError(f"{shard.idx_path}: a multimodal dataset (one mode a sequence), which is not merged.")


def _agreed(datasets: Sequence[TokenDataset]) -> dict[str, Any]:
    """Return what all datasets say of their tokenizer; foreign pairs say nothing.

    Raises:
        ConfigError: Two of them contradict each other.
    """
    found: dict[str, Any] = {}
    known = [dataset for dataset in datasets if "vocab_size" in dataset.summary]
    if known and len(known) < len(datasets):
        other = next(dataset for dataset in datasets if dataset not in known)
        raise ConfigError(
            f"{known[0].path} knows its tokenizer, {other.path} does not, so nothing says that their ids mean the "
            "same. Import the latter with its tokenizer first (shardline import --tokenizer)."
        )
    for dataset in known:
        for name in AGREED:
            value = dataset.summary.get(name)
            if found.setdefault(name, value) != value:
                raise ConfigError(
                    f"{dataset.path} was made with {name} {value}, {known[0].path} with {found[name]}. "
                    "Only datasets of one tokenizer and one way of marking documents can be merged."
                )
    refuse_mixed_tokenizers(known)
    return found


def merged_names(datasets: Sequence[TokenDataset]) -> list[dict[str, str]]:
    """Name the source files of each dataset in the whole: one name for one file, another for a namesake."""
    taken: dict[str, str] = {}
    result: list[dict[str, str]] = []
    for dataset in datasets:
        names: dict[str, str] = {}
        for source in dataset.summary.get("sources", []):
            name, place = source["name"], str(dataset.source_paths[source["name"]])
            count = 1
            while taken.setdefault(name, place) != place:
                count += 1
                name = f"{source['name']}#{count}"
            names[source["name"]] = name
        result.append(names)
    return result


def _join_document_tables(datasets: Sequence[TokenDataset], names: Sequence[Mapping[str, str]], target: Path) -> None:
    """Write `documents.parquet` of the whole, a row group at a time."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    files = list(dict.fromkeys(name for mapping in names for name in mapping.values()))
    numbers = {name: number for number, name in enumerate(files)}
    temporary = target.with_name(f"{target.name}.tmp")
    schema = pq.read_schema(datasets[0].path / DOCUMENTS).remove_metadata()
    first = 0
    with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for dataset, mapping in zip(datasets, names, strict=True):
            table = pq.ParquetFile(dataset.path / DOCUMENTS)
            old = pa.array(list(mapping), type=pa.string())
            new = pa.array([numbers[name] for name in mapping.values()], type=pa.int32())
            for group in range(table.num_row_groups):
                rows = table.read_row_group(group).combine_chunks()
                places = pc.index_in(rows.column("file").cast(pa.string()), value_set=old)
                file = pa.DictionaryArray.from_arrays(
                    new.take(places.combine_chunks()), pa.array(files, type=pa.string())
                )
                columns = {
                    "shard": pa.array(np.zeros(len(rows), dtype=np.int32)),
                    "document": pc.add(rows.column("document"), first),
                    "file": file,
                }
                arrays = [columns.get(name, rows.column(name)) for name in schema.names]
                writer.write_table(pa.table(arrays, schema=schema))
            first += dataset.num_documents
    temporary.replace(target)


def _join_rejects(datasets: Sequence[TokenDataset], names: Sequence[Mapping[str, str]], target: Path) -> None:
    from contracts.json_text import parse_json

    paths = [dataset.path / REJECTS for dataset in datasets]
    if not any(path.is_file() for path in paths):
        return
    temporary = target.with_name(f"{target.name}.tmp")
    with temporary.open("w", encoding="utf-8") as out:
        for path, mapping in zip(paths, names, strict=True):
            if not path.is_file():
                continue
            with path.open(encoding="utf-8") as file:
                for line in file:
                    row = parse_json(line)
                    row["file"] = mapping.get(row["file"], row["file"])
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
    temporary.replace(target)


@dataclass(frozen=True)
class _Totals:
    counts: Counter[str]
    subsets: dict[str, Counter[str]]


def _add_up(datasets: Sequence[TokenDataset]) -> _Totals:
    counts: Counter[str] = Counter()
    subsets: dict[str, Counter[str]] = {}
    for dataset in datasets:
        for name in ADDED:
            counts[name] += dataset.summary.get(name) or 0
        for subset, numbers in dataset.summary.get("subsets", {}).items():
            subsets.setdefault(subset, Counter()).update(numbers)
    return _Totals(counts, subsets)


def _summary(datasets: Sequence[TokenDataset], names: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    totals = _add_up(datasets)
    sources: dict[str, dict[str, Any]] = {}
    for dataset, mapping in zip(datasets, names, strict=True):
        for source in dataset.summary.get("sources", []):
            name = mapping[source["name"]]
            seen = sources.setdefault(name, {"name": name, "path": str(dataset.source_paths[source["name"]])})
            for key, value in source.items():
                if isinstance(value, int):
                    seen[key] = seen.get(key, 0) + value
                elif key not in seen:
                    seen[key] = value
    has_counts = all(dataset.summary for dataset in datasets)
    return {
        **({name: totals.counts[name] for name in ADDED} if has_counts else {}),
        "documents": sum(dataset.num_documents for dataset in datasets),
        "tokens": sum(dataset.num_tokens for dataset in datasets),
        "shards": 1,
        "merged": len(datasets),
        "token_dtype": str(datasets[0].dtype),
        **({"subsets": {name: dict(n) for name, n in sorted(totals.subsets.items())}} if totals.subsets else {}),
        "sources": list(sources.values()),
    }


def _raw(settings: MergeConfig) -> dict[str, str]:
    return artifact_contents(settings.datasets)


def _raw_files(settings: MergeConfig) -> dict[str, Path]:
    return {
        f"dataset{number}{name if name.startswith('/') else '/pair' + name}": file
        for number, path in enumerate(settings.datasets)
        for name, file in pair_files(path).items()
    }


MERGE = Stage(
    name="merge",
    version=1,
    kind="dataset",
    settings=MergeConfig,
    work=merge,
    raw_files=_raw_files,
    raw=_raw,
    refuses_changes=True,
)
