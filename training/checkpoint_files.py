"""The files of a checkpoint: written in the format of `torch.distributed.checkpoint`, with their digests, and read.

Everything is written once and never read back: digests are taken of what passes through. Nothing is
copied on the way, so a save needs no memory of its own.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from training.file_digests import FAST, SHA256
from training.safe_pickle import read_dcp_metadata

_PIECE = 2**20  # bytes digested and written at a time, so that they are read from memory once
_BUFFER = 2**18


class SafeReader(FileSystemReader):
    """Reads a checkpoint folder without unpickling anything but descriptions of tensors."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return read_dcp_metadata(Path(self.path))


class Writer(FileSystemWriter):
    """Writes a checkpoint folder, with all bytes on the disk when it returns.

    Leaves out the folder's path and a random id, so that one state gives the same bytes wherever it is saved.

    Args:
        path: The folder.
        digest: xxh3_128 or sha256; see `file_digests`.
    """

    def __init__(self, path: Path, digest: str = FAST) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True)
        self._files = _DigestedFiles(digest)
        self.fs = self._files

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        with without_crc32():
            return super().write_data(plan, planner)

    @property
    def digests(self) -> dict[str, dict[str, Any]]:
        """File name to {"bytes", digest}, of what this process has written."""
        return dict(sorted(self._files.digests.items()))


class Planner(DefaultSavePlanner):
    """Hands out the data of a save without copying it.

    Args:
        parts: Stored name to this rank's part, where it is not to be taken from the tensors themselves.
    """

    def __init__(self, parts: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.parts = parts

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item) if self.parts is None else self.parts[write_item.index.fqn]
        return with_own_storage(data.detach()) if isinstance(data, Tensor) else data


def with_own_storage(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as one whose storage holds nothing else; the memory stays the same.

    `torch.save` writes whole storages, so a part of a larger tensor would be copied first.
    """
    storage, size_bytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.size() == size_bytes or not tensor.is_contiguous():
        return tensor
    start = tensor.storage_offset() * tensor.element_size()
    own = cast("torch.UntypedStorage", storage[start : start + size_bytes])
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(own, 0, tensor.shape, tensor.stride())


@contextlib.contextmanager
def without_crc32() -> Iterator[None]:
    """Let `torch.save` leave out CRC-32 sums, in this thread: they cost more than the copy, and sha256 is kept."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _DigestedFiles(FileSystem):
    """Files of a folder, of which the digests are known once they are written."""

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self.digests: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with Path(path).open("wb", buffering=_BUFFER) as file:
            digested = _DigestedFile(file, self._digest)
            yield digested
        self.digests[Path(path).name] = digested.facts()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _DigestedFile:
    """A file open for writing that takes the digest of what passes through."""

    def __init__(self, file: BinaryIO, digest: str) -> None:
        self._file, self._name, self._size = file, digest, 0
        self._digest: Any = hashlib.sha256() if digest == SHA256 else xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._digest.update(piece)
            self._file.write(piece)
        self._size += len(view)
        return len(view)

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._size, self._name: self._digest.hexdigest()}

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
