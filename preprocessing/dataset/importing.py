"""The import stage: datasets that other programs wrote become a dataset artifact.

Tokens are copied byte for byte; the index is written anew, whole and checked. `documents.parquet`
names the foreign file and the document's number in it; how many bytes of text a document had is
not known there (null).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError
from contracts.files import user_path
from contracts.stage import Stage
from contracts.store import Workspace
from preprocessing.dataset.config import ImportConfig
from preprocessing.dataset.foreign import ForeignPair, find_foreign, read_foreign
from preprocessing.dataset.indexed_dataset import write_index
from preprocessing.dataset.merge import copy_bytes
from preprocessing.ingestion.document_table import DOCUMENTS, documents_schema
from preprocessing.ingestion.shards import shard_name
from preprocessing.tokenization.loading import load_tokenizer, tokenizer_files
from preprocessing.tokenization.tokenizer import Tokenizer, keep_tokenizer

CHUNK_TOKENS = 2**24
CHUNK_DOCUMENTS = 2**16


def take_over(settings: ImportConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Copy foreign datasets into `workspace.path` as shards; return their numbers.

    Raises:
        ConfigError: A source is no dataset, or the tokenizer lacks the EOD token asked for.
        InputError: A source is damaged, of another token type than the first, or holds an id that the tokenizer lacks.
    """
    try:
        return _take_over(settings, inputs, workspace)
    except (ConfigError, InputError):
        workspace.discard()
        raise


