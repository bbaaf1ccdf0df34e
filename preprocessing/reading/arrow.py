"""Blocks of the rows of Arrow files: the file format, cut at record batches, and the stream format.

`datasets.save_to_disk` writes the stream format. Arrow has no checksums: what pyarrow can tell of
damage is checked for each batch. A stream must have its end marker, since one that was cut between
two batches looks whole otherwise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from preprocessing.reading.blocks import Position, Row, RowBlock
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.parquet import columns_of, rows_of, rows_per_block
from preprocessing.reading.source_file import SourceFile

_FILE_MAGIC = b"ARROW1\0\0"
_CONTINUES = b"\xff\xff\xff\xff"
_RECORD_BATCH = 3
_END_BYTES = 8  # of the end marker


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
        before = raw.tell()
        try:
            batch = _checked(source, raw, number, reader.read_next_batch)
        except StopIteration:
            break
        yield batch
        number += 1
    end = raw.tell()
    if end != before + _END_BYTES:  # without an end marker nothing was read
        raise DamagedStreamError(source.name, f"the Arrow stream has no end: it is truncated at byte {end}", True)
    if end < source.size_bytes:
        raise DamagedStreamError(source.name, f"bytes after the end of the Arrow stream, at byte {end}", False)


def _checked(source: SourceFile, raw: Any, number: int, read: Any) -> Any:
    before = raw.tell()
    try:
        batch = read()
        batch.validate()
        return batch
    except StopIteration:
        raise
    except Exception as error:  # pyarrow raises its own and builtin types, MemoryError too
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
    columns = columns_of(keys, names, source)
    line = 1
    for number, batch in enumerate(batches):
        file_bytes = raw.tell() if raw is not None else (number + 1) * batch_bytes
        count = rows_per_block(batch.nbytes, batch.num_rows)
        for first in range(max(0, position.line - line), batch.num_rows, count):
            rows = _rows(batch.slice(first, count).select(columns))
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


def _check_footer(raw: Any, num_batches: int) -> None:
    """Compare the footer's number of batches with the messages that stand in the file."""
    position, found = len(_FILE_MAGIC), 0
    while True:
        raw.seek(position)
        head = raw.read(8)
        length = int.from_bytes(head[4:8], "little", signed=True)
        if position == len(_FILE_MAGIC) and head[:4] != _CONTINUES:
            return  # a file from before Arrow 0.15
        if head[:4] != _CONTINUES or length < 0:
            raise ValueError(f"no message at byte {position}")
        if length == 0:
            break
        kind, body_bytes = _message(raw.read(length))
        if body_bytes < 0:
            raise ValueError(f"the message at byte {position} is damaged")
        found += kind == _RECORD_BATCH
        position += 8 + length + body_bytes
    if found != num_batches:
        raise ValueError(f"it names {num_batches} batches, the file holds {found}")


def _message(table: bytes) -> tuple[int, int]:
    """Return kind and bytes of the body of a message: fields 1 and 3 of its flatbuffer (Arrow's Message.fbs)."""

    def number(place: int, size: int) -> int:
        if not 0 <= place <= len(table) - size:
            raise ValueError("a message's header is damaged")
        return int.from_bytes(table[place : place + size], "little", signed=size != 2)

    root = number(0, 4)
    fields = root - number(root, 4)

    def field(index: int, size: int) -> int:
        slot = 4 + 2 * index
        offset = number(fields + slot, 2) if slot < number(fields, 2) else 0
        return number(root + offset, size) if offset else 0

    return field(1, 1), field(3, 8)


@contextmanager
def _opened(source: SourceFile, *, is_stream: bool) -> Iterator[tuple[Any, Any]]:
    import pyarrow as pa

    with source.open() as raw:
        try:
            reader = pa.ipc.open_stream(raw) if is_stream else pa.ipc.open_file(raw)
            if not all(reader.schema.names):
                raise ValueError("a column has no name")
            if not is_stream and not source.is_remote:
                _check_footer(raw, reader.num_record_batches)
        except Exception as error:  # pyarrow raises its own and builtin types for damaged files
            what = "its schema, at byte 0," if is_stream else f"its footer, before byte {source.size_bytes},"
            raise DamagedStreamError(
                source.name, f"not a whole Arrow file: {what} cannot be read ({error})", True
            ) from error
        yield reader, raw
