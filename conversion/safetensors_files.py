"""The safetensors format: headers read with suspicion, files written piece by piece.

A file is 8 bytes with the length of the header, a JSON header (name to dtype, shape and byte
range), and the bytes: https://github.com/huggingface/safetensors#format.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contracts.errors import InputError
from conversion.catalogue import Box, TensorEntry, memory_of, num_elements
from conversion.file_reading import FileReader, empty_box

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The library's own limit.
_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, and the first byte of its data."""

    entry: TensorEntry
    path: Path
    start: int


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read and check the header of one file.

    Returns:
        Name to place, and the free texts of `__metadata__`.

    Raises:
        InputError: The file is cut off, or its header does not describe its bytes exactly.
    """
    with FileReader() as files:
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}).") from error
        length = int.from_bytes(files.read_bytes(path, 0, 8), "little")
        if length > min(_HEADER_BYTES, size_bytes - 8):
            raise InputError(
                f"{path}: its header says that it has {length} bytes, and the file has {size_bytes}; it is no "
                "safetensors file, or is cut off. Fetch it again."
            )
        text = files.read_bytes(path, 8, length)
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
        metadata = header.pop("__metadata__", {})
        stored = {name: _stored(name, facts, path, 8 + length) for name, facts in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: its safetensors header is damaged ({error}).") from error
    _check_ranges(path, stored, 8 + length, size_bytes)
    texts = metadata if isinstance(metadata, dict) else {}
    return stored, {str(key): str(value) for key, value in texts.items()}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a name stands in it twice")
    return result


def _stored(name: str, facts: Mapping[str, Any], path: Path, data_start: int) -> StoredTensor:
    if facts["dtype"] not in _DTYPES:
        raise ValueError(f"tensor {name} has the unknown type {facts['dtype']!r}")
    shape = tuple(facts["shape"])
    start, stop = facts["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"tensor {name} has a shape or place that is no whole number")
    entry = TensorEntry(name, shape, _DTYPES[facts["dtype"]])
    if stop - start != entry.size_bytes:
        raise ValueError(f"tensor {name} of shape {list(shape)} needs {entry.size_bytes} bytes and has {stop - start}")
    return StoredTensor(entry, path, data_start + start)


def _check_ranges(path: Path, stored: Mapping[str, StoredTensor], data_start: int, size_bytes: int) -> None:
    """Check that the tensors cover the file without gap or overlap."""
    end = data_start
    for item in sorted(stored.values(), key=lambda item: (item.start, item.entry.size_bytes)):
        if item.start != end:
            raise InputError(f"{path}: tensor {item.entry.name} does not begin where the one before it ends.")
        end += item.entry.size_bytes
    if end != size_bytes:
        kind = "is cut off" if end > size_bytes else "has bytes that belong to no tensor"
        raise InputError(f"{path}: {kind}: its header describes {end} bytes, and it has {size_bytes}. Fetch it again.")


class SafetensorsCatalogue:
    """The tensors of one or more safetensors files."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._entries = {name: item.entry for name, item in stored.items()}
        self._files = FileReader()

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, box: Box) -> Tensor:
        item = self._stored[name]
        out = empty_box(box, item.entry.dtype)
        self._files.read_box(item.path, item.start, item.entry.shape, box, out)
        return out

    def close(self) -> None:
        self._files.close()


def header_bytes(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Make the beginning of a file that holds `entries` in this order, padded so that data is aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name, entry in entries.items():
        end = place + entry.size_bytes
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path,
    entries: Mapping[str, TensorEntry],
    metadata: Mapping[str, str],
    pieces: Callable[[TensorEntry], Iterator[Tensor]],
) -> str:
    """Write one file under a temporary name, wait for the disk, and give it its name.

    Args:
        pieces: Yields an entry's data in order, in contiguous pieces.

    Returns:
        sha256 of the file.
    """
    digest = hashlib.sha256()
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header_bytes(entries, metadata)), digest)
        for entry in entries.values():
            done = 0
            for piece in pieces(entry):
                if piece.numel():
                    _write_all(file.fileno(), memory_of(piece), digest)
                done += piece.numel()
            if done != num_elements(entry.shape):
                raise RuntimeError(f"{entry.name}: {done} elements were given for the shape {entry.shape}")
        os.fsync(file.fileno())
    unfinished.replace(path)
    return digest.hexdigest()


def _write_all(descriptor: int, view: memoryview, digest: Any) -> None:
    digest.update(view)
    while view:
        view = view[os.write(descriptor, view[: 2**30]) :]


def split_into_files(entries: Mapping[str, TensorEntry], shard_bytes: int) -> list[dict[str, TensorEntry]]:
    """Deal tensors to files in order, each file of at most `shard_bytes` unless one tensor is larger."""
    files: list[dict[str, TensorEntry]] = []
    size = 0
    for name, entry in entries.items():
        if not files or size + entry.size_bytes > shard_bytes:
            files.append({})
            size = 0
        files[-1][name] = entry
        size += entry.size_bytes
    return files
