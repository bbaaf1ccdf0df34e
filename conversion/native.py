"""Reads native step folders, chunk by chunk, without building a model or holding a whole tensor."""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from contracts.errors import InputError
from conversion.catalogue import Box, Checkpoint, Shape, TensorEntry, common_box, num_elements, shifted
from conversion.file_reading import FileReader, empty_box
from conversion.tensor_records import TensorRecord, is_as_written, read_record
from training.safe_pickle import read_dcp_metadata
from training.step_folders import read_info

_FEW = 8


@dataclass(frozen=True)
class Chunk:
    """A stored piece of a tensor: where it belongs and where it lies.

    Args:
        start: First index in every dimension of the whole tensor.
        shape: Of the piece.
        path: File.
        offset: Byte at which its record (a small archive of `torch.save`) begins.
        length: Of the record, in bytes.
    """

    start: Shape
    shape: Shape
    path: Path
    offset: int
    length: int

    @property
    def box(self) -> Box:
        return tuple((first, first + size) for first, size in zip(self.start, self.shape, strict=True))


def open_native(folder: Path) -> Checkpoint:
    """Open a step folder.

    Raises:
        InputError: It is damaged, or a tensor that its manifest names is missing or of another shape.
    """
    info = read_info(folder)
    tensors = NativeCatalogue(folder)
    for name, shape in info.parameters.items():
        entry = tensors.entries.get(name)
        if entry is None:
            raise InputError(f"{folder}: tensor {name} of the manifest is not in .metadata.")
        if entry.shape != tuple(shape):
            raise InputError(
                f"{folder}: tensor {name} has the shape {list(entry.shape)} in .metadata and {list(shape)} in the "
                "manifest."
            )
    return Checkpoint(folder, "native", info, tensors)


