"""Reads boxes of tensors straight out of files, without mapping or holding more than a block."""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from contracts.errors import InputError
from conversion.catalogue import Box, Shape, box_shape, memory_of, num_elements

# So many unwanted bytes of a row cost as much to read as another call costs.
_WASTED_ROW_BYTES = 16 * 2**10
_OPEN_FILES = 64
_SCRATCH_BYTES = 2**20


class FileReader:
    """Reads byte ranges of many files; keeps the last few open, for each thread its own."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._all: list[OrderedDict[str, int]] = []

    def read_bytes(self, path: Path, start: int, count: int) -> bytes:
        """Return `count` bytes at `start`.

        Raises:
            InputError: The file ends before, or cannot be read.
        """
        buffer = bytearray(count)
        self._read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def read_box(self, path: Path, start: int, shape: Shape, box: Box, out: Tensor) -> None:
        """Read a box of a contiguous tensor of `shape` whose data begins at byte `start`.

        Args:
            out: Receives it; of the box's shape and of the tensor's type, may be part of a larger tensor.
        """
        if out.numel() == 0:
            return
        if not shape:
            shape, box, out = (1,), ((0, 1),), out.reshape(1)
        item = out.dtype.itemsize
        row_bytes = num_elements(shape[1:]) * item
        (first, last), *inner = box
        is_whole_rows = tuple(inner) == tuple((0, size) for size in shape[1:])
        is_wasteful = row_bytes - num_elements(box_shape(tuple(inner))) * item >= _WASTED_ROW_BYTES
        if is_whole_rows and out.is_contiguous():
            self._read_into(path, start + first * row_bytes, memory_of(out))
        elif len(shape) == 2 and out.stride(1) == 1 and is_wasteful:
            for row in range(first, last):
                self._read_into(path, start + row * row_bytes + inner[0][0] * item, memory_of(out[row - first]))
        else:
            self._read_by_blocks(path, start, shape, box, out)

    def _read_by_blocks(self, path: Path, start: int, shape: Shape, box: Box, out: Tensor) -> None:
        (first, last), *inner = box
        row_bytes = num_elements(shape[1:]) * out.dtype.itemsize
        rows = min(last - first, max(1, _SCRATCH_BYTES // max(1, row_bytes)))
        scratch = torch.empty((rows, *shape[1:]), dtype=out.dtype)
        wanted = tuple(slice(low, high) for low, high in inner)
        for row in range(first, last, rows):
            count = min(rows, last - row)
            self._read_into(path, start + row * row_bytes, memory_of(scratch[:count]))
            out[row - first : row - first + count] = scratch[(slice(0, count), *wanted)]

    def _read_into(self, path: Path, start: int, view: memoryview) -> None:
        descriptor = self._descriptor(str(path))
        done = 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done : done + 2**30]], start + done)
            except OSError as error:
                raise InputError(f"{path}: cannot be read at byte {start + done} ({error.strerror}).") from error
            if count == 0:
                raise InputError(f"{path}: ends at byte {start + done}, and {len(view) - done} more are needed.")
            done += count

    def _descriptor(self, path: str) -> int:
        known: OrderedDict[str, int] | None = getattr(self._own, "open", None)
        if known is None:
            known = self._own.open = OrderedDict()
            self._all.append(known)
        if path in known:
            known.move_to_end(path)
            return known[path]
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"{path}: cannot be opened ({error.strerror}).") from error
        known[path] = descriptor
        if len(known) > _OPEN_FILES:
            _, oldest = known.popitem(last=False)
            os.close(oldest)
        return descriptor

    def close(self) -> None:
        for known in self._all:
            while known:
                os.close(known.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def empty_box(box: Box, dtype: torch.dtype) -> Tensor:
    return torch.empty(box_shape(box), dtype=dtype)
