"""One input file, and the one way to open it, wherever it lies."""

import io
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from contracts.errors import ConfigError
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.remote import open_remote, remote_head

BUFFER_BYTES = 128 * 1024


@dataclass(frozen=True)
class SourceFile:
    """One input file, or a stretch of one that is a file itself: a member of a tar archive.

    Args:
        name: Part of the identity and of `documents.parquet`: path below the folder or glob that
            the user named, or the file's own name. Independent of where the data lie.
        place: Where it lies now: a path, or an address such as s3://bucket/key.
        first_byte, num_bytes: The stretch of the file at `place`; all of it if `num_bytes` is None.
            Of a hub dataset, `num_bytes` is an estimate.
    """

    name: str
    place: Path | str
    first_byte: int = 0
    num_bytes: int | None = None

    @property
    def is_remote(self) -> bool:
        return isinstance(self.place, str)

    @property
    def is_in_this_process_only(self) -> bool:
        """Tell a file that other processes cannot open."""
        return isinstance(self.place, str) and self.place.startswith("memory://")

    @property
    def path(self) -> Path:
        """The local file that holds the bytes.

        Raises:
            ValueError: The file lies elsewhere.
        """
        if isinstance(self.place, str):
            raise ValueError(f"{self.place} has no path on this machine")
        return self.place

    @property
    def file_name(self) -> str:
        """Last part of the name, which tells its kind where the bytes do not."""
        whole = self.name if self.first_byte or isinstance(self.place, str) else self.place.name
        return PurePosixPath(whole).name

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

    def head(self, count: int) -> bytes:
        """Return its first bytes.

        Raises:
            ConfigError: It cannot be opened.
        """
        if self.num_bytes == 0:
            return b""  # servers refuse the range
        if isinstance(self.place, str):
            return remote_head(self.place, count)
        with self.open() as file:
            return file.read(count)

    def open(self) -> BinaryIO:
        """Open it for reading from its first byte on, with byte 0 at its beginning.

        Raises:
            ConfigError: It cannot be opened.
        """
        if isinstance(self.place, str):
            file = open_remote(self.place)
        else:
            try:
                file = self.place.open("rb")
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
        if first_byte:
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
        try:
            data = self._file.read(wanted)
        except Exception as error:  # each file system has its own
            reason = f"cannot be read at byte {self._position} ({str(error) or type(error).__name__})"
            raise DamagedStreamError(self._source.name, reason, False) from error
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
