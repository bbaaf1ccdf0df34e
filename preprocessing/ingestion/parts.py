"""Parts: how a corpus is divided among processes, machines and tasks.

A part is a row of consecutive pieces of source files, about `part_bytes` of input on disk. It alone
decides the bytes of its shards; the parts are a function of the files and of `part_bytes`, never
of workers, ranks or time. `ingest_part` is the one function by which a part is done anywhere.
"""

import contextlib
import errno
import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InputError, RecordError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from contracts.lease import Lease
from contracts.progress import SilentProgress
from contracts.workspace import Workspace
from preprocessing.ingestion.encoding import BadPieceRecordError, Damage, EncodingPlan
from preprocessing.ingestion.shards import ShardWriter, read_state
from preprocessing.ingestion.workers import Pool
from preprocessing.reading.blocks import Block, Position
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.pieces import Piece, cut_file, piece_blocks
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.source_file import SourceFile

UNFINISHED = "unfinished"
LOCKS = ".locks"  # a name that is never published, as those of all locks
PLAN = "plan.json"
PROGRESS = "progress.json"
REPORT_S = 1.0
STOP_S = 10.0  # how long parts may take to notice that their build was given up

PartsAtWork = Generator[int | None, None, None]
"""Does parts while it is iterated: yields the number of each when it is done, and None every second or so."""


@dataclass(frozen=True)
class Part:
    """Consecutive pieces of the corpus, done by one process."""

    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


