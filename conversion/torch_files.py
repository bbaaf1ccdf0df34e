"""Reads the archives of `torch.save` without running anything that they hold, and without reading tensors.

A pickle may name any function. Here a name is one of: the few that describe tensors, which become places in the
file; a plain container; or a class of a framework (Megatron's enums, `argparse.Namespace`), which becomes an inert
`Foreign` that holds what was given to it. Anything else is refused by name.
"""

import io
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from contracts.errors import InputError
from conversion.catalogue import Shape, num_elements
from training.safe_pickle import refuse_bombs

_PICKLE_BYTES = 2**26
_BLOCK_BYTES = 8 * 2**20
# Classes of these packages are kept as inert values; none of them is imported.
_FRAMEWORKS = ("megatron", "transformer_engine", "apex", "deepspeed", "numpy", "argparse", "types", "signal", "pathlib")
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor inside a file: its data follow each other from byte `start` on.

    Args:
        is_contiguous: They do; others are refused where they are read.
    """

    path: Path
    start: int
    dtype: torch.dtype
    shape: Shape
    is_contiguous: bool = True

    def part(self, first: int, shape: Shape) -> "StoredTensor":
        """Return so many of its elements, from number `first` on, as a tensor of `shape`.

        Raises:
            InputError: It has not so many.
        """
        if first < 0 or first + num_elements(shape) > num_elements(self.shape):
            raise InputError(
                f"{self.path}: a buffer of {num_elements(self.shape)} elements ends before element "
                f"{first + num_elements(shape)}, which a tensor of shape {list(shape)} needs."
            )
        return StoredTensor(self.path, self.start + first * self.dtype.itemsize, self.dtype, shape)


class Foreign:
    """An object of a framework that is not imported: its type by name, and what was given to it."""

    module = name = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What it holds by name; empty for an object without names, such as an enum's member."""
        state = self.__dict__.get("state", {})
        return state if isinstance(state, Mapping) else {}


def read_torch_file(path: Path) -> Any:
    """Read the objects of an archive of `torch.save`; tensors stand in them as `StoredTensor`.

    Raises:
        InputError: It is missing, cut off, damaged or of the format before torch 1.6, or names something that no
            checkpoint needs; nothing of it was run.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = {item.filename.partition("/")[2]: item for item in archive.infolist()}
            places = {
                name.removeprefix("data/"): (_data_start(file, item), item.file_size)
                for name, item in members.items()
                if name.startswith("data/")
            }
            if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
                raise InputError(f"{path}: its bytes are not little-endian, which is not supported.")
            described = members["data.pkl"]
            if described.file_size > _PICKLE_BYTES or described.compress_type != zipfile.ZIP_STORED:
                raise InputError(
                    f"{path}: its description has {described.file_size} bytes or is compressed; no checkpoint needs "
                    "that."
                )
            data = archive.read(described)
        refuse_bombs(data)
        return _Unpickler(data, path, places).load()
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path} is missing.") from None
    except zipfile.BadZipFile as error:
        raise InputError(f"{path}: {_what_it_is(path, error)}") from error
    except pickle.UnpicklingError as error:
        raise InputError(f"{path}: refused: {error}. Nothing of it was run.") from error
    except Exception as error:  # a damaged archive or pickle can raise anything
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error}).") from error


def check_sums(path: Path) -> None:
    """Compare every member of an archive with its checksum.

    Raises:
        InputError: One differs; names it.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            for item in archive.infolist():
                if item.file_size and _sum(file, item) != item.CRC:
                    raise InputError(
                        f"{path}: {item.filename.partition('/')[2]} is not what was written: its checksum differs. "
                        "Restore the file."
                    )
    except zipfile.BadZipFile as error:
        raise InputError(f"{path}: {_what_it_is(path, error)}") from error


def tensors_in(value: Any, prefix: str = "") -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of nested dictionaries, named by their keys joined with dots."""
    if isinstance(value, StoredTensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{prefix}.{key}" if prefix else str(key))


def _sum(file: Any, item: zipfile.ZipInfo) -> int:
    file.seek(_data_start(file, item))
    left, total = item.file_size, 0
    while left:
        block = file.read(min(left, _BLOCK_BYTES))
        if not block:
            return -1
        total = zlib.crc32(block, total)
        left -= len(block)
    return total


def _data_start(file: Any, item: zipfile.ZipInfo) -> int:
    """Byte at which the data of a member begins; its own header says how long it is."""
    if item.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{item.filename} is compressed")
    file.seek(item.header_offset + 26)
    lengths = file.read(4)
    return item.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _what_it_is(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        head = file.read(2)
    if head == b"PK":
        return f"the file is cut off or damaged ({error})."
    if head[:1] == b"\x80":
        return (
            "a file of torch before 1.6 (no archive). Nothing of it was run; save it again with a newer torch: "
            "torch.save(torch.load(OLD, weights_only=True), NEW)."
        )
    return f"no file of torch.save ({error})."


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path, places: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(io.BytesIO(data))
        self._path, self._places = path, places
        self._classes: dict[tuple[str, str], type[Foreign]] = {}

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("collections", "OrderedDict"): OrderedDict,
            ("_codecs", "encode"): _encoded,
            ("builtins", "set"): set,
            ("builtins", "frozenset"): frozenset,
            ("builtins", "bytearray"): _bytes_of,
            ("torch", "Size"): tuple,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        package = module.partition(".")[0]
        if package in _FRAMEWORKS:
            return self._classes.setdefault((module, name), type(name, (Foreign,), {"module": module, "name": name}))
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int, int]:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or str(key) not in self._places:
            raise pickle.UnpicklingError("it refers to data that are not in the file")
        start, size = self._places[str(key)]
        if size != int(numel) * dtype.itemsize:
            raise InputError(
                f"{self._path}: data/{key} has {size} bytes, and its description says {numel} elements of {dtype}."
            )
        return dtype, start, int(numel)

    def _tensor(self, storage: tuple[torch.dtype, int, int], offset: int, size: Any, stride: Any, *_: Any) -> Any:
        dtype, start, numel = storage
        shape, steps = tuple(int(n) for n in size), tuple(int(n) for n in stride)
        last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if num_elements(shape) and (offset < 0 or last >= numel or min(steps, default=0) < 0):
            raise InputError(f"{self._path}: a tensor of shape {list(shape)} reaches beyond its data.")
        return StoredTensor(self._path, start + offset * dtype.itemsize, dtype, shape, follows(shape, steps))


def follows(shape: Shape, stride: Shape) -> bool:
    """Say whether elements of these strides follow each other, row by row."""
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _bytes_of(data: Any = b"", *_: Any) -> bytes:
    if not isinstance(data, bytes):  # a number would ask for as much memory
        raise pickle.UnpicklingError("it makes a bytearray of something that is no bytes")
    return data


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1" if encoding == "latin1" else "utf-8")
