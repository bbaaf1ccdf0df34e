"""A stream of chunks read by numbers of bytes and by lines."""

from collections.abc import Iterator

from preprocessing.reading.compression import Chunks


class ChunkReader:
    """Reads a stream of chunks forwards.

    Args:
        chunks: Bytes of the stream, each with the place in the file on disk reached so far.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._buffer = b""
        self._next = 0
        self.position = 0
        """Bytes of the stream read so far."""
        self.file_bytes = 0
        """Place in the file on disk."""

    def read(self, count: int) -> bytes:
        """Return the next bytes, fewer than `count` at the end of the stream only."""
        return b"".join(chunk for chunk, _ in self.chunks(count))

    def chunks(self, count: int) -> Iterator[tuple[bytes, int]]:
        """Yield the next `count` bytes in chunks, fewer at the end of the stream only."""
        while count:
            if self._next == len(self._buffer) and not self._fill():
                return
            chunk = self._buffer[self._next : self._next + count]
            self._next += len(chunk)
            self.position += len(chunk)
            count -= len(chunk)
            yield chunk, self.file_bytes

    def skip_to(self, position: int) -> None:
        """Go forwards to a place in the stream, or to its end."""
        for _ in self.chunks(max(0, position - self.position)):
            pass

    def read_line(self, limit: int) -> bytes:
        """Return the next line with its newline; without one at the end of the stream, or after `limit` bytes."""
        parts: list[bytes] = []
        length = 0
        while length < limit:
            if self._next == len(self._buffer) and not self._fill():
                break
            end = self._buffer.find(b"\n", self._next, self._next + limit - length) + 1
            part = self._buffer[self._next : end or self._next + limit - length]
            self._next += len(part)
            self.position += len(part)
            length += len(part)
            parts.append(part)
            if end:
                break
        return b"".join(parts)

    def _fill(self) -> bool:
        self._buffer, self.file_bytes = next(self._chunks, (b"", self.file_bytes))
        self._next = 0
        return bool(self._buffer)
