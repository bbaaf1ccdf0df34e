"""Blocks of records: what one worker handles at a time, cut from a file but not parsed.

A block holds whole lines (decompressed bytes), or rows that are records already: of a Parquet or
Arrow file, of a hub dataset, of a WARC file. Line numbers are 1-based and number the rows where
there are no lines; byte offsets count decompressed bytes.
"""

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
    """Rows of one file.

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
