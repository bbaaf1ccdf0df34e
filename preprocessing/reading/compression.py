"""Decompressed bytes of a file: gzip, zstd, xz, bzip2, or plain.

Members, frames and streams that follow each other are one stream. A stream that ends early or is
damaged is an error, after all bytes before the damage were given.
"""

import bz2
import lzma
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Literal, Protocol

from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.zstd_frames import MAGIC, is_skippable

READ_BYTES = 128 * 1024
ZSTD_READ_BYTES = 4096  # zstd can blow bytes up 32,768 times: no call gives more than 128 MiB
CHUNK_BYTES = 2**20
ZSTD_WINDOW_LOG_MAX = 31  # `zstd --long=31`; memory follows the frame's own window, not this bound
XZ_MEMORY_BYTES = 2**30  # `xz -9` needs 65 MiB; only what asks for a giant dictionary needs more

Packing = Literal["plain", "gzip", "zstd", "xz", "bzip2"]
Chunks = Iterator[tuple[bytes, int]]


def packing_of(head: bytes) -> Packing:
    """Tell the compression by the first bytes of a file."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(MAGIC) or (len(head) >= 4 and is_skippable(head)):
        return "zstd"
    if head.startswith(b"\xfd7zXZ\x00"):
        return "xz"
    # The level, then the magic number of a block or of the end.
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bzip2"
    return "plain"


def decompressed_chunks(
    source: SourceFile, packing: Packing, *, start: int = 0, stop: int | None = None, checked_only: bool = False
) -> Chunks:
    """Yield the decompressed bytes of a file in chunks, none empty, each with the place in the file reached so far.

    Args:
        start, stop: Bytes of the file between which to read; in a compressed file, where a member
            or frame begins.
        checked_only: Of a damaged stream give only members and frames that are whole. A checksum
            stands at their end, so what was decompressed of the damaged one may be anything. It takes a
            pass over the file beforehand. One that ends early is given as far as it goes.

    Raises:
        DamagedStreamError: After the last good chunk, if the stream is damaged or ends early.
    """
    damage = _damage_ahead(source, packing, start, stop) if checked_only and packing != "plain" else None
    if damage is not None:
        left = damage.checked_bytes or 0
        for chunk, place in decompressed_chunks(source, packing, start=start, stop=stop):
            if not left:
                break
            yield chunk[:left], place
            left -= min(left, len(chunk))
        raise damage
    with source.open() as file:
        if start:
            file.seek(start)
        raw = _raw_chunks(file, start, stop, ZSTD_READ_BYTES if packing == "zstd" else READ_BYTES, source.name)
        yield from decode(raw, packing, source.name)


def checked_line_rest(source: SourceFile, packing: Packing, start: int) -> bytes:
    """Return the bytes from `start` on through the first newline, of members and frames that are whole.

    Raises:
        DamagedStreamError: The one in which the line ends is damaged, or the file ends in it.
    """
    found = bytearray()
    end = 0
    checked: list[int] = []
    with source.open() as file:
        file.seek(start)
        raw = _raw_chunks(file, start, None, ZSTD_READ_BYTES if packing == "zstd" else READ_BYTES, source.name)
        for chunk, _ in decode(raw, packing, source.name, checked=checked):
            if not end:
                found += chunk
                end = found.find(b"\n") + 1
            if end and checked and checked[-1] >= end:
                break
    return bytes(found[: end or None])


def _damage_ahead(source: SourceFile, packing: Packing, start: int, stop: int | None) -> DamagedStreamError | None:
    """Read a stream and return what is wrong with it, unless it only ends early."""
    try:
        for _ in decompressed_chunks(source, packing, start=start, stop=stop):
            pass
    except DamagedStreamError as error:
        if error.is_truncated:
            return None
        kept = error.checked_bytes or 0
        reason = f"{error.reason}; only its whole members before that are kept, {kept} bytes decompressed"
        return DamagedStreamError(error.file, reason, False, kept)
    return None


def decode(
    raw: Iterable[tuple[bytes, int]], packing: Packing, name: str, *, checked: list[int] | None = None
) -> Chunks:
    """Decompress chunks; see `decompressed_chunks`.

    Args:
        raw: Compressed chunks, each with the place in the file at its end.
        name: The file as the user named it, for messages.
        checked: Takes, at the end of each whole member or frame, the decompressed bytes up to there.
    """
    if packing == "plain":
        yield from raw
        return
    decoder: _Decoder | None = None
    position = total = whole = 0
    for data, position in raw:
        while data:
            if decoder is None:
                if packing in ("gzip", "xz") and not data.strip(b"\0"):
                    break  # zero padding after the last member, as on tapes, is legal
                if packing == "xz":
                    data = data.lstrip(b"\0")
                decoder = _new_decoder(packing)
            try:
                for output in _outputs(decoder, data):
                    total += len(output)
                    for first in range(0, len(output), CHUNK_BYTES):
                        yield output[first : first + CHUNK_BYTES], position
            except Exception as error:  # the libraries' errors have no common base
                raise _damaged(name, packing, position, whole, error) from error
            data = decoder.unused_data
            if decoder.eof:
                decoder, whole = None, total
                if checked is not None:
                    checked.append(whole)
            elif not data:
                break
    if decoder is not None:
        raise DamagedStreamError(
            name, f"the {packing} stream ends early: the file is truncated at byte {position}", True, whole
        )


def _raw_chunks(file: BinaryIO, start: int, stop: int | None, read_bytes: int, name: str) -> Chunks:
    position = start
    while data := file.read(read_bytes if stop is None else min(read_bytes, stop - position)):
        position += len(data)
        yield data, position
    if stop is not None and position < stop:
        raise DamagedStreamError(name, f"ends at byte {position}, before byte {stop}: the file became shorter", True)


class _Decoder(Protocol):
    """One gzip member, zstd frame, xz or bzip2 stream."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _new_decoder(packing: Packing) -> _Decoder:
    if packing == "gzip":
        return zlib.decompressobj(wbits=31)
    if packing == "xz":
        return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)
    if packing == "bzip2":
        return bz2.BZ2Decompressor()
    import zstandard

    decoder: _Decoder = zstandard.ZstdDecompressor(max_window_size=2**ZSTD_WINDOW_LOG_MAX).decompressobj()
    return decoder


def _outputs(decoder: _Decoder, data: bytes) -> Iterator[bytes]:
    """Yield what some input decompresses to, never too much at once."""
    if not isinstance(decoder, lzma.LZMADecompressor | bz2.BZ2Decompressor):
        yield decoder.decompress(data)
        return
    yield decoder.decompress(data, CHUNK_BYTES)
    while not decoder.eof and not decoder.needs_input:
        yield decoder.decompress(b"", CHUNK_BYTES)


def _damaged(name: str, packing: Packing, position: int, whole: int, error: Exception) -> DamagedStreamError:
    reason = f"damaged {packing} data, or bytes that are not {packing}, before byte {position} ({error})"
    return DamagedStreamError(name, reason, False, whole)
