"""What became of every line of a corpus: `dropped.parquet`, `rejects.jsonl`, and the counts.

| column of dropped.parquet | type | content |
|---|---|---|
| file, line, byte_offset | text, int64, int64 | the record; 1-based line or row, byte in the decompressed file |
| subset | text | its subset, or (none) |
| step, reason | text | what left it out, and why |
| of | text | file:line of the document that stays in its place; null unless it is a duplicate |
| bytes | int64 | of its text in UTF-8 |

lines = documents + empty + filtered + rejected, for each file and in total; what the steps leave out is
filtered.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.json_text import parse_json
from preprocessing.cleaning.duplicates import KEPT, Numbers
from preprocessing.cleaning.examination import ExaminedPart
from preprocessing.cleaning.fates import Fates, Place
from preprocessing.cleaning.job import CleanJob
from preprocessing.cleaning.rules import Cause
from preprocessing.ingestion.shards import REJECTS, reject_line
from preprocessing.ingestion.tally import Bases, Tally

DROPPED = "dropped.parquet"
EXACT, NEARLY = Cause("exact", "exact duplicate"), Cause("near", "near duplicate")
ROWS_AT_ONCE = 2**16

Rows = npt.NDArray[Any]


@dataclass
class Account:
    """What became of the documents.

    Args:
        tally: Of the corpus by file, documents and duplicates included.
        dropped: Documents by step and reason.
        subsets: Documents that were left out, by subset and step.
    """

    tally: Tally
    dropped: dict[str, Counter[str]] = field(default_factory=dict)
    subsets: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, subset: str, cause: Cause, count: int) -> None:
        self.dropped.setdefault(cause.step, Counter())[cause.reason] += count
        self.subsets.setdefault(subset, Counter())[cause.step] += count


def list_documents(job: CleanJob, parts: Sequence[ExaminedPart], bases: Sequence[Bases], tally: Tally) -> Account:
    """Write `dropped.parquet` and finish the counts, in the memory of one part's rows.

    Args:
        tally: Of all parts, by file, as the first pass left it; duplicates and documents are added.
    """
    import pyarrow.parquet as pq

    account = Account(tally)
    fates = Fates.read(job)
    finder = _Finder(job, parts, bases)
    target = job.folder / DROPPED
    temporary = target.with_name(f"{DROPPED}.tmp")
    with temporary.open("wb") as file:
        with pq.ParquetWriter(file, _schema(), compression="zstd") as writer:
            for number, (part, base) in enumerate(zip(parts, bases, strict=True)):
                found = _PartOfTable(part, base, fates.of(Place.read(job, number)))
                found.count(account)
                dropped = np.flatnonzero(found.causes != KEPT)
                for start in range(0, len(dropped), ROWS_AT_ONCE):
                    writer.write_table(found.table(dropped[start : start + ROWS_AT_ONCE], job, finder))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    return account


class _PartOfTable:
    """All documents of a part, with the cause of each that was left out, duplicates included."""

    def __init__(self, part: ExaminedPart, base: Bases, fates: Fates) -> None:
        self._part, self._base = part, base
        self._rows = part.rows
        self._all_causes = [*part.causes, EXACT, NEARLY]
        passed = np.flatnonzero(self._rows["cause"] == KEPT)
        exact = len(part.causes)
        causes = np.array(self._rows["cause"])
        causes[passed] = np.where(fates.duplicate_of == KEPT, KEPT, np.where(fates.is_near, exact + 1, exact))
        self.causes = causes
        self._of = np.full(len(causes), KEPT, np.int64)
        self._of[passed] = fates.duplicate_of

    def count(self, account: Account) -> None:
        """Add documents and duplicates to the tally, and all that was left out to the account."""
        numbers = np.stack([self._rows["piece"], self._rows["subset"], self.causes])
        for (piece, subset, cause), count in zip(*_occurrences(numbers), strict=True):
            file = self._base.files[piece]
            if cause == KEPT:
                account.tally.add(file, "documents", count)
                continue
            reason = self._all_causes[cause]
            account.add(self._part.subsets[subset], reason, count)
            if reason in (EXACT, NEARLY):  # the others were counted when they were found
                account.tally.add(file, "filtered", count)
                account.tally.filtered[reason.reason] += count

    def table(self, numbers: Numbers, job: CleanJob, finder: "_Finder") -> Any:
        """Return rows of the table."""
        import pyarrow as pa

        rows, causes = self._rows[numbers], self.causes[numbers]
        pieces = rows["piece"]
        files = np.asarray(self._base.files)[pieces]
        names = [file.name for file in job.files]
        of = finder.names(self._of[numbers])
        columns = [
            pa.DictionaryArray.from_arrays(files.astype(np.int32), names),
            pa.array(rows["line"] + np.asarray(self._base.lines, dtype=np.int64)[pieces]),
            pa.array(rows["offset"] + np.asarray(self._base.offsets, dtype=np.int64)[pieces]),
            pa.DictionaryArray.from_arrays(rows["subset"].astype(np.int32), list(self._part.subsets)),
            pa.DictionaryArray.from_arrays(causes.astype(np.int32), [cause.step for cause in self._all_causes]),
            pa.DictionaryArray.from_arrays(causes.astype(np.int32), [cause.reason for cause in self._all_causes]),
            pa.array(of, pa.string()),
            pa.array(np.ascontiguousarray(rows["bytes"])),
        ]
        return pa.table(columns, schema=_schema())


class _Finder:
    """Finds where documents are, by their numbers among those that passed the first pass."""

    def __init__(self, job: CleanJob, parts: Sequence[ExaminedPart], bases: Sequence[Bases]) -> None:
        self._job, self._parts, self._bases = job, parts, bases
        self._starts = np.cumsum([0, *(len(part.digests) for part in parts)])
        self._last: tuple[int, Rows] = (-1, np.empty(0))

    def names(self, documents: Numbers) -> list[str | None]:
        """Write file:line of each; None for KEPT."""
        result: list[str | None] = [None] * len(documents)
        owners = np.searchsorted(self._starts, documents, side="right") - 1
        for owner in np.unique(owners[documents != KEPT]).tolist():
            mine = np.flatnonzero((owners == owner) & (documents != KEPT))
            rows = self._passed(owner)[documents[mine] - self._starts[owner]]
            base = self._bases[owner]
            for place, piece, line in zip(mine.tolist(), rows["piece"].tolist(), rows["line"].tolist(), strict=True):
                result[place] = f"{self._job.files[base.files[piece]].name}:{line + base.lines[piece]}"
        return result

    def _passed(self, owner: int) -> Rows:
        if self._last[0] != owner:
            rows = self._parts[owner].rows
            self._last = (owner, rows[rows["cause"] == KEPT])
        return self._last[1]


def _occurrences(numbers: npt.NDArray[Any]) -> tuple[list[list[int]], list[int]]:
    if not numbers.shape[1]:
        return [], []
    values, counts = np.unique(numbers, axis=1, return_counts=True)
    return values.T.tolist(), counts.tolist()


def _schema() -> Any:
    import pyarrow as pa

    name = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            ("file", name),
            ("line", pa.int64()),
            ("byte_offset", pa.int64()),
            ("subset", name),
            ("step", name),
            ("reason", name),
            ("of", pa.string()),
            ("bytes", pa.int64()),
        ]
    )


def list_rejects(job: CleanJob, bases: Sequence[Bases]) -> None:
    """Join the lists of bad records; pieces become files, with true lines and bytes."""
    target = job.folder / REJECTS
    temporary = target.with_name(f"{REJECTS}.tmp")
    with temporary.open("wb") as file:
        for number, base in enumerate(bases):
            with (job.part_folder(number) / REJECTS).open("rb") as lines:
                for line in lines:
                    row = base.placed(parse_json(line))
                    del row["file_number"]
                    file.write(reject_line(row))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
