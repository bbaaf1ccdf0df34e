"""A cleaning job and its two passes over the parts of a corpus: how they are run and resumed.

Each pass does every part once, in worker processes; a part is done when the file that says so
appears, and a killed run goes on at the parts that are left.
"""

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from contracts.errors import RecordError
from contracts.files import write_atomically
from contracts.lease import Lease
from contracts.progress import Progress, SilentProgress
from preprocessing.cleaning.config import CleanConfig
from preprocessing.ingestion.encoding import BadPieceRecordError, Damage
from preprocessing.ingestion.executors import TICK_S, Wave, schedule
from preprocessing.ingestion.parts import UNFINISHED, Part
from preprocessing.ingestion.workers import InProcess, Pool, Processes
from preprocessing.reading.blocks import Block, Position
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.pieces import piece_blocks
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.source_file import SourceFile

REPORT = "progress"

Tell = Callable[[int], None]


@dataclass(frozen=True)
class CleanJob:
    """All that a process needs to do any part in either pass.

    Args:
        folder: The artifact's folder.
        parts: All of them, in corpus order.
        set_names: Names of the evaluation sets.
    """

    folder: Path
    files: tuple[SourceFile, ...]
    parts: tuple[Part, ...]
    settings: CleanConfig
    form: RecordFormat
    set_names: tuple[str, ...]

    @property
    def unfinished(self) -> Path:
        return self.folder / UNFINISHED

    def part_folder(self, number: int) -> Path:
        return self.unfinished / f"part-{number:05d}"


@dataclass(frozen=True)
class Pass:
    """One pass over the corpus; its functions stand in a module, so that workers find them.

    Args:
        name: For progress.
        done: Name of the file in the part's folder that says that the part is done.
        make: Returns the function that a worker applies to blocks.
        work: Does one part: its blocks go through the pool; told of bytes of input.
    """

    name: str
    done: str
    make: Callable[[CleanJob], Callable[[Any], Any]]
    work: Callable[[CleanJob, int, Pool, Tell], None]


def run_pass(step: Pass, job: CleanJob, *, workers: int, progress: Progress, passes: tuple[int, int]) -> None:
    """Do what is left of a pass.

    Args:
        workers: Processes; 0: this one.
        passes: Number of this pass and of all, for progress.

    Raises:
        RecordError, DamagedStreamError: The corpus is bad, and that stops the stage.
    """
    left = [n for n in range(len(job.parts)) if not (job.part_folder(n) / step.done).exists()]
    sizes = {number: job.parts[number].size_bytes for number in left}
    total = sum(part.size_bytes for part in job.parts)
    finished = total - sum(sizes.values())
    read = dict.fromkeys(left, 0)

    def report() -> None:
        done = finished + sum(read.values()) + (passes[0] - 1) * total
        progress.update(done, total=passes[1] * total, unit="bytes", step=step.name)

    def tell(number: int, size_bytes: int) -> None:
        read[number] = size_bytes
        report()

    with contextlib.closing(_run(step, job, sizes, workers, tell)) as running:
        for number in running:
            if number is not None:
                read[number] = sizes[number]
            else:
                read.update({n: _reported(job, n) for n in left if read[n] < sizes[n]})
            report()


def _run(
    step: Pass, job: CleanJob, sizes: dict[int, int], workers: int, tell: Callable[[int, int], None]
) -> Generator[int | None, None, None]:
    waves = schedule(sizes, workers)
    if any(file.is_in_this_process_only for file in job.files):
        waves = [Wave(tuple(sizes), 1, workers)]
    for wave in waves:
        if wave.lanes > 1:
            with Processes(wave.lanes, make_lane, (step, job, wave.workers)) as lanes:
                yield from lanes.completed(wave.parts, tick_s=TICK_S)
        elif wave.parts:
            with _pool(step, job, wave.workers) as pool:
                for number in wave.parts:
                    _do_part(step, job, number, pool, partial(tell, number))
                    yield number


def make_lane(step: Pass, job: CleanJob, workers: int) -> Callable[[int], int]:
    """Return the function by which a worker process does whole parts; it ends when its parent is gone."""
    parent = os.getppid()
    pool = _pool(step, job, workers)
    pool.__enter__()

    def run(number: int) -> int:
        path, last_s = job.part_folder(number) / REPORT, time.monotonic()

        def tell(size_bytes: int) -> None:
            nonlocal last_s
            if os.getppid() != parent:
                raise SystemExit(1)
            if time.monotonic() - last_s >= TICK_S:
                last_s = time.monotonic()
                write_atomically(path, str(size_bytes), is_durable=False)

        _do_part(step, job, number, pool, tell)
        path.unlink(missing_ok=True)
        return number

    return run


def _pool(step: Pass, job: CleanJob, workers: int) -> Pool:
    return Processes(workers, step.make, (job,)) if workers else InProcess(step.make, (job,))


def _do_part(step: Pass, job: CleanJob, number: int, pool: Pool, tell: Tell) -> None:
    folder = job.part_folder(number)
    # A worker of a killed run may still be at this part: it ends when it notices, and frees the lease.
    with Lease(folder, name=f"part {number} of {job.folder.name}", progress=SilentProgress()):
        if (folder / step.done).exists():
            return
        try:
            step.work(job, number, pool, tell)
        except BadPieceRecordError as error:
            piece = job.parts[number].pieces[error.piece]
            line = error.line + _lines_before(job, number, error.piece)
            raise RecordError(job.files[piece.file].name, line, error.reason) from None


def _reported(job: CleanJob, number: int) -> int:
    try:
        return int((job.part_folder(number) / REPORT).read_text())
    except (OSError, ValueError):
        return 0


def part_blocks(job: CleanJob, number: int) -> Iterator[Block | Damage]:
    """Yield the blocks of a part; where a file is damaged and that does not stop the stage, a `Damage`."""
    for place, piece in enumerate(job.parts[number].pieces):
        source = job.files[piece.file]
        try:
            yield from piece_blocks(source, piece, Position(place), form=job.form)
        except DamagedStreamError as error:
            if job.settings.on_error == "stop":
                raise
            yield Damage(source, place, error.reason, error.is_truncated)


def bytes_read(job: CleanJob, number: int) -> Callable[[Position, int], int]:
    """Return the function that says how much of a part was read, given a block's end and the bytes of its piece."""
    sizes = [piece.size_bytes for piece in job.parts[number].pieces]

    def read(end: Position, piece_bytes: int) -> int:
        return sum(sizes[: end.piece]) + min(piece_bytes, sizes[end.piece])

    return read


def _lines_before(job: CleanJob, number: int, place: int) -> int:
    """Count the lines of a file before a piece, by reading them: done once, to name a bad record."""
    file = job.parts[number].pieces[place].file
    before = [piece for part in job.parts[: number + 1] for piece in part.pieces if piece.file == file]
    later = sum(piece.file == file for piece in job.parts[number].pieces[place:])
    pieces: Sequence[Any] = before[: len(before) - later]
    blocks = (block for piece in pieces for block in piece_blocks(job.files[file], piece, Position(), form=job.form))
    return sum(block.end.line - block.start.line for block in blocks)
