"""Blocks of whole lines from a stretch of a file, compressed or not.

A piece of a file has those lines that begin after its first byte and not after its stop; the
first piece has the line at byte 0 too. So a piece that does not begin at byte 0 leaves out
everything through its first newline, and one that has a stop goes on behind it through the next
newline. Where a file is cut at zstd frames, "byte" means the decompressed one.
"""

from collections.abc import Iterator

from preprocessing.reading.blocks import LineBlock, Position
from preprocessing.reading.compression import Kind, decompressed_chunks
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.source_file import SourceFile

Chunks = Iterator[tuple[bytes, int]]


def line_blocks(
    source: SourceFile,
    kind: Kind,
    position: Position,
    *,
    start: int,
    stop: int | None,
    block_bytes: int,
    line_bytes: int,
) -> Iterator[LineBlock]:
    """Cut a piece of a file into blocks, from `position` on.

    Args:
        start, stop: Bytes on disk between which the piece lies.
        line_bytes: A longer line counts as damage, so that memory stays bounded.

    Raises:
        DamagedStreamError: After the last whole line before the damage.
    """
    parts: list[bytes] = []
    parts_bytes = 0
    file_bytes = start
    damage = None
    chunks = _chunks_of_lines(source, kind, start, stop, position.offset)
    while True:
        try:
            chunk, file_bytes = next(chunks, (b"", file_bytes))
        except DamagedStreamError as error:
            damage, chunk = error, b""
        if not chunk:
            break
        parts.append(chunk)
        parts_bytes += len(chunk)
        if parts_bytes >= block_bytes and b"\n" in chunk:
            cut = chunk.rindex(b"\n") + 1
            parts[-1] = chunk[:cut]
            block = LineBlock(source, position, b"".join(parts), file_bytes - start)
            yield block
            position = block.end
            parts = [chunk[cut:]]
            parts_bytes = len(parts[0])
        elif parts_bytes > line_bytes:
            line = position.line + sum(part.count(b"\n") for part in parts)
            reason = f"line {line} is longer than {line_bytes} bytes, which no record is"
            damage = DamagedStreamError(source.name, f"{reason} (before byte {file_bytes} of the file)", False)
            break
    rest = b"".join(parts)
    if damage is not None:
        rest = rest[: rest.rfind(b"\n") + 1]  # the line in which the damage begins is no record
    if rest:
        yield LineBlock(source, position, rest, file_bytes - start)
    if damage is not None:
        raise damage


def _chunks_of_lines(source: SourceFile, kind: Kind, start: int, stop: int | None, offset: int) -> Chunks:
    """Yield the bytes of the lines of a piece but for its first `offset` bytes."""
    if start:
        first = _first_newline(source, kind, start, stop)
        if first is None:
            return
        offset += first + 1
    if kind == "plain":
        if stop is not None and start + offset > stop:
            return
        start, offset = start + offset, 0
    for chunk, file_bytes in decompressed_chunks(source, kind, start=start, stop=stop):
        if offset < len(chunk):
            yield chunk[offset:], file_bytes
        offset = max(0, offset - len(chunk))
    if stop is None or offset:
        return
    for chunk, file_bytes in decompressed_chunks(source, kind, start=stop):
        end = chunk.find(b"\n") + 1
        yield chunk[: end or None], file_bytes
        if end:
            return


def _first_newline(source: SourceFile, kind: Kind, start: int, stop: int | None) -> int | None:
    """Return the place of the first newline, in decompressed bytes from the start of the piece."""
    done = 0
    for chunk, _ in decompressed_chunks(source, kind, start=start, stop=stop):
        found = chunk.find(b"\n")
        if found >= 0:
            return done + found
        done += len(chunk)
    return None
