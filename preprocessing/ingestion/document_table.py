"""`documents.parquet`: one row per document, from the token sequence back to its record.

| column | type | content |
|---|---|---|
| shard | int32 | number of the `data-NNNNN` pair |
| document | int64 | number in the dataset, through all shards |
| file | text | source file, by its name in the dataset |
| line | int64 | 1-based line or row of the record |
| byte_offset | int64 | of the line, in the decompressed file; 0 in Parquet |
| subset | text | subset of the record, or null |
| bytes | int64 | of its text in UTF-8 |
| tokens | int64 | in the dataset, EOD and BOS included |
| digest | 16 bytes | blake2b of the text |

Row groups have ROWS rows, whatever the blocks were, so that a resumed run gives the same bytes.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.ingestion.encoding import DIGEST_BYTES, EncodedBlock
from preprocessing.ingestion.tally import Bases

DOCUMENTS = "documents.parquet"
ROWS = 2**16


class DocumentRows:
    """Writes the rows of one shard of a part.

    Shards, documents, lines and offsets are numbered within the part, and a piece stands for the
    file, until the tables are joined.
    """

    def __init__(self, path: Path, shard: int) -> None:
        import pyarrow.parquet as pq

        self._shard = shard
        self._file = path.open("wb")
        self._writer = pq.ParquetWriter(self._file, _schema(), compression="zstd")
        self._batches: list[Any] = []
        self._num_waiting = 0

    def append(self, first: int, block: EncodedBlock, documents: slice) -> None:
        """Add some documents of a block; `first` is the number of the first in the part."""
        import pyarrow as pa

        count = documents.stop - documents.start
        digests = block.digests[documents.start * DIGEST_BYTES : documents.stop * DIGEST_BYTES]
        columns = [
            _numbers(np.full(count, self._shard, dtype=np.int32)),
            _numbers(np.arange(first, first + count, dtype=np.int64)),
            _numbers(np.full(count, block.end.piece, dtype=np.int32)),
            # Copies, so that the block with its tokens can go.
            _numbers(block.lines[documents].copy()),
            _numbers(block.offsets[documents].copy()),
            _texts(block.subsets[documents]),
            _numbers(block.sizes[documents].copy()),
            _numbers(block.lengths[documents].copy()),
            pa.FixedSizeBinaryArray.from_buffers(pa.binary(DIGEST_BYTES), count, [None, pa.py_buffer(digests)]),
        ]
        self._batches.append(pa.record_batch(columns, schema=_schema()))
        self._num_waiting += count
        if self._num_waiting >= ROWS:
            self._write(is_last=False)

    def close(self) -> None:
        """Write what waits and the end of the file, and make it durable."""
        self._write(is_last=True)
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, *, is_last: bool) -> None:
        import pyarrow as pa

        table = pa.Table.from_batches(self._batches, schema=_schema())
        stop = len(table) if is_last else len(table) - len(table) % ROWS
        for start in range(0, stop, ROWS):
            self._writer.write_table(table.slice(start, ROWS).combine_chunks())
        rest = table.slice(stop).combine_chunks()
        self._batches = rest.to_batches()
        self._num_waiting = len(rest)


@dataclass(frozen=True)
class PartTables:
    """The tables of one part's shards, and what its numbers become in the dataset.

    Args:
        paths: One of each shard.
        first_shard, first_document: Numbers in the dataset of the part's first.
        bases: Of its pieces.
    """

    paths: Sequence[Path]
    first_shard: int
    first_document: int
    bases: Bases


def join_tables(parts: Iterable[PartTables], files: Sequence[str], target: Path) -> None:
    """Join the tables of all shards, in the memory of one row group."""
    import pyarrow.parquet as pq

    schema = documents_schema()
    names = _texts(files)
    temporary = target.with_name(f"{target.name}.tmp")
    with temporary.open("wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for part in parts:
                for path in part.paths:
                    source = pq.ParquetFile(path)
                    for group in range(source.num_row_groups):
                        writer.write_table(_numbered(source.read_row_group(group), part, names, schema))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)


def _numbered(table: Any, part: PartTables, names: Any, schema: Any) -> Any:
    import pyarrow as pa

    pieces = _column(table, "file")
    shifts = {
        "shard": np.int32(part.first_shard),
        "document": np.int64(part.first_document),
        "line": np.asarray(part.bases.lines, dtype=np.int64)[pieces],
        "byte_offset": np.asarray(part.bases.offsets, dtype=np.int64)[pieces],
    }
    for name, shift in shifts.items():
        if np.any(shift):
            values = _numbers(_column(table, name) + shift)
            table = table.set_column(schema.get_field_index(name), schema.field(name), values)
    files = _numbers(np.asarray(part.bases.files, dtype=np.int32)[pieces])
    column = pa.DictionaryArray.from_arrays(files, names)
    return table.set_column(schema.get_field_index("file"), schema.field("file"), column)


# pyarrow's own conversions from and to numpy and Python import pandas, which takes 0.2 CPU-s in every process.


def _column(table: Any, name: str) -> npt.NDArray[Any]:
    """Return a column of integers without nulls."""
    column = table.column(name).combine_chunks()
    values = np.frombuffer(column.buffers()[1], dtype=np.dtype(str(column.type)))
    return values[column.offset : column.offset + len(column)]


def _numbers(values: npt.NDArray[Any]) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(getattr(pa, str(values.dtype))(), len(values), [None, pa.py_buffer(values)])


def _texts(values: Sequence[str | None]) -> Any:
    import pyarrow as pa

    encoded = [b"" if value is None else value.encode() for value in values]
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in encoded], out=offsets[1:])
    present = np.array([value is not None for value in values], dtype=bool)
    validity = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def documents_schema() -> Any:
    """Return the schema of `documents.parquet`: files by name, through a dictionary."""
    import pyarrow as pa

    schema = _schema()
    return schema.set(schema.get_field_index("file"), pa.field("file", pa.dictionary(pa.int32(), pa.string())))


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("shard", pa.int32()),
            ("document", pa.int64()),
            ("file", pa.int32()),
            ("line", pa.int64()),
            ("byte_offset", pa.int64()),
            ("subset", pa.string()),
            ("bytes", pa.int64()),
            ("tokens", pa.int64()),
            ("digest", pa.binary(DIGEST_BYTES)),
        ]
    )