def _take_over(settings: ImportConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    paths = _foreign_files(settings)
    if not paths:
        raise ConfigError("import: no source. Name prefixes of .bin/.idx, .ds files, or folders of them.")
    place = inputs["tokenizer"].path if "tokenizer" in inputs else settings.tokenizer
    tokenizer = None if place is None else load_tokenizer(place)
    eod_id = _eod_id(tokenizer, settings.eod_token)
    rows = _DocumentRows(workspace.path / DOCUMENTS, [_source_name(path) for path in paths])
    found: list[dict[str, Any]] = []
    dtype: np.dtype[Any] | None = None
    try:
        for number, path in enumerate(paths):
            pair = read_foreign(path)
            dtype = dtype or pair.dtype
            if pair.dtype != dtype:
                raise InputError(
                    f"{path} holds tokens of {pair.dtype.name}, the first source of {dtype.name}. Import them apart."
                )
            for note in pair.notes:
                workspace.progress.note(f"{path}: {note}")
            highest, last_ids = _check_ids(pair, tokenizer, workspace)
            _copy(pair, workspace.path / shard_name(number))
            rows.append(number, pair)
            found.append(_numbers(pair, path, highest, last_ids, eod_id))
        if not any(item["documents"] for item in found):
            raise InputError(f"import: {', '.join(map(str, paths[:3]))} holds no document. Name other sources.")
        rows.finish()
    finally:
        rows.close()
    if tokenizer is not None:
        keep_tokenizer(tokenizer, workspace.path)
    return _summary(found, tokenizer, eod_id, str(dtype), workspace)


def _foreign_files(settings: ImportConfig) -> list[Path]:
    return [file for source in settings.sources for file in find_foreign(user_path(source))]


def _source_name(path: Path) -> str:
    return path.name if path.suffix == ".ds" else f"{path.stem}.bin"


def _eod_id(tokenizer: Tokenizer | None, token: str | None) -> int | None:
    if tokenizer is None:
        if token is not None:
            raise ConfigError(f"import.eod_token is {token!r}, but no tokenizer is given that would say its id.")
        return None
    return tokenizer.require_eod(token) if token is not None else tokenizer.eod_id


def _check_ids(
    pair: ForeignPair, tokenizer: Tokenizer | None, workspace: Workspace
) -> tuple[int, npt.NDArray[np.int64]]:
    """Read every id; return the highest, and the last of each sequence (-1 of an empty one).

    Raises:
        InputError: An id is negative, above 2^31, or not in the vocabulary.
    """
    tokens = np.memmap(pair.data, dtype=pair.dtype, mode="r") if pair.num_tokens else np.empty(0, pair.dtype)
    highest = -1
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        highest = max(highest, int(chunk.max()))
        limit = 2**31 if tokenizer is None else tokenizer.vocab_size
        is_bad = (chunk < 0) | (chunk >= limit)
        if is_bad.any():
            at = start + int(is_bad.argmax())
            why = "no token id" if tokenizer is None else f"outside the vocabulary of {limit} of {tokenizer.source}"
            raise InputError(f"{pair.data}: token {at} is {int(tokens[at])}, {why}. Is it the tokenizer that made it?")
        workspace.progress.update(start + len(chunk), total=len(tokens), unit="tokens")
    ends = np.cumsum(pair.lengths, dtype=np.int64)
    last = np.full(len(ends), -1, dtype=np.int64)
    last[pair.lengths > 0] = tokens[ends[pair.lengths > 0] - 1]
    return highest, last


def _copy(pair: ForeignPair, prefix: Path) -> None:
    import os

    target = prefix.with_name(f"{prefix.name}.bin")
    with target.with_name(f"{target.name}.tmp").open("wb") as file:
        for _ in copy_bytes(pair.data, file):
            pass
        file.flush()
        os.fsync(file.fileno())
    target.with_name(f"{target.name}.tmp").replace(target)
    write_index(prefix.with_name(f"{prefix.name}.idx"), pair.dtype, pair.lengths, pair.bounds)


def _numbers(
    pair: ForeignPair, path: Path, highest: int, last_ids: npt.NDArray[np.int64], eod_id: int | None
) -> dict[str, Any]:
    filled = np.flatnonzero(pair.bounds[1:] > pair.bounds[:-1])
    last = last_ids[pair.bounds[1:][filled] - 1]
    return {
        "name": _source_name(path),
        "path": path.resolve().as_posix(),
        "form": pair.form,
        "documents": len(pair.bounds) - 1,
        "tokens": pair.num_tokens,
        "highest_id": highest,
        "documents_ending_in_eod": 0 if eod_id is None else int((last == eod_id).sum()),
    }


def _summary(
    found: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer | None,
    eod_id: int | None,
    dtype: str,
    workspace: Workspace,
) -> dict[str, Any]:
    documents = sum(item["documents"] for item in found)
    ending = sum(item["documents_ending_in_eod"] for item in found)
    if tokenizer is not None and ending < documents:
        workspace.progress.note(
            f"{documents - ending} of {documents} documents do not end in the tokenizer's end-of-document token"
        )
    known: dict[str, Any] = {}
    if tokenizer is not None:
        known = {
            "vocab_size": tokenizer.vocab_size,
            "append_eod": eod_id is not None and 0 < documents == ending,
            "eod_id": eod_id,
            "eod_token": None if eod_id is None else tokenizer.token(eod_id),
            "add_bos": False,
            "bos_id": None,
        }
    return {
        "documents": documents,
        "tokens": sum(item["tokens"] for item in found),
        "shards": len(found),
        "token_dtype": dtype,
        "highest_id": max(item["highest_id"] for item in found),
        **known,
        "sources": [dict(item) for item in found],
        "has_document_table": True,
    }


class _DocumentRows:
    """Writes `documents.parquet`: the foreign file, and the number of the document in it (from 1) as its line."""

    def __init__(self, target: Path, names: Sequence[str]) -> None:
        import pyarrow as pa

        self._target = target
        self._schema = documents_schema()
        self._names = pa.array(names, type=pa.string())
        self._writer: Any = None
        self._first = 0

    def append(self, shard: int, pair: ForeignPair) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._writer is None:
            temporary = self._target.with_name(f"{self._target.name}.tmp")
            self._writer = pq.ParquetWriter(temporary, self._schema, compression="zstd")
        tokens = np.memmap(pair.data, dtype=pair.dtype, mode="r") if pair.num_tokens else np.empty(0, pair.dtype)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(pair.lengths, dtype=np.int64)])
        for start, bounds in _document_chunks(pair):
            count = len(bounds) - 1
            edges = ends[bounds]
            digests = [_digest(tokens[edges[n] : edges[n + 1]]) for n in range(count)]
            columns = {
                "shard": np.full(count, shard, dtype=np.int32),
                "document": np.arange(self._first, self._first + count, dtype=np.int64),
                "file": pa.DictionaryArray.from_arrays(pa.array(np.full(count, shard, dtype=np.int32)), self._names),
                "line": np.arange(start + 1, start + count + 1, dtype=np.int64),
                "byte_offset": edges[:-1] * pair.dtype.itemsize,
                "subset": pa.nulls(count, pa.string()),
                "bytes": pa.nulls(count, pa.int64()),
                "tokens": np.diff(edges),
                "digest": pa.array(digests, type=self._schema.field("digest").type),
            }
            self._writer.write_table(pa.table(columns, schema=self._schema))
            self._first += count

    def finish(self) -> None:
        self._writer.close()
        self._writer = None
        self._target.with_name(f"{self._target.name}.tmp").replace(self._target)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _document_chunks(pair: ForeignPair) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    documents = len(pair.bounds) - 1
    for start in range(0, documents, CHUNK_DOCUMENTS):
        yield start, pair.bounds[start : min(start + CHUNK_DOCUMENTS, documents) + 1]


def _digest(ids: npt.NDArray[Any]) -> bytes:
    """Return the digest of a document whose text is not known: that of its ids, 4 bytes each."""
    import hashlib

    return hashlib.blake2b(ids.astype("<u4").tobytes(), digest_size=16).digest()


def _raw_files(settings: ImportConfig) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for number, path in enumerate(_foreign_files(settings)):
        companions = (".index", ".metadata") if path.suffix == ".ds" else ()
        beside = [path.with_name(f"{path.name}{suffix}") for suffix in companions] or [path.with_suffix(".bin")]
        parts = [part for part in (path, *beside) if part.is_file()]
        files |= {f"source{number:06d}/{part.name}": part for part in parts}
    if settings.tokenizer is not None:
        files |= {f"tokenizer/{name}": part for name, part in tokenizer_files(settings.tokenizer).items()}
    return files


IMPORT = Stage(
    name="import",
    version=1,
    kind="dataset",
    settings=ImportConfig,
    work=take_over,
    raw_files=_raw_files,
    refuses_changes=True,
)