@dataclass(frozen=True)
class PartProgress:
    """How far a part is: bytes of input on disk, and what was found in them."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class IngestJob:
    """All that a process anywhere needs to do any part.

    Args:
        folder: The dataset's folder; several machines see it under this path.
        parts: All of them, in the order of the dataset.
        dtype: Token type, as numpy writes it.
        stops_at_rejects: A bad record or a damaged file stops the stage.
    """

    folder: Path
    files: tuple[SourceFile, ...]
    parts: tuple[Part, ...]
    encoding: EncodingPlan
    dtype: str
    shard_tokens: int
    stops_at_rejects: bool

    def part_folder(self, number: int) -> Path:
        return self.folder / UNFINISHED / f"part-{number:05d}"

    def part_lease(self, number: int, **options: Any) -> Lease:
        """Return the lease on a part; it lies apart from the part, so that taking it never makes one anew."""
        name = f"part {number} of {self.folder.name}"
        return Lease(self.folder / LOCKS / f"{number:05d}", name=name, progress=SilentProgress(), **options)

    def unfinished_parts(self) -> list[int]:
        """Number the parts that are not done.

        Raises:
            BuildOverError: The build is no longer under way.
        """
        numbers = [n for n in range(len(self.parts)) if not read_state(self.part_folder(n)).is_done]
        refuse_if_over(self.folder)
        return numbers


class BuildOverError(InputError):
    """Another process has completed the build meanwhile, or has given it up."""


def refuse_if_over(folder: Path) -> None:
    """Make sure that a build is under way. The plan goes before any state does: states read before this are true.

    Raises:
        BuildOverError: It is not.
    """
    if not (folder / UNFINISHED / PLAN).exists():
        raise BuildOverError(
            f"{folder}: the build was given up by another process, which refused its input. Its message says why."
        )


def plan_parts(files: Sequence[SourceFile], *, part_bytes: int, form: RecordFormat) -> tuple[Part, ...]:
    """Divide files into parts: a part is closed before the piece that would take it over `part_bytes`."""
    parts: list[Part] = []
    waiting: list[Piece] = []
    size_bytes = 0
    for number, file in enumerate(files):
        for piece in cut_file(file, number, piece_bytes=part_bytes, form=form):
            if waiting and size_bytes + piece.size_bytes > part_bytes:
                parts.append(Part(tuple(waiting)))
                waiting, size_bytes = [], 0
            waiting.append(piece)
            size_bytes += piece.size_bytes
    return (*parts, Part(tuple(waiting))) if waiting else tuple(parts)


def kept_plan(
    folder: Path, files: Sequence[SourceFile], *, part_bytes: int, form: RecordFormat, may_begin: bool
) -> tuple[Part, ...]:
    """Return the plan of a build that was begun, or make it and keep it for all who work on it.

    Args:
        may_begin: Make it; only whoever holds the lease on the folder may.

    Raises:
        InputError: The kept plan is damaged.
        BuildOverError: There is none, and this process may not make it.
    """
    path = folder / UNFINISHED / PLAN
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        return tuple(Part(tuple(Piece(*piece) for piece in part)) for part in data)
    except FileNotFoundError:
        if not may_begin:
            refuse_if_over(folder)
        parts = plan_parts(files, part_bytes=part_bytes, form=form)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error}). Remove {folder}, then ingest again.") from error
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps([[astuple(piece) for piece in part.pieces] for part in parts]))
    return parts


def ingest_part(
    job: IngestJob, number: int, pool: Pool, *, tell: Callable[[PartProgress], None] = lambda progress: None
) -> None:
    """Do one part, or go on with it where a killed run stopped; nothing happens if it is done.

    Args:
        pool: Encodes blocks, in this process or in others, in order.
        tell: Told after every block, besides the part's own file of progress.

    Raises:
        RecordError: A record is bad, and bad records stop the stage.
        DamagedStreamError: A file is damaged, likewise.
        LockedError: The part was taken over by another process.
        BuildOverError: The build is no longer under way.
    """
    report = PartReporter(job, number)
    refuse_if_over(job.folder)
    with job.part_lease(number) as lease:
        folder = job.part_folder(number)
        is_done = read_state(folder).is_done
        refuse_if_over(job.folder)
        if is_done:
            return
        folder.mkdir(exist_ok=True)
        writer = ShardWriter(
            folder,
            dtype=np.dtype(job.dtype),
            shard_tokens=job.shard_tokens,
            stops_at_rejects=job.stops_at_rejects,
            check=lease.check,
        )
        try:
            _write_part(job, number, writer, pool, (report, tell))
        except BadPieceRecordError as error:
            piece = job.parts[number].pieces[error.piece]
            line = error.line + _lines_before(job, number, error.piece)
            raise RecordError(job.files[piece.file].name, line, error.reason) from None
        finally:
            writer.close()


def _write_part(
    job: IngestJob, number: int, writer: ShardWriter, pool: Pool, tells: Sequence[Callable[[PartProgress], None]]
) -> None:
    pieces = job.parts[number].pieces
    starts = np.cumsum([0, *(piece.size_bytes for piece in pieces)]).tolist()
    with contextlib.closing(pool.ordered(_part_blocks(job, pieces, writer.state.position))) as blocks:
        for block in blocks:
            writer.write(block)
            if not isinstance(block, Damage):
                piece = block.end.piece
                read = starts[piece] + min(block.file_bytes_read, pieces[piece].size_bytes)
                counts = writer.tally.counts
                progress = PartProgress(read, counts["documents"], counts["tokens"], counts["rejected"])
                for tell in tells:
                    tell(progress)
    writer.finish(len(pieces))


def _part_blocks(job: IngestJob, pieces: Sequence[Piece], start: Position) -> Iterator[Block | Damage]:
    for number in range(start.piece, len(pieces)):
        source = job.files[pieces[number].file]
        position = start if number == start.piece else Position(number)
        try:
            yield from piece_blocks(source, pieces[number], position, form=job.encoding.form)
        except DamagedStreamError as error:
            if job.stops_at_rejects:
                raise
            yield Damage(source, number, error.reason, error.is_truncated)


def _lines_before(job: IngestJob, number: int, piece_number: int) -> int:
    """Count the lines of a file before a piece: from the states of parts that are done, else by reading."""
    file = job.parts[number].pieces[piece_number].file
    lines = 0
    for other in range(number + 1):
        pieces = job.parts[other].pieces[: piece_number if other == number else None]
        wanted = [n for n, piece in enumerate(pieces) if piece.file == file]
        state = read_state(job.part_folder(other)) if wanted else None
        for n in wanted:
            if state is not None and state.is_done:
                read: Mapping[str, int] = state.tally.places.get(str(n), {})
                lines += read.get("lines", 0)
            else:
                blocks = piece_blocks(job.files[file], pieces[n], Position(n), form=job.encoding.form)
                lines += sum(block.end.line - block.start.line for block in blocks)
    return lines


class PartReporter:
    """Keeps the progress of a part in a file, at most once a second, for whoever waits for it.

    Each time it looks whether the build was given up, because another process refused the corpus.
    """

    def __init__(self, job: IngestJob, number: int) -> None:
        self._folder = job.folder
        self._path = job.part_folder(number) / PROGRESS
        self._last_s = 0.0

    def __call__(self, progress: PartProgress) -> None:
        """Take a report.

        Raises:
            BuildOverError: The build was given up.
        """
        now_s = time.monotonic()
        if now_s - self._last_s >= REPORT_S:
            self._last_s = now_s
            refuse_if_over(self._folder)
            write_atomically(self._path, json.dumps(vars(progress)), is_durable=False)


def close_build(folder: Path) -> None:
    """Remove what an unfinished build needs: the plan first, so that no process takes what is missing for undone."""
    (folder / UNFINISHED / PLAN).unlink(missing_ok=True)
    for name in (UNFINISHED, LOCKS):
        shutil.rmtree(folder / name, ignore_errors=True)


def give_up(workspace: Workspace) -> None:
    """Throw away an unfinished build: parts that still run elsewhere see that their plan is gone, and stop."""
    (workspace.path / UNFINISHED / PLAN).unlink(missing_ok=True)
    deadline_s = time.monotonic() + STOP_S
    while True:
        try:
            return workspace.discard()
        except OSError as error:  # a part wrote a file between two steps of the removal
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or time.monotonic() > deadline_s:
                raise
        time.sleep(0.1)


def read_progress(folder: Path) -> PartProgress:
    """Read the last report of a part; zeros if there is none."""
    try:
        data: Mapping[str, Any] = parse_json((folder / PROGRESS).read_text(encoding="utf-8"))
        return PartProgress(**data)
    except (OSError, ValueError, TypeError):
        return PartProgress()
