"""Reads a finished checkpoint back through its own reader and compares it with the source, bit by bit."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from contracts.errors import InputError, ShardlineError
from contracts.progress import Progress
from conversion.casting import Caster
from conversion.catalogue import Box, Checkpoint, TensorEntry, equal_bits, row_blocks
from conversion.linked_rows import LinkedCatalogue
from conversion.native import NativeCatalogue
from conversion.threads import in_threads
from training.config import ModelConfig
from training.file_digests import differing_digest
from training.parameters import OPTIMIZER_PREFIX
from training.step_folders import CheckpointInfo


def check_source_files(folder: Path, info: CheckpointInfo, digest: Callable[[Path], str]) -> None:
    """Compare the files of a native source with the digests in its manifest.

    Args:
        digest: sha256 of a file; the store's remembers files that did not change.

    Raises:
        InputError: A file differs from what was written.
    """
    for name, facts in info.files.items():
        if (differing := differing_digest(folder / name, facts, sha256=digest)) is not None:
            raise InputError(
                f"{folder / name}: is damaged (its {differing} differs from the one in the manifest). Restore it, or "
                "take another step."
            )


def compare_written(
    written: Checkpoint, source: Checkpoint, caster: Caster, *, progress: Progress, workers: int = 1
) -> int:
    """Compare every tensor of a written checkpoint with the source.

    Both are read under canonical names, so a foreign format is mapped back by its reader. Rows that
    are padding of the vocabulary on either side are left out.

    Returns:
        Number of tensors compared.

    Raises:
        ShardlineError: A tensor is missing or differs; names it and the place.
    """
    entries = written.tensors.entries
    missing = [name for name in source.info.parameters if name not in entries]
    if missing:
        raise ShardlineError(f"{written.path}: verification failed: tensor {missing[0]} was not written.")
    vocab_rows = _vocab_rows(written, source)

    one_at_a_time = threading.Lock()

    def compare(name: str) -> int:
        # A transposed tensor is held several times over; two of them at once could be too much.
        is_whole = any(reads_whole(checkpoint, name) for checkpoint in (written, source))
        with one_at_a_time if is_whole else contextlib.nullcontext():
            for box in _boxes(written, entries[name], vocab_rows, is_whole=is_whole):
                expected = caster(name, source.tensors.read(name, box), counts=False)
                if not equal_bits(written.tensors.read(name, box), expected):
                    place = " x ".join(f"{start}..{stop}" for start, stop in box)
                    raise ShardlineError(
                        f"{written.path}: verification failed: tensor {name} differs from the source in {place}. "
                        "The disk or the memory may be faulty; start again."
                    )
        return entries[name].size_bytes

    total, done = sum(entry.size_bytes for entry in entries.values()), 0
    for size in in_threads(compare, entries, workers=workers):
        done += size
        progress.update(done, total=total, unit="bytes verified")
    return len(entries)


def _vocab_rows(written: Checkpoint, source: Checkpoint) -> Mapping[str, int]:
    """Rows of real tokens, for the tensors whose padding differs between the two."""
    model = ModelConfig.model_validate(dict(written.info.model))
    rows = model.vocab_size or 0
    return {
        name: rows
        for name, entry in written.tensors.entries.items()
        if entry.shape != source.tensors.entries[name].shape or written.format != "native"
        if name.removeprefix(OPTIMIZER_PREFIX).startswith(("embedding.word.", "output."))
    }


def reads_whole(checkpoint: Checkpoint, name: str) -> bool:
    tensors = checkpoint.tensors
    return isinstance(tensors, LinkedCatalogue) and tensors.reads_whole(name)


def _boxes(written: Checkpoint, entry: TensorEntry, vocab_rows: Mapping[str, int], *, is_whole: bool) -> Iterator[Box]:
    if isinstance(written.tensors, NativeCatalogue):
        boxes = [chunk.box for chunk in written.tensors.chunks[entry.name]]
    elif entry.name in vocab_rows:
        boxes = [((0, vocab_rows[entry.name]), *entry.box[1:])]
    else:
        boxes = [entry.box]
    for box in boxes:
        if is_whole:
            yield box
        else:
            yield from row_blocks(box, entry.dtype.itemsize)
