"""Blocks of the records of WARC files (ISO 28500): extracted text, as in Common Crawl's WET files.

Records of the type "conversion" are documents: plain text that was taken out of a web page. All
others are filtered, by type. A record that is not whole, or does not end as it must, is damage.
"""

from collections.abc import Iterator
from dataclasses import replace

from preprocessing.reading.blocks import BLOCK_BYTES, BLOCK_ROWS, LINE_BYTES, Filtered, Position, Row, RowBlock
from preprocessing.reading.chunk_reader import ChunkReader
from preprocessing.reading.compression import Chunks
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.source_file import SourceFile

TEXT = "text"
_HEADER_BYTES = 2**20
_END = b"\r\n\r\n"

_MOST_DIGITS = 18  # of a length


def warc_blocks(
    source: SourceFile,
    chunks: Chunks,
    position: Position,
    *,
    block_bytes: int = BLOCK_BYTES,
    line_bytes: int = LINE_BYTES,
) -> Iterator[RowBlock]:
    """Give the records as rows: the text and the fields of the header.

    Args:
        line_bytes: A longer record is rejected.

    Raises:
        DamagedStreamError: After the last whole record before the damage.
    """
    reader = ChunkReader(chunks)
    rows: list[tuple[Row, int]] = []
    rows_bytes = 0
    damage = None
    while True:
        start = reader.position
        try:
            row = _next_row(reader, source.name, line_bytes)
        except DamagedStreamError as error:
            row, damage = None, error
        if row is not None:
            rows.append((row, start))
            rows_bytes += reader.position - start
        if rows and (row is None or rows_bytes >= block_bytes or len(rows) >= BLOCK_ROWS):
            yield (found := _block(source, position, rows, reader.file_bytes))
            position, rows, rows_bytes = found.end, [], 0
        if damage is not None:
            raise damage
        if row is None:
            return


def _next_row(reader: ChunkReader, name: str, record_bytes: int) -> Row | None:
    start = reader.position
    version = reader.read_line(_HEADER_BYTES)
    if not version:
        return None
    if not version.startswith(b"WARC/") or not version.endswith(b"\n"):
        raise _damaged(name, start, "no WARC record begins where one must", not version.endswith(b"\n"))
    header = _header(reader, name, start)
    length = header.get("content-length", "")
    if not (length.isascii() and length.isdigit() and len(length) <= _MOST_DIGITS):
        raise _damaged(name, start, f"a WARC record without its length (Content-Length: {length[:40]!r})", False)
    size = int(length)
    kind = header.get("warc-type", "")
    is_kept = kind == "conversion" and size <= record_bytes
    body_start = reader.position
    body = reader.read(size) if is_kept else b""
    reader.skip_to(body_start + size)
    if reader.position < body_start + size or reader.read(len(_END)) != _END:
        is_truncated = not reader.read(1)
        raise _damaged(name, start, "a WARC record that does not end where it must", is_truncated)
    if kind != "conversion":
        return Filtered(f"WARC record of type {kind[:40] or 'unknown'}")
    if not is_kept:
        return f"the record is longer than {record_bytes} bytes, which no document is"
    return {**header, TEXT: body}


def _header(reader: ChunkReader, name: str, start: int) -> dict[str, str]:
    """Read the fields of a header, their names in lower case as well as as they stand."""
    fields: dict[str, str] = {}
    key = ""
    while reader.position - start < _HEADER_BYTES:
        line = reader.read_line(_HEADER_BYTES)
        if not line.endswith(b"\n"):
            break
        text = line.rstrip(b"\r\n").decode("utf-8", "replace")
        if not text:
            return fields
        if text[0] in " \t" and key:  # a field may go on in the next line
            fields[key] = fields[key.lower()] = f"{fields[key]} {text.strip()}"
            continue
        key, _, value = text.partition(":")
        fields[key] = fields[key.lower()] = value.strip()
    raise _damaged(name, start, "a WARC header that does not end", True)


def _damaged(name: str, start: int, what: str, is_truncated: bool) -> DamagedStreamError:
    return DamagedStreamError(name, f"{what}: record at byte {start} of the decompressed file", is_truncated)


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
