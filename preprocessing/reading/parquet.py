"""Blocks of the rows of a Parquet file; a piece is some of its row groups."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from preprocessing.reading.blocks import BLOCK_BYTES, BLOCK_ROWS, LINE_BYTES, Position, RowBlock
from preprocessing.reading.damage import DamagedStreamError, ForeignFileError
from preprocessing.reading.source_file import SourceFile

BUFFER_BYTES = 2**20  # of each column; without it a whole row group is held


def row_group_sizes(source: SourceFile) -> list[int]:
    """Return the bytes on disk of each row group.

    Raises:
        DamagedStreamError: It is not a whole Parquet file.
    """
    with _opened(source) as (file, _):
        return _group_bytes(source, file.metadata)


def parquet_blocks(
    source: SourceFile, position: Position, keys: Sequence[str], *, start: int, stop: int | None
) -> Iterator[RowBlock]:
    """Read the row groups from `start` to `stop` in blocks, from `position` on.

    Args:
        keys: Keys of the text and the subset: only their columns are read.

    Raises:
        DamagedStreamError: After the last block before the damage.
    """
    with _opened(source) as (file, raw):
        names = tuple(file.schema_arrow.names)
        columns = columns_of(keys, names, source)
        line, file_bytes, sizes = 1, 0, _group_bytes(source, file.metadata)
        for group in range(start, file.metadata.num_row_groups if stop is None else stop):
            metadata = file.metadata.row_group(group)
            file_bytes += sizes[group]
            if line + metadata.num_rows <= position.line:
                line += metadata.num_rows
                continue
            first_line = line
            try:
                count = rows_per_block(metadata.total_byte_size, metadata.num_rows)
                for batch in file.iter_batches(count, row_groups=[group], columns=columns):
                    if line + batch.num_rows > position.line:
                        first = max(line, position.line)
                        rows = rows_of(batch.slice(first - line))
                        yield RowBlock(source, replace(position, line=first, offset=0), rows, names, file_bytes)
                    line += batch.num_rows
            except (OSError, ValueError) as error:  # pyarrow's own errors are of these types
                raise _damaged_group(source, raw, group, line, str(error)) from error
            if line != first_line + metadata.num_rows:
                what = f"it holds {line - first_line} rows where its header says {metadata.num_rows}"
                raise _damaged_group(source, raw, group, line, what)


def columns_of(keys: Sequence[str], names: Sequence[str], source: SourceFile) -> list[str]:
    """Name the columns that keys stand for; dots go into nested columns.

    Raises:
        ForeignFileError: One of them stands there twice, and nothing says which is meant.
    """
    found = sorted({name for key in keys for name in (key, key.partition(".")[0]) if name in names})
    for name in found:
        if list(names).count(name) > 1:
            raise ForeignFileError(f"{source.place}: has several columns named {name!r}. Rename or remove all but one.")
    return found


def rows_per_block(num_bytes: int, num_rows: int) -> int:
    """Return how many rows of a table of this size make a block."""
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES * num_rows // max(1, num_bytes)))


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
def _opened(source: SourceFile) -> Iterator[tuple[Any, Any]]:
    import pyarrow.parquet as pq

    with source.open() as raw:
        try:
            file = pq.ParquetFile(raw, page_checksum_verification=True, buffer_size=BUFFER_BYTES, pre_buffer=False)
            _check_footer(file)
        except Exception as error:  # pyarrow raises its own and builtin types for damaged files
            reason = f"not a whole Parquet file: its footer, before byte {source.size_bytes}, cannot be read ({error})"
            raise DamagedStreamError(source.name, reason, True) from error
        yield file, raw


def _check_footer(file: Any) -> None:
    """Read what later steps take for granted."""
    counted = sum(file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups))
    if counted != file.metadata.num_rows:
        raise ValueError(f"its row groups hold {counted} rows where the file should have {file.metadata.num_rows}")
    if not all(file.schema_arrow.names):
        raise ValueError("a column has no name")


def _group_bytes(source: SourceFile, metadata: Any) -> list[int]:
    """Share the file's bytes out to its row groups by their sizes in memory.

    What the metadata say of columns is not asked: where it is damaged, pyarrow ends the process.
    """
    groups = range(metadata.num_row_groups)
    sizes = [max(0, metadata.row_group(number).total_byte_size) for number in groups]
    return [source.size_bytes * size // max(1, sum(sizes)) for size in sizes]


def _damaged_group(source: SourceFile, raw: Any, group: int, line: int, what: str) -> DamagedStreamError:
    where = f"row group {group}, before byte {raw.tell()}"
    return DamagedStreamError(source.name, f"damaged Parquet data in {where}, after row {line - 1} ({what})", False)
