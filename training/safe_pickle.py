"""Reads the `.metadata` of a distributed checkpoint without running anything that it holds.

A pickle can call any function it names. Only the classes that describe tensors and files may be
named here, so a checkpoint from a stranger can at worst be refused.
"""

import io
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from contracts.errors import InputError

_CLASSES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        _MEM_FORMAT_ENCODING,
        _StorageInfo,
        _StoragePrefix,
        OrderedDict,
    )
}
_CLASSES[("torch", "Size")] = torch.Size
_CLASSES[("torch.serialization", "_get_layout")] = torch.serialization._get_layout
for _name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
    _CLASSES[("pathlib", _name)] = PurePosixPath  # where it was saved; never opened
    _CLASSES[("pathlib._local", _name)] = PurePosixPath
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


# Plans of the ranks, which Megatron-Core keeps for its next save: read as inert values, nothing of them is imported.
_PLANS = ("torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing", "nvidia_resiliency_ext")


class _Inert:
    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[(module, name)]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if any(module == known or module.startswith(f"{known}.") for known in _PLANS):
            return _Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint metadata needs")


_MEMO = {"PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"}


def refuse_bombs(data: bytes) -> None:
    """Refuse a pickle that asks for a table of more places than it has bytes: a few bytes could take all memory.

    Raises:
        pickle.UnpicklingError: It does.
        ValueError: It is no pickle.
    """
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in _MEMO and isinstance(argument, int) and argument > len(data):
            raise pickle.UnpicklingError(f"it remembers {argument} objects, and has {len(data)} bytes")


def read_dcp_metadata(folder: Path) -> Metadata:
    """Read the `.metadata` of a checkpoint folder written by `torch.distributed.checkpoint`.

    Raises:
        InputError: The file is missing or damaged, or names anything but descriptions of tensors.
    """
    path = folder / ".metadata"
    try:
        data = path.read_bytes()
        refuse_bombs(data)
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    except FileNotFoundError:
        raise InputError(f"{folder}: the checkpoint has no .metadata, so its save did not finish.") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"{path}: not the metadata of a distributed checkpoint ({error}).") from error
    if not isinstance(found, Metadata):
        raise InputError(f"{path}: holds a {type(found).__name__}, not checkpoint metadata.")
    return found
