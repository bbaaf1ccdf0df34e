"""Tensors that lie in pieces in files: what of each piece belongs where in the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from contracts.errors import InputError
from conversion.catalogue import Box, Shape, TensorEntry, common_box, num_elements, shifted
from conversion.file_reading import FileReader, empty_box
from conversion.torch_files import StoredTensor


@dataclass(frozen=True)
class Part:
    """A stored tensor and its place in a whole one.

    Args:
        first: Its first index in every dimension of the whole.
        stored: Where its data lie.
    """

    first: Shape
    stored: StoredTensor

    @property
    def box(self) -> Box:
        return tuple((a, a + size) for a, size in zip(self.first, self.stored.shape, strict=True))


class AssembledCatalogue:
    """Whole tensors, read out of their parts.

    Args:
        folder: For messages.
        parts: Name to parts, in the order in which tensors shall have.
        shapes: Of the whole tensors.

    Raises:
        InputError: The parts of a tensor do not make it up, or are of several types, or a file is too short.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Sequence[Part]], shapes: Mapping[str, Shape]) -> None:
        self._files = FileReader()
        self._parts = parts
        self._entries = {name: _entry(folder, name, shapes[name], found) for name, found in parts.items()}
        ends: dict[Path, int] = {}
        for found in parts.values():
            for part in found:
                stored = part.stored
                end = stored.start + num_elements(stored.shape) * stored.dtype.itemsize
                ends[stored.path] = max(ends.get(stored.path, 0), end)
        for path, end in ends.items():
            if path.stat().st_size < end:
                raise InputError(f"{path} is cut off: it has {path.stat().st_size} bytes, and {end} are needed.")

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, box: Box) -> Tensor:
        out = empty_box(box, self._entries[name].dtype)
        for part in self._parts[name]:
            common = common_box(box, part.box)
            if common is None:
                continue
            place = out[tuple(slice(a, b) for a, b in shifted(common, tuple(a for a, _ in box)))]
            stored = part.stored
            self._files.read_box(stored.path, stored.start, stored.shape, shifted(common, part.first), place)
        return out

    def close(self) -> None:
        self._files.close()


def read_stored(files: FileReader, stored: StoredTensor) -> Tensor:
    """Read all of a stored tensor."""
    out = torch.empty(stored.shape, dtype=stored.dtype)
    files.read_box(stored.path, stored.start, stored.shape, tuple((0, n) for n in stored.shape), out)
    return out


def _entry(folder: Path, name: str, shape: Shape, parts: Sequence[Part]) -> TensorEntry:
    dtypes = {part.stored.dtype for part in parts}
    if len(dtypes) > 1:
        raise InputError(f"{folder}: the parts of tensor {name} have several types ({', '.join(map(str, dtypes))}).")
    is_inside = all(
        len(part.first) == len(shape)
        and all(a >= 0 and b <= size for (a, b), size in zip(part.box, shape, strict=True))
        for part in parts
    )
    total = sum(num_elements(part.stored.shape) for part in parts)
    if not is_inside or total != num_elements(shape):
        found = ", ".join(f"{list(part.stored.shape)} at {list(part.first)}" for part in list(parts)[:4])
        raise InputError(
            f"{folder}: the parts of tensor {name} ({found}{', ...' if len(parts) > 4 else ''}) do not make up its "
            f"shape {list(shape)}."
        )
    if not all(part.stored.is_contiguous for part in parts):
        raise InputError(f"{folder}: a part of tensor {name} is not stored row by row, which is not supported.")
    return TensorEntry(name, shape, dtypes.pop())
