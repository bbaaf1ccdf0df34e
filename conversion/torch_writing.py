"""Writes archives that `torch.load` reads, without ever holding a tensor: data are streamed in, description first.

The objects may hold `Planned` tensors, whose data are given piece by piece when the archive is written.
"""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conversion.catalogue import Shape, num_elements

_ROOT = "archive"
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
}

Pieces = Callable[[], Iterator[memoryview]]


@dataclass(frozen=True)
class Planned:
    """A tensor whose data come when the archive is written.

    Args:
        pieces: Yields its bytes in order, as many as its shape and type say.
    """

    shape: Shape
    dtype: torch.dtype
    pieces: Pieces

    @property
    def size_bytes(self) -> int:
        return num_elements(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Storage:
    key: str
    planned: Planned


def write_archive(path: Path, content: Any) -> None:
    """Write `content` as `torch.save` would; the file is on the disk when this returns.

    Raises:
        ValueError: A tensor gave more or fewer bytes than it has.
    """
    description = io.BytesIO()
    pickler = _Pickler(description)
    pickler.dump(content)
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.writestr(_member("data.pkl"), description.getvalue())
            archive.writestr(_member("byteorder"), b"little")
            for storage in pickler.storages:
                _write_storage(archive, storage)
            archive.writestr(_member("version"), b"3\n")
        file.flush()
        os.fsync(file.fileno())


def _write_storage(archive: zipfile.ZipFile, storage: _Storage) -> None:
    size = 0
    with archive.open(_member(f"data/{storage.key}"), "w", force_zip64=True) as member:
        for piece in storage.planned.pieces():
            member.write(piece)
            size += len(piece)
    if size != storage.planned.size_bytes:
        raise ValueError(f"a tensor of {storage.planned.size_bytes} bytes gave {size}")


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{_ROOT}/{name}")  # with a fixed date, so that the same content gives the same bytes


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[_Storage] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Planned):
            return NotImplemented
        storage = _Storage(str(len(self.storages)), value)
        self.storages.append(storage)
        stride: list[int] = []
        step = 1
        for size in reversed(value.shape):
            stride.insert(0, step)
            step *= max(1, size)
        arguments: tuple[Any, ...] = (storage, 0, tuple(value.shape), tuple(stride), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        planned = value.planned
        return "storage", _STORAGES[planned.dtype], value.key, "cpu", num_elements(planned.shape)
