"""Decompressed bytes of a file whose type is told by its first bytes, never by its name.

Gzip members and zstd frames that follow each other (and skippable zstd frames) are one stream.
A stream that ends early or is damaged is an error, after all bytes before the damage were given.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from contracts.errors import ConfigError, InputError

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


class DamagedStreamError(InputError):
    """A compressed file ends early or holds bytes that are no valid stream.

    Args:
        file: The file as the user named it.
        reason: What is wrong.
        is_truncated: The stream ends early, as after an interrupted copy.
    """

    def __init__(self, file: str, reason: str, is_truncated: bool) -> None:
        super().__init__(f"{file}: {reason}.")
        self.file = file
        self.reason = reason
        self.is_truncated = is_truncated

    def __reduce__(self) -> tuple[type["DamagedStreamError"], tuple[str, str, bool]]:
        return type(self), (self.file, self.reason, self.is_truncated)


def detect_kind(path: Path) -> Kind:
    """Tell the type of a file by its first bytes.

    Raises:
        InputError: The file is of a type that cannot be read here.
        ConfigError: The file cannot be opened.
    """
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}).") from error
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


def decompressed_chunks(path: Path, kind: Kind, name: str) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed bytes of a file in chunks, each with the file bytes read so far.

    Args:
        name: The file as the user named it, for messages.

    Raises:
        DamagedStreamError: After the last good chunk, if the stream is damaged or ends early.
    """
    with path.open("rb") as file:
        if kind == "plain":
            while data := file.read(READ_BYTES):
                yield data, file.tell()
        else:
            yield from _decode(file, kind, name)


def _decode(file: BinaryIO, kind: Kind, name: str) -> Iterator[tuple[bytes, int]]:
    decoder: _Decoder | None = None
    while data := file.read(ZSTD_READ_BYTES if kind == "zstd" else READ_BYTES):
        while data:
            if decoder is None:
                if kind == "gzip" and not data.strip(b"\0"):
                    break  # zero padding after the last member, as on tapes, is legal
                decoder = _new_decoder(kind)
            try:
                output = decoder.decompress(data)
            except Exception as error:  # zlib.error and zstandard.ZstdError have no common base
                raise _damaged(name, kind, file.tell(), error) from error
            for start in range(0, len(output), CHUNK_BYTES):
                yield output[start : start + CHUNK_BYTES], file.tell()
            data = decoder.unused_data
            if decoder.eof:
                decoder = None
            elif not data:
                break
    if decoder is not None:
        raise DamagedStreamError(
            name, f"the {kind} stream ends early: the file is truncated at byte {file.tell()}", True
        )


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