class NativeCatalogue:
    """The tensors of a folder of `torch.distributed.checkpoint`.

    Raises:
        InputError: `.metadata` is damaged, names a file outside of the folder or one that is
            missing or too short, or the chunks of a tensor do not cover it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = FileReader()
        metadata = read_dcp_metadata(folder)
        self._entries: dict[str, TensorEntry] = {}
        self.chunks: dict[str, list[Chunk]] = {}
        self.objects = [n for n, m in metadata.state_dict_metadata.items() if not isinstance(m, TensorStorageMetadata)]
        places = _places(folder, metadata.storage_data)
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                continue
            entry = TensorEntry(name, tuple(stored.size), stored.properties.dtype)
            self._entries[name] = entry
            self.chunks[name] = [_chunk(folder, name, chunk, places) for chunk in stored.chunks]
            _check_cover(folder, entry, self.chunks[name])
        self._records: dict[tuple[Path, int], TensorRecord] = {}
        self._ordered: dict[str, tuple[list[Chunk], int]] = {}

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, box: Box) -> Tensor:
        entry = self._entries[name]
        out = empty_box(box, entry.dtype)
        for chunk in self._near(name, box):
            common = common_box(box, chunk.box)
            if common is None:
                continue
            inside = shifted(common, chunk.start)
            part = out[tuple(slice(a, b) for a, b in shifted(common, tuple(a for a, _ in box)))]
            self._read_chunk(entry, chunk, inside, part)
        return out

    def _near(self, name: str, box: Box) -> list[Chunk]:
        """Chunks that may have a part of a box: of a stack of layers there may be thousands, few of them in it."""
        chunks = self.chunks[name]
        if not box or len(chunks) <= _FEW:
            return chunks
        if name not in self._ordered:
            ordered = sorted(chunks, key=lambda chunk: chunk.start[0])
            self._ordered[name] = ordered, max(chunk.shape[0] for chunk in chunks)
        ordered, tallest = self._ordered[name]
        first = bisect.bisect_right(ordered, box[0][0] - tallest, key=lambda chunk: chunk.start[0])
        last = bisect.bisect_left(ordered, box[0][1], key=lambda chunk: chunk.start[0])
        return ordered[first:last]

    def _read_chunk(self, entry: TensorEntry, chunk: Chunk, inside: Box, out: Tensor) -> None:
        record = self._record(entry, chunk)
        if record.is_contiguous:
            self._files.read_box(chunk.path, record.start, chunk.shape, inside, out)
            return
        storage = torch.empty(record.storage_numel, dtype=entry.dtype)
        shape = (record.storage_numel,)
        self._files.read_box(chunk.path, record.storage_start, shape, ((0, record.storage_numel),), storage)
        whole = torch.as_strided(storage, chunk.shape, record.stride, record.storage_offset)
        out.copy_(whole[tuple(slice(a, b) for a, b in inside)])

    def _record(self, entry: TensorEntry, chunk: Chunk) -> TensorRecord:
        key = (chunk.path, chunk.offset)
        if key not in self._records:
            try:
                self._records[key] = read_record(
                    self._files, chunk.path, chunk.offset, chunk.length, dtype=entry.dtype, shape=chunk.shape
                )
            except InputError:
                raise
            except Exception as error:  # a damaged archive or pickle can raise anything
                raise InputError(
                    f"{chunk.path}: the record of tensor {entry.name} at byte {chunk.offset} is damaged ({error})."
                ) from error
        return self._records[key]

    def close(self) -> None:
        self._files.close()


def check_record_sums(folder: Path) -> None:
    """Compare the tensors of a folder with the checksums that torch wrote beside them.

    A writer may leave sums out (torch.serialization.set_crc32_options); where none fits, there are none.

    Raises:
        InputError: One differs; names it.
    """
    catalogue = NativeCatalogue(folder)
    differing, fitting = [], 0
    with FileReader() as files:
        for name, chunks in catalogue.chunks.items():
            for chunk in chunks:
                try:
                    is_same = is_as_written(files, chunk.path, chunk.offset, chunk.length)
                except InputError:
                    raise
                except Exception as error:  # a damaged archive can raise anything
                    raise InputError(f"{chunk.path}: the record of tensor {name} is damaged ({error}).") from error
                fitting += is_same
                if not is_same:
                    differing.append((chunk.path, name, chunk.start))
    catalogue.close()
    if differing and fitting:
        path, name, start = differing[0]
        raise InputError(
            f"{path}: the part of tensor {name} at {list(start)} is not what was written: its checksum differs. "
            "Restore the file."
        )


def _places(folder: Path, storage_data: Any) -> dict[tuple[str, Shape], Any]:
    return {(index.fqn, tuple(index.offset or ())): info for index, info in (storage_data or {}).items()}


def _chunk(folder: Path, name: str, chunk: Any, places: Mapping[tuple[str, Shape], Any]) -> Chunk:
    start, shape = tuple(chunk.offsets), tuple(chunk.sizes)
    info = places.get((name, start))
    if info is None:
        raise InputError(f"{folder}: .metadata does not say where the part of {name} at {list(start)} lies.")
    file = str(info.relative_path)
    if PurePosixPath(file).name != file or file in ("", ".", ".."):
        raise InputError(f"{folder}: .metadata places {name} in {file!r}, which is no plain file name.")
    if getattr(info, "transform_descriptors", None):
        raise InputError(f"{folder}: {name} is stored with {info.transform_descriptors}, which is not supported.")
    return Chunk(start, shape, folder / file, int(info.offset), int(info.length))


def _check_cover(folder: Path, entry: TensorEntry, chunks: list[Chunk]) -> None:
    """Check that the chunks fill the tensor exactly: inside of it, disjoint, and as many elements."""
    total = sum(num_elements(chunk.shape) for chunk in chunks)
    inside = all(
        len(c.start) == len(entry.shape)
        and all(a >= 0 and b <= n for (a, b), n in zip(c.box, entry.shape, strict=True))
        for c in chunks
    )
    if total != num_elements(entry.shape) or not inside or _overlap(chunks):
        raise InputError(
            f"{folder}: the {len(chunks)} parts of tensor {entry.name} do not make up its shape {list(entry.shape)}."
        )
    for path in {chunk.path for chunk in chunks}:
        needed = max(chunk.offset + chunk.length for chunk in chunks if chunk.path == path)
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < needed:
            state = "is missing" if size is None else f"is cut off: it has {size} bytes, and {needed} are needed"
            raise InputError(f"{path} {state} (tensor {entry.name}). Restore the checkpoint.")


def _overlap(chunks: list[Chunk]) -> bool:
    ordered = sorted((c for c in chunks if num_elements(c.shape)), key=lambda c: c.start)
    for n, one in enumerate(ordered):
        for other in ordered[n + 1 :]:
            if one.box and other.start[0] >= one.box[0][1]:
                break
            if common_box(one.box, other.box) is not None:
                return True
    return False
