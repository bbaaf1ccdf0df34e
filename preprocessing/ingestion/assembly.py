"""From finished parts to one dataset: pairs get their names, tables and rejects their true numbers.

Every step can be done again after a kill: pairs are renamed, never copied, and what is written
appears in one step. The pairs' digests were worked out while they were written, so that
publication does not read terabytes again.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import InputError
from contracts.files import sync
from contracts.json_text import parse_json
from preprocessing.ingestion.document_table import DOCUMENTS, PartTables, join_tables
from preprocessing.ingestion.parts import IngestJob
from preprocessing.ingestion.shards import REJECTS, PartState, read_state, reject_line, shard_name
from preprocessing.ingestion.tally import Bases, Tally, bases_of, joined


@dataclass(frozen=True)
class FinishedParts:
    """All parts of a job, done, and what was counted in them together."""

    states: Sequence[PartState]
    bases: Sequence[Bases]
    tally: Tally

    @property
    def num_shards(self) -> int:
        return sum(state.shards for state in self.states)


def finished_parts(job: IngestJob) -> FinishedParts:
    """Read the states of all parts and add up their counts.

    Raises:
        RuntimeError: A part is not done.
    """
    states = [read_state(job.part_folder(number)) for number in range(len(job.parts))]
    for number, state in enumerate(states):
        if not state.is_done:
            raise RuntimeError(f"part {number} of {job.folder} is not done")
    tallies = [state.tally for state in states]
    bases = bases_of((part.pieces, tally) for part, tally in zip(job.parts, tallies, strict=True))
    return FinishedParts(states, bases, joined(tallies, bases))


def assemble(job: IngestJob, parts: FinishedParts) -> dict[str, str]:
    """Put the dataset together; return the sha256 of its pairs by file name.

    Raises:
        InputError: A finished pair is gone.
    """
    digests = _name_pairs(job, parts)
    if not (job.folder / DOCUMENTS).exists():
        join_tables(_tables(job, parts), [file.name for file in job.files], job.folder / DOCUMENTS)
    if parts.tally.counts["rejected"] and not (job.folder / REJECTS).exists():
        _join_rejects(job, parts, job.folder / REJECTS)
    sync(job.folder)
    return digests


def _name_pairs(job: IngestJob, parts: FinishedParts) -> dict[str, str]:
    digests: dict[str, str] = {}
    total = 0
    for number, state in enumerate(parts.states):
        for shard in range(state.shards):
            for suffix, digest in zip((".bin", ".idx"), state.digests[shard], strict=True):
                name = f"{shard_name(total)}{suffix}"
                _move(job.part_folder(number) / f"{shard_name(shard)}{suffix}", job.folder / name)
                digests[name] = digest
            total += 1
    return digests


def _move(source: Path, target: Path) -> None:
    try:
        source.replace(target)
    except FileNotFoundError:
        if not target.exists():  # a run that was killed here has moved it
            raise InputError(
                f"{source}: this finished file is gone. Remove {target.parent}, then ingest again."
            ) from None


def _tables(job: IngestJob, parts: FinishedParts) -> Iterator[PartTables]:
    shard = document = 0
    for number, (state, bases) in enumerate(zip(parts.states, parts.bases, strict=True)):
        folder = job.part_folder(number)
        yield PartTables([folder / f"{shard_name(n)}.parquet" for n in range(state.shards)], shard, document, bases)
        shard += state.shards
        document += state.documents


def _join_rejects(job: IngestJob, parts: FinishedParts, target: Path) -> None:
    temporary = target.with_name(f"{target.name}.tmp")
    with temporary.open("wb") as file:
        for number, bases in enumerate(parts.bases):
            with (job.part_folder(number) / REJECTS).open("rb") as lines:
                for line in lines:
                    row = bases.placed(parse_json(line))
                    del row["file_number"]
                    file.write(reject_line(row))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
