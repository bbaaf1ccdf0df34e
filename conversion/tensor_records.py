"""The record of one tensor inside a checkpoint file: a small archive as `torch.save` writes it.

Reading finds the bytes of the data and runs nothing; writing is `torch.save` itself.
"""

import io
import pickle
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conversion.catalogue import Shape, num_elements
from conversion.file_reading import FileReader
from conversion.torch_files import STORAGES, follows

_DESCRIPTION_BYTES = 4096
_EDGE_BYTES = 2048
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class TensorRecord:
    """Where the data of a stored tensor lies.

    Args:
        storage_start: Byte of the file at which its storage begins.
        storage_offset: Elements of the storage before its first.
        storage_numel: Elements of the storage.
        stride: In elements.
        is_contiguous: Its elements follow each other.
        start: Byte of the file with its first element.
    """

    storage_start: int
    storage_offset: int
    storage_numel: int
    stride: Shape
    is_contiguous: bool
    start: int


class _Described(NamedTuple):
    storage: tuple[torch.dtype, str, int]
    offset: int
    size: Shape
    stride: Shape


def read_record(
    files: FileReader, path: Path, offset: int, length: int, *, dtype: torch.dtype, shape: Shape
) -> TensorRecord:
    """Find the data of the record at byte `offset` of a file, without reading it.

    Raises:
        Exception: It is damaged (of whatever kind `zipfile` and `pickle` raise), or is not the tensor
            that was expected (ValueError).
    """
    window = _Window(files, path, offset, length)
    with zipfile.ZipFile(window) as archive:
        members = {item.filename.partition("/")[2]: item for item in archive.infolist()}
    # The sums of small members are not checked: torch leaves them out on request, and sha256 covers the file.
    start, size = _place(window, members["data.pkl"])
    if size > _DESCRIPTION_BYTES:
        raise ValueError("its description is longer than that of any tensor")
    described = _RecordUnpickler(io.BytesIO(window.at(start, size))).load()
    if not isinstance(described, _Described):
        raise ValueError("it holds no tensor")
    if "byteorder" in members and window.at(*_place(window, members["byteorder"])) != b"little":
        raise ValueError("its bytes are not little-endian")
    stored, key, numel = described.storage
    if stored != dtype or tuple(described.size) != shape:
        raise ValueError(f"it holds {stored} {list(described.size)}, and .metadata says {dtype} {list(shape)}")
    start, size = _place(window, members[f"data/{key}"])
    start += offset
    if size != numel * dtype.itemsize:
        raise ValueError("its data has another size than its description says")
    last = described.offset + sum((n - 1) * s for n, s in zip(described.size, described.stride, strict=True))
    if num_elements(shape) and not 0 <= described.offset <= last < numel:
        raise ValueError("it reaches beyond its data")
    if min(described.stride, default=0) < 0:
        raise ValueError("it has a negative stride")
    is_contiguous = follows(described.size, described.stride)
    first = start + described.offset * dtype.itemsize
    return TensorRecord(start, described.offset, numel, tuple(described.stride), is_contiguous, first)


def is_as_written(files: FileReader, path: Path, offset: int, length: int) -> bool:
    """Compare the data of the record at byte `offset` of a file with the checksums in it.

    Raises:
        Exception: It is damaged (of whatever kind `zipfile` raises).
    """
    window = _Window(files, path, offset, length)
    with zipfile.ZipFile(window) as archive:
        members = [item for item in archive.infolist() if item.filename.partition("/")[2].startswith("data/")]
    for item in members:
        start, left = _place(window, item)
        total = 0
        while left:
            block = files.read_bytes(path, offset + start, min(left, _BLOCK_BYTES))
            total = zlib.crc32(block, total)
            start, left = start + len(block), left - len(block)
        if total != item.CRC:
            return False
    return True


def _place(window: "_Window", member: zipfile.ZipInfo) -> tuple[int, int]:
    """Byte of the record at which the data of a member begins, and its size."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    # A local file header has 30 bytes, then the name and an extra field of its own length.
    lengths = window.at(member.header_offset + 26, 4)
    name_length, extra_length = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    return member.header_offset + 30 + name_length + extra_length, member.file_size


class _Window(io.RawIOBase):
    """The bytes of one record as a file of their own; its beginning and end are read once."""

    def __init__(self, files: FileReader, path: Path, offset: int, length: int) -> None:
        self._files, self._path, self._offset, self._length = files, path, offset, length
        self._position = 0
        self._tail_start = max(0, length - _EDGE_BYTES)
        self._head = files.read_bytes(path, offset, min(length, _EDGE_BYTES))
        self._tail = files.read_bytes(path, offset + self._tail_start, length - self._tail_start)

    def at(self, start: int, count: int) -> bytes:
        """Return bytes by their place in the record, fewer where it ends."""
        stop = min(start + count, self._length)
        if stop <= len(self._head):
            return self._head[start:stop]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        return self._files.read_bytes(self._path, self._offset + start, max(0, stop - start))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self.at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _RecordUnpickler(pickle.Unpickler):
    """Reads the description of one tensor; nothing but its few names can be looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _describe
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("it refers to something that is no storage")
        return dtype, str(key), int(numel)


def _describe(storage: Any, offset: int, size: Shape, stride: Shape, *_: Any) -> _Described:
    return _Described(storage, int(offset), tuple(size), tuple(stride))


def write_record(file: Any, tensor: Tensor) -> None:
    """Append the record of a contiguous tensor with a storage of its own."""
    torch.save(tensor, file)
