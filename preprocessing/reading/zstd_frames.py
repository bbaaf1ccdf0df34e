"""Where the frames of a zstd file begin, found by its headers alone: nothing is decompressed.

The format is RFC 8878, section 3.1: a frame is a header, blocks that say how long they are, and
perhaps a checksum; a skippable frame says its length.
"""

from typing import BinaryIO

MAGIC = b"\x28\xb5\x2f\xfd"
_DICTIONARY_ID_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_RLE, _RESERVED = 1, 3


class UnusualFrameError(Exception):
    """What follows is no frame, or not a whole one."""


def frame_starts(file: BinaryIO, size_bytes: int) -> list[int]:
    """Return the bytes at which the frames of a file begin, skippable ones included.

    Raises:
        UnusualFrameError: The file is not a row of whole frames.
    """
    starts = []
    position = 0
    while position < size_bytes:
        starts.append(position)
        position = _frame_end(file, position)
        if position > size_bytes:
            raise UnusualFrameError
    return starts


def is_skippable(head: bytes) -> bool:
    return head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50


def _frame_end(file: BinaryIO, start: int) -> int:
    head = _read(file, start, 8)
    if is_skippable(head):
        return start + 8 + int.from_bytes(head[4:8], "little")
    if head[:4] != MAGIC:
        raise UnusualFrameError
    descriptor = head[4]
    is_single_segment = bool(descriptor & 0x20)
    content_size_bytes = _CONTENT_SIZE_BYTES[descriptor >> 6] or int(is_single_segment)
    position = start + 5 + (not is_single_segment) + _DICTIONARY_ID_BYTES[descriptor & 3] + content_size_bytes
    while True:
        block = int.from_bytes(_read(file, position, 3), "little")
        is_last, kind, size = block & 1, block >> 1 & 3, block >> 3
        if kind == _RESERVED:
            raise UnusualFrameError
        position += 3 + (1 if kind == _RLE else size)
        if is_last:
            return position + (4 if descriptor & 4 else 0)


def _read(file: BinaryIO, position: int, count: int) -> bytes:
    file.seek(position)
    data = file.read(count)
    if len(data) < count:
        raise UnusualFrameError
    return data
