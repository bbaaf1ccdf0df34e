"""Blocks of whole lines from a stretch of a file, compressed or not.

A piece of a file has those lines that begin after its first byte and not after its stop; the
first piece has the line at byte 0 too. So a piece that does not begin at byte 0 leaves out
everything through its first newline, and one that has a stop goes on behind it through the next
newline. Where a file is cut at zstd frames, "byte" means the decompressed one.
"""

from collections.abc import Iterator

from preprocessing.reading.blocks import BLOCK_BYTES, LINE_BYTES, LineBlock, Position
from preprocessing.reading.compression import Chunks, Packing, checked_line_rest, decompressed_chunks
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.source_file import SourceFile


def line_blocks(
    source: SourceFile,
    chunks: Chunks,
    position: Position,
    *,
    is_text: bool = False,
    block_bytes: int = BLOCK_BYTES,
    line_bytes: int = LINE_BYTES,
) -> Iterator[LineBlock]:
    """Cut chunks into blocks of whole lines, the first of them at `position`.

    Args:
        line_bytes: A longer line counts as damage, so that memory stays bounded.

    Raises:
        DamagedStreamError: After the last whole line before the damage.
    """
    parts: list[bytes] = []
    parts_bytes = file_bytes = 0
    damage = None
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
            block = LineBlock(source, position, b"".join(parts), file_bytes, is_text)
            yield block
            position = block.end
            parts = [chunk[cut:]]
            parts_bytes = len(parts[0])
        elif parts_bytes > line_bytes:
            line = position.line + sum(part.count(b"\n") for part in parts)
            reason = f"line {line} is longer than {line_bytes} bytes, which no record is"
            damage = DamagedStreamError(source.name, f"{reason} (before byte {file_bytes} of the piece on disk)", False)
            break
    rest = b"".join(parts)
    if damage is not None:
        rest = rest[: rest.rfind(b"\n") + 1]  # the line in which the damage begins is no record
    if rest:
        yield LineBlock(source, position, rest, file_bytes, is_text)
    if damage is not None:
        raise damage


def piece_chunks(
    source: SourceFile, packing: Packing, start: int, stop: int | None, offset: int, *, checked_only: bool = False
) -> Chunks:
    """Yield the bytes of the lines of a piece but for its first `offset` bytes.

    Args:
        start, stop: Bytes on disk between which the piece lies.
        checked_only: As for `decompressed_chunks`.
    """
    first = start
    if start:
        newline = _first_newline(source, packing, start, stop)
        if newline is None:
            return
        offset += newline + 1
    if packing == "plain":
        if stop is not None and start + offset > stop:
            return
        start, offset = start + offset, 0
    for chunk, place in decompressed_chunks(source, packing, start=start, stop=stop, checked_only=checked_only):
        if offset < len(chunk):
            yield chunk[offset:], place - first
        offset = max(0, offset - len(chunk))
    if stop is None or offset:
        return
    if checked_only and packing != "plain":
        if rest := checked_line_rest(source, packing, stop):
            yield rest, stop - first
        return
    for chunk, place in decompressed_chunks(source, packing, start=stop):
        end = chunk.find(b"\n") + 1
        yield chunk[: end or None], place - first
        if end:
            return


def _first_newline(source: SourceFile, packing: Packing, start: int, stop: int | None) -> int | None:
    """Return the place of the first newline, in decompressed bytes from the start of the piece."""
    done = 0
    for chunk, _ in decompressed_chunks(source, packing, start=start, stop=stop):
        found = chunk.find(b"\n")
        if found >= 0:
            return done + found
        done += len(chunk)
    return None
