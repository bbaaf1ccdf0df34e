"""Blocks of the rows of a Parquet file; a piece is some of its row groups."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from preprocessing.reading.blocks import BLOCK_ROWS, LINE_BYTES, Position, RowBlock
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.source_file import SourceFile


def row_group_sizes(source: SourceFile) -> list[int]:
    """Return the bytes on disk of each row group.

    Raises:
        DamagedStreamError: It is not a whole Parquet file.
    """
    with _opened(source) as file:
        return [_group_bytes(file.metadata.row_group(number)) for number in range(file.metadata.num_row_groups)]


def parquet_blocks(
    source: SourceFile, position: Position, keys: Sequence[str], *, start: int, stop: int | None
) -> Iterator[RowBlock]:
    """Read the row groups from `start` to `stop` in blocks, from `position` on.

    Args:
        keys: Keys of the text and the subset: only their columns are read.

    Raises:
        DamagedStreamError: After the last block before the damage.
    """
    with _opened(source) as file:
        names = tuple(file.schema_arrow.names)
        columns = columns_of(keys, names)
        line, file_bytes = 1, 0
        for group in range(start, file.metadata.num_row_groups if stop is None else stop):
            metadata = file.metadata.row_group(group)
            file_bytes += _group_bytes(metadata)
            if line + metadata.num_rows <= position.line:
                line += metadata.num_rows
                continue
            first_line = line
            try:
                for batch in file.iter_batches(BLOCK_ROWS, row_groups=[group], columns=columns):
                    if line + batch.num_rows > position.line:
                        first = max(line, position.line)
                        rows = rows_of(batch.slice(first - line))
                        yield RowBlock(source, replace(position, line=first, offset=0), rows, names, file_bytes)
                    line += batch.num_rows
            except (OSError, ValueError) as error:  # pyarrow's own errors are of these types
                raise _damaged_group(source, metadata, group, line, str(error)) from error
            if line != first_line + metadata.num_rows:
                what = f"it holds {line - first_line} rows where its header says {metadata.num_rows}"
                raise _damaged_group(source, metadata, group, line, what)


def columns_of(keys: Sequence[str], names: Sequence[str]) -> list[str]:
    """Name the columns that keys stand for; dots go into nested columns."""
    return sorted({name for key in keys for name in (key, key.partition(".")[0]) if name in names})


def rows_of(batch: Any) -> tuple[dict[str, Any] | str, ...]:
    """Turn a record batch into rows; a text instead of a row says why it cannot be read."""
    if batch.nbytes > LINE_BYTES:  # only then can one row be too long
        return tuple(_row_or_reason(batch.slice(n, 1)) for n in range(batch.num_rows))
    try:
        return tuple(batch.to_pylist()) if batch.num_columns else ({},) * batch.num_rows
    except UnicodeDecodeError:
        return tuple(_row_or_reason(batch.slice(n, 1)) for n in range(batch.num_rows))


def _row_or_reason(row: Any) -> dict[str, Any] | str:
    if row.nbytes > LINE_BYTES:
        return f"the row is longer than {LINE_BYTES} bytes, which no record is"
    try:
        found: dict[str, Any] = row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return f"text is not valid UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start})"
    return found


@contextmanager
def _opened(source: SourceFile) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with source.open() as raw:
        try:
            file = pq.ParquetFile(raw, page_checksum_verification=True)
        except Exception as error:  # pyarrow raises its own and builtin types for damaged files
            reason = f"not a whole Parquet file: its footer, before byte {source.size_bytes}, cannot be read ({error})"
            raise DamagedStreamError(source.name, reason, True) from error
        yield file


def _group_bytes(metadata: Any) -> int:
    return sum(metadata.column(n).total_compressed_size for n in range(metadata.num_columns))


def _damaged_group(source: SourceFile, metadata: Any, group: int, line: int, what: str) -> DamagedStreamError:
    starts = [metadata.column(n).data_page_offset for n in range(metadata.num_columns)]
    where = f"row group {group} (at byte {min(starts, default=0)})"
    return DamagedStreamError(source.name, f"damaged Parquet data in {where}, after row {line - 1} ({what})", False)
