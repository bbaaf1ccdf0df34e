"""Writes Hugging Face model folders, in blocks, straight from another catalogue."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from contracts.digests import sha256_of
from contracts.files import sync, write_atomically
from contracts.progress import Progress
from conversion.casting import Caster
from conversion.catalogue import BLOCK_BYTES, Box, Checkpoint, TensorEntry, row_blocks
from conversion.huggingface import OWN_KEY
from conversion.huggingface_architecture import architecture_of
from conversion.huggingface_config import to_huggingface
from conversion.huggingface_files import CONFIG, INDEX, SINGLE
from conversion.huggingface_names import links_of
from conversion.linked_rows import derive_foreign
from conversion.safetensors_files import header_bytes, split_into_files, write_file
from training.config import ModelConfig


class HuggingFaceTarget:
    """What an export will write: decided from descriptions alone, before any byte is read.

    Args:
        source: An open checkpoint.
        caster: Says the types of the written weights.
        shard_bytes: Largest file, unless a single tensor is larger.

    Raises:
        ConfigError: No Hugging Face architecture computes the model.
    """

    def __init__(self, source: Checkpoint, caster: Caster, shard_bytes: int) -> None:
        self.source, self.caster = source, caster
        self.model = ModelConfig.model_validate(source.info.model)
        self.architecture = architecture_of(self.model)
        self.tensors = derive_foreign(source.tensors, links_of(self.model, self.architecture))
        entries = {
            name: TensorEntry(name, entry.shape, caster.dtype_of(name, entry.dtype))
            for name, entry in self.tensors.entries.items()
        }
        parts = split_into_files(entries, shard_bytes)
        total = len(parts)
        self.files: dict[str, dict[str, TensorEntry]] = (
            {SINGLE: parts[0]}
            if total == 1
            else {f"model-{n:05d}-of-{total:05d}.safetensors": part for n, part in enumerate(parts, 1)}
        )

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for part in self.files.values() for entry in part.values())

    @property
    def peak_bytes(self) -> int:
        """The most memory that tensors take while they are written."""
        return max(self._block_bytes(entry) for part in self.files.values() for entry in part.values())

    def _block_bytes(self, entry: TensorEntry) -> int:
        """A transposed tensor is held three times: its rows, a piece of them, and the result."""
        if self.tensors.reads_whole(entry.name):
            return 3 * entry.size_bytes
        return 2 * min(entry.size_bytes, BLOCK_BYTES)

    def _blocks(self, entry: TensorEntry) -> Iterator[Box]:
        if self.tensors.reads_whole(entry.name):
            return iter([entry.box])
        return row_blocks(entry.box, entry.dtype.itemsize)

    def _pieces(self, entry: TensorEntry) -> Iterator[Tensor]:
        for box in self._blocks(entry):
            yield self.caster(entry.name, self.tensors.read(entry.name, box))

    def write(
        self, folder: Path, *, token_ids: Mapping[str, Any], progress: Progress, is_resumed: bool = False
    ) -> dict[str, str]:
        """Write weights, index and config; files that an unfinished build left whole are kept.

        Returns:
            sha256 of each file of weights.
        """
        info = self.source.info
        own = {
            "step": info.step,
            "consumed_samples": info.consumed_samples,
            "seq_length": info.seq_length,
            "model": dict(info.model),
        }
        metadata = {"format": "pt", OWN_KEY: json.dumps(own)}
        digests: dict[str, str] = {}
        for n, (name, entries) in enumerate(self.files.items(), 1):
            path = folder / name
            if is_resumed and _is_whole(path, header_bytes(entries, metadata), entries):
                digests[name] = sha256_of(path)
            else:
                digests[name] = write_file(path, entries, metadata, self._pieces)
            progress.update(n, total=len(self.files), unit="files")
        if len(self.files) > 1:
            index = {
                "metadata": {"total_size": self.size_bytes},
                "weight_map": {tensor: name for name, entries in self.files.items() for tensor in entries},
            }
            write_atomically(folder / INDEX, json.dumps(index, indent=1) + "\n")
        written = sorted({str(e.dtype).removeprefix("torch.") for part in self.files.values() for e in part.values()})
        config = to_huggingface(self.model, dtype=written[-1] if len(written) > 1 else written[0], token_ids=token_ids)
        write_atomically(folder / CONFIG, json.dumps(config, indent=1) + "\n")
        sync(folder)
        return digests


def _is_whole(path: Path, header: bytes, entries: Mapping[str, TensorEntry]) -> bool:
    """Tell whether a file of an unfinished build is the one to be written; it got its name when it was whole."""
    if not path.is_file() or path.stat().st_size != len(header) + sum(e.size_bytes for e in entries.values()):
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header
