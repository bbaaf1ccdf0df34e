"""Writes native step folders cut for a layout: one file for each rank, as training would save them."""

import hashlib
import json
import os
import pickle
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from contracts.files import write_atomically
from contracts.json_text import parse_json
from contracts.progress import Progress
from conversion.casting import Caster
from conversion.catalogue import Checkpoint, box_shape, num_elements
from conversion.rank_shards import Shard, shards_by_rank
from conversion.tensor_records import write_record
from conversion.threads import in_threads
from training.checkpoint_files import without_crc32
from training.config import LayoutConfig, ModelConfig
from training.saving import publish
from training.step_folders import CheckpointInfo, step_folder_name

# Version of the metadata that torch writes; readers compare it.
_DCP_VERSION = "1.0.0"


@dataclass(frozen=True)
class _Written:
    """A finished file: its digest, and (offset, length) of each record in the order of the shards."""

    size_bytes: int
    sha256: str
    records: tuple[tuple[int, int], ...]


class NativeTarget:
    """What a reshape will write: decided from descriptions alone, before any byte is read.

    Args:
        source: An open checkpoint.
        caster: Says the types of the written weights.
        model: The source's, with an embedding that the layout divides.
        layout: Of the target.
        has_optimizer: Moments are written too.
    """

    def __init__(
        self, source: Checkpoint, caster: Caster, model: ModelConfig, layout: LayoutConfig, *, has_optimizer: bool
    ) -> None:
        self.source, self.caster = source, caster
        self.model, self.layout, self.has_optimizer = model, layout, has_optimizer
        self.shards = shards_by_rank(model, layout, has_optimizer=has_optimizer, extra=source.info.extra)

    def dtype(self, name: str) -> torch.dtype:
        return self.caster.dtype_of(name, self.source.tensors.entries[name].dtype)

    def shard_bytes(self, shard: Shard) -> int:
        return num_elements(box_shape(shard.box)) * self.dtype(shard.name).itemsize

    @property
    def size_bytes(self) -> int:
        return sum(self.shard_bytes(shard) for shards in self.shards for shard in shards)

    @property
    def peak_bytes(self) -> int:
        """The most memory that tensors take while they are written."""
        return 2 * max(self.shard_bytes(shard) for shards in self.shards for shard in shards)

    def write(
        self, root: Path, *, extra: Mapping[str, Any], progress: Progress, workers: int = 1, is_resumed: bool = False
    ) -> Path:
        """Write the step folder under `root`; it gets its name when everything is on the disk.

        Files that an unfinished build left whole are kept.

        Returns:
            The step folder.
        """
        folder = root / step_folder_name(self.source.info.step)
        unfinished = folder.with_suffix(".tmp")
        if not is_resumed:
            shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True, exist_ok=True)
        written: dict[int, _Written] = {}
        paths = [unfinished / _file_name(rank) for rank in range(len(self.shards))]
        for rank, item in enumerate(in_threads(self._write_rank, paths, self.shards, workers=workers)):
            written[rank] = item
            progress.update(rank + 1, total=len(paths), unit="files")
        for rank in written:
            _note_of(unfinished / _file_name(rank)).unlink(missing_ok=True)
        files = {_file_name(rank): {"bytes": w.size_bytes, "sha256": w.sha256} for rank, w in written.items()}
        files[".metadata"] = self._write_metadata(unfinished, written)
        publish(unfinished, folder, replace(self.info(extra), files=files))
        return folder

    def info(self, extra: Mapping[str, Any]) -> CheckpointInfo:
        """Make the manifest of the target; only layout, types and optimizer can differ from the source's."""
        info = self.source.info
        dtypes = sorted({str(self.dtype(name)).removeprefix("torch.") for name in info.parameters})
        return replace(
            info,
            model=self.model.model_dump(mode="json"),
            layout=self.layout.model_dump(mode="json"),
            has_optimizer=self.has_optimizer,
            dtype="+".join(dtypes),
            files={},
            extra={**info.extra, **extra},
        )

    def _write_rank(self, path: Path, shards: list[Shard]) -> _Written:
        if (finished := _finished(path)) is not None:
            return finished
        tensors = self.source.tensors
        records = []
        with path.open("wb", buffering=0) as raw, without_crc32():
            file = _DigestingFile(raw)
            for shard in shards:
                start = file.size
                write_record(file, self.caster(shard.name, tensors.read(shard.name, shard.box)))
                records.append((start, file.size - start))
            os.fsync(raw.fileno())
        written = _Written(file.size, file.digest.hexdigest(), tuple(records))
        note = {"bytes": written.size_bytes, "sha256": written.sha256, "records": records}
        write_atomically(_note_of(path), json.dumps(note))
        return written

    def _write_metadata(self, folder: Path, written: Mapping[int, _Written]) -> dict[str, Any]:
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        shapes: dict[str, torch.Size] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for rank, shards in enumerate(self.shards):
            for shard, (offset, length) in zip(shards, written[rank].records, strict=True):
                start = torch.Size([first for first, _ in shard.box])
                known = chunks.setdefault(shard.name, [])
                places[MetadataIndex(shard.name, start, len(known))] = _StorageInfo(_file_name(rank), offset, length)
                known.append(ChunkStorageMetadata(start, torch.Size(box_shape(shard.box))))
                shapes[shard.name] = torch.Size(shard.shape)
        metadata = Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(TensorProperties(dtype=self.dtype(name)), shapes[name], chunks[name])
                for name in chunks
            },
            planner_data={name: (name,) for name in chunks},
            storage_data=places,
            storage_meta=StorageMeta(checkpoint_id=folder.stem, save_id=_save_id(written)),
            version=_DCP_VERSION,
        )
        data = pickle.dumps(metadata)
        with (folder / ".metadata").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


class _DigestingFile:
    """What `torch.save` writes to: counts and digests on the way to the disk."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.size += len(view)
        count = len(view)
        while view:
            view = view[self._raw.write(view) :]
        return count

    def flush(self) -> None:
        self._raw.flush()


def _save_id(written: Mapping[int, _Written]) -> str:
    """An id that is the same for the same bytes, so that a rebuild gives the same files."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "".join(item.sha256 for item in written.values())))


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _note_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _finished(path: Path) -> _Written | None:
    """Read the note that stands beside a file that was written to its end before a build was killed."""
    try:
        note = parse_json(_note_of(path).read_text(encoding="utf-8"))
        records = tuple((int(offset), int(length)) for offset, length in note["records"])
        written = _Written(int(note["bytes"]), str(note["sha256"]), records)
        return written if path.stat().st_size == written.size_bytes else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
