"""Blocks of the rows of Arrow files: the file format, cut at record batches, and the stream format.

`datasets.save_to_disk` writes the stream format. Arrow has no checksums: what pyarrow can tell of
damage is checked for each batch. A stream must have its end marker, since one that was cut between
two batches looks whole otherwise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from preprocessing.reading.blocks import BLOCK_ROWS, Position, Row, RowBlock
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.parquet import columns_of, rows_of
from preprocessing.reading.source_file import SourceFile

_END_MARKERS = (b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\x00\x00\x00\x00")


def num_batches(source: SourceFile) -> int:
    """Return the number of record batches of an Arrow file (not a stream).

    Raises:
        DamagedStreamError: It is not a whole Arrow file.
    """
    with _opened(source, is_stream=False) as (reader, _):
        return int(reader.num_record_batches)


def arrow_file_blocks(
    source: SourceFile, position: Position, keys: Sequence[str], *, start: int, stop: int | None
) -> Iterator[RowBlock]:
    """Read the record batches from `start` to `stop` in blocks, from `position` on.

    Raises:
        DamagedStreamError: After the last block before the damage.
    """
    with _opened(source, is_stream=False) as (reader, raw):
        stop = reader.num_record_batches if stop is None else stop
        batches = (_checked(source, raw, number, lambda n=number: reader.get_batch(n)) for number in range(start, stop))
        yield from _blocks(source, position, keys, reader.schema.names, batches, source.size_bytes // max(1, stop))


def arrow_stream_blocks(source: SourceFile, position: Position, keys: Sequence[str]) -> Iterator[RowBlock]:
    """Read a stream in blocks, from `position` on.

    Raises:
        DamagedStreamError: After the last block before the damage.
    """
    with _opened(source, is_stream=True) as (reader, raw):
        yield from _blocks(source, position, keys, reader.schema.names, _stream_batches(source, reader, raw), 0, raw)


def _stream_batches(source: SourceFile, reader: Any, raw: Any) -> Iterator[Any]:
    number = 0
    while True:
        try:
            batch = _checked(source, raw, number, reader.read_next_batch)
        except StopIteration:
            break
        yield batch
        number += 1
    end = raw.tell()
    raw.seek(max(0, end - 8))
    if not raw.read(8).endswith(_END_MARKERS):
        raise DamagedStreamError(source.name, f"the Arrow stream has no end: it is truncated at byte {end}", True)
    if end < source.size_bytes:
        raise DamagedStreamError(source.name, f"bytes after the end of the Arrow stream, at byte {end}", False)


def _checked(source: SourceFile, raw: Any, number: int, read: Any) -> Any:
    import pyarrow as pa

    before = raw.tell()
    try:
        batch = read()
        batch.validate()
        return batch
    except StopIteration:
        raise
    except (OSError, ValueError, NotImplementedError, pa.ArrowException) as error:
        reason = f"damaged Arrow data in batch {number}, at or after byte {before} ({error})"
        raise DamagedStreamError(source.name, reason, False) from error


def _blocks(
    source: SourceFile,
    position: Position,
    keys: Sequence[str],
    names: Sequence[str],
    batches: Iterator[Any],
    batch_bytes: int,
    raw: Any = None,
) -> Iterator[RowBlock]:
    columns = columns_of(keys, names)
    line = 1
    for number, batch in enumerate(batches):
        file_bytes = raw.tell() if raw is not None else (number + 1) * batch_bytes
        for first in range(max(0, position.line - line), batch.num_rows, BLOCK_ROWS):
            rows = _rows(batch.slice(first, BLOCK_ROWS).select(columns))
            yield RowBlock(source, replace(position, line=line + first, offset=0), rows, tuple(names), file_bytes)
        line += batch.num_rows


def _rows(batch: Any) -> tuple[Row, ...]:
    """Turn a batch into rows, after its offsets and texts were checked: reading damaged ones may crash."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return tuple(_row_or_reason(batch.slice(n, 1)) for n in range(batch.num_rows))
    return rows_of(batch)


def _row_or_reason(row: Any) -> Row:
    import pyarrow as pa

    try:
        row.validate(full=True)
    except pa.ArrowInvalid as error:
        return f"damaged Arrow row ({error})"
    found: Row = rows_of(row)[0]
    return found


@contextmanager
def _opened(source: SourceFile, *, is_stream: bool) -> Iterator[tuple[Any, Any]]:
    import pyarrow as pa

    with source.open() as raw:
        try:
            reader = pa.ipc.open_stream(raw) if is_stream else pa.ipc.open_file(raw)
        except Exception as error:  # pyarrow raises its own and builtin types for damaged files
            what = "its schema, at byte 0," if is_stream else f"its footer, before byte {source.size_bytes},"
            raise DamagedStreamError(
                source.name, f"not a whole Arrow file: {what} cannot be read ({error})", True
            ) from error
        yield reader, raw
