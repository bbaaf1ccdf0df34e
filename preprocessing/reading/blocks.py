"""Blocks of records: what one worker handles at a time, cut from a file but not parsed.

A block holds whole lines (decompressed bytes), or rows that are records already: of a Parquet or
Arrow file, of a hub dataset, of a WARC file, or whole texts. Line numbers are 1-based and number
the rows where there are no lines; byte offsets count decompressed bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from preprocessing.reading.source_file import SourceFile

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
        file_bytes_read: Bytes of the piece on disk read so far, for progress.
        is_text: Each line is a text, not a JSON object.
    """

    source: SourceFile
    start: Position
    data: bytes
    file_bytes_read: int
    is_text: bool = False

    @property
    def num_lines(self) -> int:
        return self.data.count(b"\n") + (not self.data.endswith(b"\n"))

    @property
    def end(self) -> Position:
        return replace(self.start, line=self.start.line + self.num_lines, offset=self.start.offset + len(self.data))


@dataclass(frozen=True)
class Filtered:
    """A row that is no document by rule; `reason` says by which."""

    reason: str


Row = dict[str, Any] | str | Filtered
"""A record by its columns; or a text that says why it cannot be read."""


@dataclass(frozen=True)
class RowBlock:
    """Rows of one file.

    Args:
        rows: The columns asked for, by name; texts may be bytes of UTF-8.
        columns: All columns of the file, for messages.
        offsets: Byte offset of each row, where it has one.
        text_key: Key of the text where the rows were made here; otherwise the user says it.
    """

    source: SourceFile
    start: Position
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    file_bytes_read: int
    offsets: tuple[int, ...] | None = None
    text_key: str | None = None

    @property
    def end(self) -> Position:
        return replace(self.start, line=self.start.line + len(self.rows), offset=0)


Block = LineBlock | RowBlock


def from_line(blocks: Iterator[Block], line: int) -> Iterator[Block]:
    """Leave out the records before `line`: how a stream that can only be read from its beginning is resumed."""
    for block in blocks:
        count = line - block.start.line
        if count <= 0:
            yield block
        elif block.end.line > line:
            yield _without_first(block, count)


def _without_first(block: Block, count: int) -> Block:
    line = block.start.line + count
    if isinstance(block, RowBlock):
        offsets = None if block.offsets is None else block.offsets[count:]
        return replace(block, start=replace(block.start, line=line), rows=block.rows[count:], offsets=offsets)
    cut = 0
    for _ in range(count):
        cut = block.data.index(b"\n", cut) + 1
    start = replace(block.start, line=line, offset=block.start.offset + cut)
    return replace(block, start=start, data=block.data[cut:])
