"""Decompressed bytes of a file whose type is told by its first bytes, never by its name.

Gzip members and zstd frames that follow each other (and skippable zstd frames) are one stream.
A stream that ends early or is damaged is an error, after all bytes before the damage were given.
"""

import zlib
from collections.abc import Iterator
from typing import BinaryIO, Literal, Protocol

from contracts.errors import InputError
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.source_file import SourceFile

READ_BYTES = 128 * 1024
ZSTD_READ_BYTES = 4096  # zstd can blow bytes up 32,768 times: no call gives more than 128 MiB
CHUNK_BYTES = 2**20
ZSTD_WINDOW_LOG_MAX = 31  # `zstd --long=31`; memory follows the frame's own window, not this bound

Kind = Literal["plain", "gzip", "zstd", "parquet"]
_REFUSED = {
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"ARROW1": "Arrow",
    b"\x04\x22\x4d\x18": "lz4",
}


def detect_kind(source: SourceFile) -> Kind:
    """Tell the type of a file by its first bytes.

    Raises:
        InputError: The file is of a type that cannot be read here.
        ConfigError: The file cannot be opened.
    """
    path = source.path
    with source.open() as file:
        head = file.read(8)
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50):
        return "zstd"
    if head.startswith(b"PAR1"):
        return "parquet"
    for magic, name in _REFUSED.items():
        if head.startswith(magic):
            raise InputError(
                f"{path}: its first bytes say {name}, which is not read. Convert it to .jsonl, .gz or .zst."
            )
    if not head and path.suffix in (".zst", ".gz", ".parquet"):
        raise InputError(f"{path}: holds no byte, so it is no {path.suffix[1:]} file. Copy it again, or leave it out.")
    return "plain"


class _Decoder(Protocol):
    """One gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def decompressed_chunks(
    source: SourceFile, kind: Kind, *, start: int = 0, stop: int | None = None
) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed bytes of a file in chunks, none empty, each with the place in the file reached so far.

    Args:
        start, stop: Bytes of the file between which to read; in a compressed file, where a gzip
            member or zstd frame begins.

    Raises:
        DamagedStreamError: After the last good chunk, if the stream is damaged or ends early.
    """
    with source.open() as file:
        if start:
            file.seek(start)
        raw = _raw_chunks(file, start, stop, ZSTD_READ_BYTES if kind == "zstd" else READ_BYTES)
        yield from raw if kind == "plain" else _decode(raw, kind, source.name)


def _raw_chunks(file: BinaryIO, start: int, stop: int | None, read_bytes: int) -> Iterator[tuple[bytes, int]]:
    position = start
    while data := file.read(read_bytes if stop is None else min(read_bytes, stop - position)):
        position += len(data)
        yield data, position


def _decode(raw: Iterator[tuple[bytes, int]], kind: Kind, name: str) -> Iterator[tuple[bytes, int]]:
    decoder: _Decoder | None = None
    position = 0
    for data, position in raw:
        while data:
            if decoder is None:
                if kind == "gzip" and not data.strip(b"\0"):
                    break  # zero padding after the last member, as on tapes, is legal
                decoder = _new_decoder(kind)
            try:
                output = decoder.decompress(data)
            except Exception as error:  # zlib.error and zstandard.ZstdError have no common base
                raise _damaged(name, kind, position, error) from error
            for first in range(0, len(output), CHUNK_BYTES):
                yield output[first : first + CHUNK_BYTES], position
            data = decoder.unused_data
            if decoder.eof:
                decoder = None
            elif not data:
                break
    if decoder is not None:
        raise DamagedStreamError(name, f"the {kind} stream ends early: the file is truncated at byte {position}", True)


def _new_decoder(kind: Kind) -> _Decoder:
    if kind == "gzip":
        return zlib.decompressobj(wbits=31)
    import zstandard

    decoder: _Decoder = zstandard.ZstdDecompressor(max_window_size=2**ZSTD_WINDOW_LOG_MAX).decompressobj()
    return decoder


def _damaged(name: str, kind: Kind, position: int, error: Exception) -> DamagedStreamError:
    return DamagedStreamError(
        name, f"damaged {kind} data, or bytes that are not {kind}, before byte {position} ({error})", False
    )
