"""Between the passes: which documents stay, once all are known.

`fates.npy` has a number for every document that passed the first pass, in corpus order: KEPT, or
that of the document it duplicates; `near.npy` tells whether it does so only nearly. `place.json`
of each part says where its documents stand among all.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.files import write_atomically
from contracts.json_text import parse_json
from contracts.progress import Progress
from preprocessing.cleaning.config import CleanConfig
from preprocessing.cleaning.duplicates import KEPT, Flags, Numbers, exact_duplicates, near_duplicates
from preprocessing.cleaning.examination import ExaminedPart
from preprocessing.cleaning.job import CleanJob
from preprocessing.ingestion.tally import Bases

FATES, NEAR = "fates.npy", "near.npy"


PLACE = "place.json"


@dataclass(frozen=True)
class Place:
    """Where a part stands in the corpus.

    Args:
        first, count: Of its documents that passed the first pass: number of the first, and how many.
        lines_before: Of each of its pieces, lines of the same file before it.
    """

    first: int
    count: int
    lines_before: list[int]

    @classmethod
    def read(cls, job: CleanJob, number: int) -> "Place":
        """Read what `decide` wrote of a part."""
        return cls(**parse_json((job.part_folder(number) / PLACE).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Fates:
    """What becomes of documents that passed the first pass.

    Args:
        duplicate_of: (passed,) number of the document that stays in its place; KEPT: it stays itself.
        is_near: (passed,) it is a near duplicate of it, not an exact one.
    """

    duplicate_of: Numbers
    is_near: Flags

    @classmethod
    def read(cls, job: CleanJob) -> "Fates":
        """Map what `decide` found."""
        folder = job.unfinished
        return cls(np.load(folder / FATES, mmap_mode="r"), np.load(folder / NEAR, mmap_mode="r"))

    def of(self, place: Place) -> "Fates":
        """Return those of one part."""
        mine = slice(place.first, place.first + place.count)
        return Fates(self.duplicate_of[mine], self.is_near[mine])


def decide(job: CleanJob, parts: Sequence[ExaminedPart], bases: Sequence[Bases], progress: Progress) -> None:
    """Find the duplicates, unless a killed run has found them."""
    if (job.unfinished / FATES).exists():
        return
    first = 0
    for number, (part, base) in enumerate(zip(parts, bases, strict=True)):
        place = Place(first, len(part.digests), list(base.lines))
        write_atomically(job.part_folder(number) / PLACE, json.dumps(vars(place)))
        first += place.count
    duplicate_of, is_near = _found(parts, job.settings, first, progress)
    for name, values in ((NEAR, is_near), (FATES, duplicate_of)):
        temporary = job.unfinished / f"{name}.tmp"
        with temporary.open("wb") as file:
            np.save(file, values)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(job.unfinished / name)


def _found(
    parts: Sequence[ExaminedPart], settings: CleanConfig, count: int, progress: Progress
) -> tuple[Numbers, Flags]:
    result = np.full(count, KEPT, np.int64)
    if settings.exact:
        progress.note(f"looking for exact duplicates among {count} documents")
        result = exact_duplicates([part.digests for part in parts])
    near = np.full(count, KEPT, np.int64)
    if settings.minhash is not None:
        config = settings.minhash
        progress.note(f"looking for near duplicates among {int((result == KEPT).sum())} documents")
        signatures = [part.signatures(config.permutations) for part in parts]
        near = near_duplicates(signatures, result == KEPT, config)
    # What an exact duplicate duplicates may be a near duplicate itself: name the one that stays.
    is_exact = result != KEPT
    of_others = near[result[is_exact]]
    result[is_exact] = np.where(of_others == KEPT, result[is_exact], of_others)
    return np.where(is_exact, result, near), ~is_exact & (near != KEPT)
