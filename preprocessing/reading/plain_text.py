"""Blocks of plain text, where a document is a line, a paragraph, or the whole file.

A paragraph is what stands between blank lines; it loses the newline at its end. A whole file is
taken as it is, but for a byte order mark.
"""

from collections.abc import Iterator
from dataclasses import replace

from preprocessing.reading.blocks import BLOCK_BYTES, BLOCK_ROWS, LINE_BYTES, Position, Row, RowBlock
from preprocessing.reading.compression import Chunks
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.lines import line_blocks
from preprocessing.reading.source_file import SourceFile

TEXT = "text"


def document_blocks(
    source: SourceFile, chunks: Chunks, position: Position, *, line_bytes: int = LINE_BYTES
) -> Iterator[RowBlock]:
    """Give the whole stream as one document.

    Raises:
        DamagedStreamError: The stream is damaged, or too long to be one document.
    """
    parts: list[bytes] = []
    length = file_bytes = 0
    for chunk, file_bytes in chunks:
        parts.append(chunk)
        length += len(chunk)
        if length > line_bytes:
            reason = f"the text is longer than {line_bytes} bytes, which no document is"
            raise DamagedStreamError(
                source.name, f"{reason} (at byte {file_bytes}); set text_unit to line or paragraph", False
            )
    yield _block(source, position, [({TEXT: b"".join(parts)}, 0)], file_bytes)


def paragraph_blocks(
    source: SourceFile,
    chunks: Chunks,
    position: Position,
    *,
    block_bytes: int = BLOCK_BYTES,
    line_bytes: int = LINE_BYTES,
) -> Iterator[RowBlock]:
    """Give each paragraph as a document.

    Raises:
        DamagedStreamError: After the last whole paragraph before the damage.
    """
    rows: list[tuple[Row, int]] = []
    paragraph: list[bytes] = []
    first = paragraph_bytes = rows_bytes = file_bytes = 0
    for block in line_blocks(source, chunks, Position(), block_bytes=block_bytes, line_bytes=line_bytes):
        file_bytes = block.file_bytes_read
        offset = block.start.offset
        for line in block.data.splitlines(keepends=True) if b"\r" not in block.data else _lines(block.data):
            if line.strip():
                first = first if paragraph else offset
                paragraph.append(line)
                paragraph_bytes += len(line)
                if paragraph_bytes > line_bytes:
                    reason = f"the paragraph at byte {first} is longer than {line_bytes} bytes, which no document is"
                    raise DamagedStreamError(source.name, reason, False)
            elif paragraph:
                rows.append(({TEXT: _ended(paragraph)}, first))
                rows_bytes += paragraph_bytes
                paragraph, paragraph_bytes = [], 0
            offset += len(line)
        if rows_bytes >= block_bytes or len(rows) >= BLOCK_ROWS:
            yield (found := _block(source, position, rows, file_bytes))
            position, rows, rows_bytes = found.end, [], 0
    if paragraph:
        rows.append(({TEXT: _ended(paragraph)}, first))
    if rows:
        yield _block(source, position, rows, file_bytes)


def _lines(data: bytes) -> list[bytes]:
    """Cut at newlines alone; `splitlines` cuts at carriage returns too."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _ended(lines: list[bytes]) -> bytes:
    return b"".join(lines).removesuffix(b"\n").removesuffix(b"\r")


def _block(source: SourceFile, position: Position, rows: list[tuple[Row, int]], file_bytes: int) -> RowBlock:
    return RowBlock(
        source,
        replace(position, offset=0),
        tuple(row for row, _ in rows),
        (TEXT,),
        file_bytes,
        offsets=tuple(offset for _, offset in rows),
        text_key=TEXT,
    )
