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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from preprocessing.ingestion.encoding import DIGEST_BYTES, EncodedBlock

DOCUMENTS = "documents.parquet"
ROWS = 2**16


class DocumentRows:
    """Writes the rows of one shard; files are numbers here, and named when the tables are joined."""

    def __init__(self, path: Path, shard: int) -> None:
        import pyarrow.parquet as pq

        self._shard = shard
        self._file = path.open("wb")
        self._writer = pq.ParquetWriter(self._file, _schema(), compression="zstd")
        self._batches: list[Any] = []
        self._num_waiting = 0

    def append(self, first: int, block: EncodedBlock, part: slice) -> None:
        """Add the documents `part` of a block; `first` is the number of the first in the dataset."""
        import pyarrow as pa

        count = part.stop - part.start
        digests = block.digests[part.start * DIGEST_BYTES : part.stop * DIGEST_BYTES]
        columns = [
            pa.array(np.full(count, self._shard, dtype=np.int32)),
            pa.array(np.arange(first, first + count, dtype=np.int64)),
            pa.array(np.full(count, block.end.piece, dtype=np.int32)),
            # Copies, so that the block with its tokens can go.
            pa.array(block.lines[part].copy()),
            pa.array(block.offsets[part].copy()),
            pa.array(block.subsets[part], type=pa.string()),
            pa.array(block.sizes[part].copy()),
            pa.array(block.lengths[part].copy()),
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


def join_tables(parts: Sequence[Path], files: Sequence[str], target: Path) -> None:
    """Join the tables of all shards, naming the files, in the memory of one row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = documents_schema()
    names = pa.array(files, type=pa.string())
    temporary = target.with_name(f"{target.name}.tmp")
    with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for part in parts:
            source = pq.ParquetFile(part)
            for group in range(source.num_row_groups):
                table = source.read_row_group(group)
                numbers = table.column("file").combine_chunks()
                column = pa.DictionaryArray.from_arrays(numbers, names)
                writer.write_table(table.set_column(schema.get_field_index("file"), schema.field("file"), column))
    temporary.replace(target)


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
