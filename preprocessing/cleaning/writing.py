"""The second pass: the documents that stay are written in Pile form, mended and masked.

Each part becomes one file `train/NNNNN.jsonl.zst` of several zstd frames, so that the next stage
reads it with several workers. A part without a document gives no file.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import numpy as np

from contracts.errors import InputError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from preprocessing.cleaning.duplicates import KEPT, Numbers
from preprocessing.cleaning.examination import ExaminedPart
from preprocessing.cleaning.fates import Fates, Place
from preprocessing.cleaning.job import CleanJob, Pass, Tell, bytes_read, part_blocks
from preprocessing.cleaning.personal import mask_personal_data
from preprocessing.cleaning.rules import mended
from preprocessing.ingestion.encoding import NO_SUBSET, Damage
from preprocessing.ingestion.workers import Pool
from preprocessing.reading.blocks import Block, Position
from preprocessing.reading.records import parse_block

WRITTEN = "written.json"
FRAME_BYTES = 4 * 2**20
ZSTD_LEVEL = 3


@dataclass(frozen=True)
class Writing:
    """A block, and which of its documents stay.

    Args:
        lines: Of those that stay, counted from the piece's first record.
        lines_before: Of the file before the piece.
    """

    block: Block
    lines: Numbers
    lines_before: int


@dataclass
class WrittenBlock:
    """The documents of a block that stay, as lines of JSON.

    Args:
        counts: documents, bytes, and what was masked.
        subsets: documents and bytes by subset.
    """

    data: bytes
    counts: Counter[str]
    subsets: dict[str, Counter[str]]
    end: Position
    file_bytes_read: int


def make_writer(job: CleanJob) -> Callable[[Any], Any]:
    """Return the function that a worker applies to each block."""
    return partial(_written, job)


def _written(job: CleanJob, task: Writing) -> WrittenBlock:
    import orjson

    block, stays = task.block, set(task.lines.tolist())
    parsed = parse_block(block, job.form) if stays else None
    lines: list[bytes] = []
    counts: Counter[str] = Counter()
    subsets: dict[str, Counter[str]] = {}
    for record in parsed.records() if parsed is not None else ():
        if record.line not in stays:
            continue
        text = mended(record.text, job.settings)
        if job.settings.mask_personal_data:
            masked = mask_personal_data(text)
            text = masked.text
            counts["masked_emails"] += masked.emails
            counts["masked_ip_addresses"] += masked.ip_addresses
            counts["masked_documents"] += bool(masked.emails or masked.ip_addresses)
        subset = record.subset or NO_SUBSET
        source = f"{record.file}:{record.line + task.lines_before}"
        lines.append(orjson.dumps({"text": text, "meta": {"pile_set_name": subset, "source": source}}))
        size = Counter(documents=1, bytes=len(text.encode()))
        counts.update(size)
        subsets.setdefault(subset, Counter()).update(size)
    data = b"".join(line + b"\n" for line in lines)
    return WrittenBlock(data, counts, subsets, block.end, block.file_bytes_read)


def _write_part(job: CleanJob, number: int, pool: Pool, tell: Tell) -> None:
    place = Place.read(job, number)
    rows = ExaminedPart.read(job.part_folder(number)).rows
    passed = rows[rows["cause"] == KEPT]
    stays = passed[Fates.read(job).of(place).duplicate_of == KEPT]
    read = bytes_read(job, number)
    state = WrittenPart()
    target = job.folder / "train" / f"{number:05d}.jsonl.zst"
    temporary = job.part_folder(number) / f"{target.name}.tmp"
    with temporary.open("wb") as file:
        frames = _FrameWriter(file)
        for block in pool.ordered(_tasks(job, number, stays, place.lines_before)):
            frames.write(block.data)
            state.add(block)
            tell(read(block.end, block.file_bytes_read))
        state.sha256 = frames.finish()
    if state.counts["documents"] != len(stays):
        raise InputError(
            f"part {number} of the corpus gave {state.counts['documents']} documents where {len(stays)} were found "
            f"before: its files changed meanwhile. Remove {job.folder}, then clean again."
        )
    if len(stays):
        target.parent.mkdir(exist_ok=True)
        temporary.replace(target)
    else:
        temporary.unlink()
    write_atomically(job.part_folder(number) / WRITTEN, json.dumps(vars(state)))


def _tasks(job: CleanJob, number: int, stays: Any, before: Sequence[int]) -> Iterator[Writing]:
    bounds = np.searchsorted(stays["piece"], np.arange(len(before) + 1))
    for block in part_blocks(job, number):
        if isinstance(block, Damage):
            continue
        piece = block.start.piece
        lines = stays["line"][bounds[piece] : bounds[piece + 1]]
        first, stop = np.searchsorted(lines, [block.start.line, block.end.line])
        yield Writing(block, lines[first:stop].copy(), before[piece])


WRITE = Pass("write", WRITTEN, make_writer, _write_part)


@dataclass
class WrittenPart:
    """What the second pass wrote of a part, as plain data.

    Args:
        sha256: Of the part's file.
    """

    counts: Counter[str] = field(default_factory=Counter)
    subsets: dict[str, Counter[str]] = field(default_factory=dict)
    sha256: str = ""

    def add(self, block: WrittenBlock) -> None:
        self.counts.update(block.counts)
        for name, counts in block.subsets.items():
            self.subsets.setdefault(name, Counter()).update(counts)

    @classmethod
    def read(cls, job: CleanJob, number: int) -> "WrittenPart":
        """Read the result of a part.

        Raises:
            InputError: It is damaged.
        """
        path = job.part_folder(number) / WRITTEN
        try:
            data = parse_json(path.read_text(encoding="utf-8"))
            subsets = {name: Counter(counts) for name, counts in data["subsets"].items()}
            return cls(Counter(data["counts"]), subsets, str(data["sha256"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: damaged ({error}). Remove {job.folder}, then clean again.") from error


class _FrameWriter:
    """Compresses lines into zstd frames of about FRAME_BYTES of text."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self._file = file
        self._digest = hashlib.sha256()
        self._waiting: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)
        if self._size >= FRAME_BYTES:
            self._close_frame()

    def _close_frame(self) -> None:
        frame = self._compressor.compress(b"".join(self._waiting))
        self._file.write(frame)
        self._digest.update(frame)
        self._waiting, self._size = [], 0

    def finish(self) -> str:
        """Write the rest, durably; return the sha256 of the file."""
        if self._size:
            self._close_frame()
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()
