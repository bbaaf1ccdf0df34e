"""Blocks of records: what one worker handles at a time. Files are cut here, not parsed.

A block holds whole lines of a JSONL file (decompressed bytes), or some rows of a Parquet file.
Line numbers are 1-based; byte offsets count decompressed bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from preprocessing.reading.compression import DamagedStreamError, Kind, decompressed_chunks, detect_kind
from preprocessing.reading.sources import SourceFile

BLOCK_BYTES = 2 * 2**20
BLOCK_ROWS = 1024
LINE_BYTES = 128 * 2**20  # a longer line is no document, but a damaged or hostile file


@dataclass(frozen=True)
class Position:
    """A place between two records: number of the piece, its next line, and that line's byte offset.

    Args:
        piece: Number of the piece in the row of pieces that is being read; of the file, where
            whole files are read.
        line, offset: Counted from the first record of the piece: line 1, byte 0.
    """

    piece: int = 0
    line: int = 1
    offset: int = 0


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of one file.

    Args:
        data: Their bytes; the last line lacks its newline only at the end of the file.
        file_bytes_read: Bytes of the file on disk read so far, for progress.
    """

    source: SourceFile
    start: Position
    data: bytes
    file_bytes_read: int

    @property
    def num_lines(self) -> int:
        return self.data.count(b"\n") + (not self.data.endswith(b"\n"))

    @property
    def end(self) -> Position:
        return replace(self.start, line=self.start.line + self.num_lines, offset=self.start.offset + len(self.data))


@dataclass(frozen=True)
class RowBlock:
    """Rows of a Parquet file.

    Args:
        rows: The columns asked for, by name; a text instead of a row says why it cannot be read.
        columns: All columns of the file, for messages.
    """

    source: SourceFile
    start: Position
    rows: tuple[dict[str, Any] | str, ...]
    columns: tuple[str, ...]
    file_bytes_read: int

    @property
    def end(self) -> Position:
        return replace(self.start, line=self.start.line + len(self.rows), offset=0)


Block = LineBlock | RowBlock


def file_blocks(
    source: SourceFile,
    start: Position,
    *,
    keys: Sequence[str],
    block_bytes: int = BLOCK_BYTES,
    line_bytes: int = LINE_BYTES,
) -> Iterator[Block]:
    """Cut one file into blocks, from `start` on.

    Args:
        keys: Keys of the text and the subset: the columns taken of a Parquet file.
        line_bytes: A longer line counts as damage, so that memory stays bounded.

    Raises:
        DamagedStreamError: After the last whole line before the damage.
        InputError: The file is of no known type.
    """
    kind = detect_kind(source.path)
    if kind == "parquet":
        return _row_blocks(source, start, keys)
    return _line_blocks(source, start, kind, block_bytes, line_bytes)


def _line_blocks(
    source: SourceFile, start: Position, kind: Kind, block_bytes: int, line_bytes: int
) -> Iterator[LineBlock]:
    pieces: list[bytes] = []
    pieces_bytes = 0
    to_skip = start.offset
    file_bytes = 0
    damage = None
    chunks = decompressed_chunks(source.path, kind, source.name)
    while True:
        try:
            chunk, file_bytes = next(chunks, (b"", file_bytes))
        except DamagedStreamError as error:
            damage, chunk = error, b""
        if not chunk:
            break
        chunk, to_skip = chunk[to_skip:], max(0, to_skip - len(chunk))
        pieces.append(chunk)
        pieces_bytes += len(chunk)
        if pieces_bytes >= block_bytes and b"\n" in chunk:
            cut = chunk.rindex(b"\n") + 1
            pieces[-1] = chunk[:cut]
            block = LineBlock(source, start, b"".join(pieces), file_bytes)
            yield block
            start = block.end
            pieces = [chunk[cut:]]
            pieces_bytes = len(pieces[0])
        elif pieces_bytes > line_bytes:
            line = start.line + sum(piece.count(b"\n") for piece in pieces)
            reason = f"line {line} is longer than {line_bytes} bytes, which no record is"
            damage = DamagedStreamError(source.name, reason, False)
            break
    rest = b"".join(pieces)
    if damage is not None:
        rest = rest[: rest.rfind(b"\n") + 1]  # the line in which the damage begins is no record
    if rest:
        yield LineBlock(source, start, rest, file_bytes)
    if damage is not None:
        raise damage


def _row_blocks(source: SourceFile, start: Position, keys: Sequence[str]) -> Iterator[RowBlock]:
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source.path)
    except Exception as error:  # pyarrow raises its own and builtin types for damaged files
        raise DamagedStreamError(source.name, f"not a whole Parquet file ({error})", True) from error
    names = tuple(file.schema_arrow.names)
    columns = sorted({name for key in keys for name in (key, key.partition(".")[0]) if name in names})
    line, file_bytes = 1, 0
    for group in range(file.metadata.num_row_groups):
        metadata = file.metadata.row_group(group)
        file_bytes += sum(metadata.column(n).total_compressed_size for n in range(metadata.num_columns))
        if line + metadata.num_rows <= start.line:
            line += metadata.num_rows
            continue
        try:
            for batch in file.iter_batches(BLOCK_ROWS, row_groups=[group], columns=columns):
                if line + batch.num_rows > start.line:
                    first = max(line, start.line)
                    rows = _rows_of(batch.slice(first - line))
                    yield RowBlock(source, replace(start, line=first, offset=0), rows, names, file_bytes)
                line += batch.num_rows
        except OSError as error:
            raise DamagedStreamError(
                source.name, f"damaged Parquet data after row {line - 1} ({error})", False
            ) from error


def _rows_of(batch: Any) -> tuple[dict[str, Any] | str, ...]:
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
