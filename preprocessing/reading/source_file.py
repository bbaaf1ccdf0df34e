"""One input file, and the one way to open it, wherever it lies."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from contracts.errors import ConfigError
from preprocessing.reading.damage import DamagedStreamError

BUFFER_BYTES = 128 * 1024


@dataclass(frozen=True)
class SourceFile:
    """One input file, or a stretch of one that is a file itself: a member of a tar archive.

    Args:
        name: Part of the identity and of `documents.parquet`: path below the folder or glob that
            the user named, or the file's own name. Independent of where the data lie.
        place: Where it lies now.
        first_byte, num_bytes: The stretch of the file at `place`; all of it if `num_bytes` is None.
    """

    name: str
    place: Path
    first_byte: int = 0
    num_bytes: int | None = None

    @property
    def path(self) -> Path:
        """The local file that holds the bytes."""
        return self.place

    @property
    def size_bytes(self) -> int:
        """Size on disk.

        Raises:
            ConfigError: The file is not there.
        """
        if self.num_bytes is not None:
            return self.num_bytes
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise ConfigError(f"{self.place}: cannot be read ({error.strerror or error}).") from error

    def open(self) -> BinaryIO:
        """Open it for reading from its first byte on, with byte 0 at its beginning.

        Raises:
            ConfigError: It cannot be opened.
        """
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise ConfigError(f"{self.place}: cannot be read ({error.strerror or error}).") from error
        if self.num_bytes is None:
            return file
        stretch = _Stretch(self, file, self.first_byte, self.num_bytes)
        return cast(BinaryIO, io.BufferedReader(stretch, BUFFER_BYTES))


class _Stretch(io.RawIOBase):
    """Some bytes of a file, as a file of their own that never ends early without an error."""

    def __init__(self, source: SourceFile, file: BinaryIO, first_byte: int, num_bytes: int) -> None:
        super().__init__()
        self._source = source
        self._file = file
        self._first_byte = first_byte
        self._num_bytes = num_bytes
        self._position = 0
        file.seek(first_byte)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, base + offset)
        self._file.seek(self._first_byte + self._position)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._num_bytes - self._position)
        if wanted <= 0:
            return 0
        data = self._file.read(wanted)
        if not data:
            raise DamagedStreamError(
                self._source.name, f"ends at byte {self._position} of {self._num_bytes}: the file is truncated", True
            )
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
