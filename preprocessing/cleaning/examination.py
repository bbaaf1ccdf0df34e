"""The first pass: every document is judged by itself, and what duplicates are found by is kept.

What a part leaves in its folder:

| file | content |
|---|---|
| rows.bin | a ROW for every document: where it is, and why it is left out |
| digests.bin | 16 bytes for every document that passed: blake2b of its text |
| signatures.bin | its MinHash signature, where near duplicates are looked for |
| rejects.jsonl | bad records |
| examined.json | counts and names; written last, in one step |
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from contracts.errors import InputError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from preprocessing.cleaning.duplicates import KEPT
from preprocessing.cleaning.job import CleanJob, Pass, Tell, bytes_read, part_blocks
from preprocessing.cleaning.rules import Cause, Rules
from preprocessing.cleaning.signatures import Signatures, Signer
from preprocessing.ingestion.encoding import DIGEST_BYTES, NO_SUBSET, BadPieceRecordError, Damage, Event
from preprocessing.ingestion.shards import REJECTS, reject_line
from preprocessing.ingestion.tally import Tally
from preprocessing.ingestion.workers import Pool
from preprocessing.reading.blocks import Block, Position
from preprocessing.reading.records import ParsedBlock, Reject, parse_block

EXAMINED = "examined.json"
ROWS, DIGESTS, SIGNATURES = "rows.bin", "digests.bin", "signatures.bin"
ROW = np.dtype(
    [("piece", "<i4"), ("line", "<i8"), ("offset", "<i8"), ("bytes", "<i8"), ("subset", "<i4"), ("cause", "<i4")]
)
"""Line and offset count from the piece's first record; `subset` and `cause` are numbers of names in
examined.json; a cause of KEPT: the document passed."""


@dataclass
class ExaminedBlock:
    """The documents of one block, judged.

    Args:
        lines, offsets, sizes: (documents,) of each its line, byte offset and bytes of UTF-8 text.
        causes: (documents,) why each is left out; None: it passed.
        digests: blake2b of the text of each that passed, 16 bytes each.
        signatures: (passed, permutations), where they are wanted.
    """

    lines: list[int]
    offsets: list[int]
    sizes: list[int]
    subsets: list[str | None]
    causes: list[Cause | None]
    digests: bytes
    signatures: Signatures | None
    rejects: list[Reject]
    events: list[Event]
    end: Position
    file_bytes_read: int


def make_examiner(job: CleanJob) -> Callable[[Any], Any]:
    """Return the function that a worker applies to each block."""
    settings = job.settings
    rules = Rules(settings, job.unfinished, job.set_names)
    signer = Signer(settings.minhash) if settings.minhash is not None else None

    def examine(block: Block | Damage) -> ExaminedBlock | Damage:
        if isinstance(block, Damage):
            return block
        parsed = parse_block(block, job.form)
        judged = [rules(text) for text in parsed.texts]
        passed = [item for item in judged if item.cause is None]
        digests = [hashlib.blake2b(item.text.encode(), digest_size=DIGEST_BYTES).digest() for item in passed]
        words = [item.words for item in passed if item.words is not None]
        return ExaminedBlock(
            lines=parsed.lines,
            offsets=parsed.offsets,
            sizes=[len(text.encode()) for text in parsed.texts],
            subsets=parsed.subsets,
            causes=[item.cause for item in judged],
            digests=b"".join(digests),
            signatures=None if signer is None else signer(words),
            rejects=parsed.rejects,
            events=_events_of(parsed),
            end=block.end,
            file_bytes_read=block.file_bytes_read,
        )

    return examine


def _events_of(parsed: ParsedBlock) -> list[Event]:
    events = [Event(line, "empty") for line in parsed.empty_lines]
    events += [Event(line, "filtered", reason=reason) for line, reason in parsed.filtered]
    return events + [Event(*item) for item in parsed.events]


def _examine_part(job: CleanJob, number: int, pool: Pool, tell: Tell) -> None:
    read = bytes_read(job, number)
    with _PartWriter(job, number) as writer:
        for block in pool.ordered(part_blocks(job, number)):
            writer.write(block)
            if not isinstance(block, Damage):
                tell(read(block.end, block.file_bytes_read))
        writer.finish()


EXAMINE = Pass("examine", EXAMINED, make_examiner, _examine_part)


class _PartWriter(ExitStack):
    """Writes what a part leaves in its folder, from nothing."""

    def __init__(self, job: CleanJob, number: int) -> None:
        super().__init__()
        self._job = job
        self._folder = job.part_folder(number)
        names = (ROWS, DIGESTS, SIGNATURES, REJECTS)
        self._files: dict[str, IO[bytes]] = {
            name: self.enter_context((self._folder / name).open("wb")) for name in names
        }
        self._tally = Tally()
        self._subsets: dict[str, int] = {}
        self._causes: dict[Cause, int] = {}

    def write(self, block: ExaminedBlock | Damage) -> None:
        if isinstance(block, Damage):
            self._tally.damaged[str(block.piece)] = {"reason": block.reason, "is_truncated": block.is_truncated}
            return
        piece = block.end.piece
        if block.rejects and self._job.settings.on_error == "stop":
            raise BadPieceRecordError(piece, block.rejects[0].line, block.rejects[0].reason)
        rows = np.empty(len(block.lines), ROW)
        rows["piece"], rows["line"], rows["offset"], rows["bytes"] = piece, block.lines, block.offsets, block.sizes
        rows["subset"] = [self._subsets.setdefault(name or NO_SUBSET, len(self._subsets)) for name in block.subsets]
        rows["cause"] = [self._number_of(cause) for cause in block.causes]
        self._files[ROWS].write(rows.tobytes())
        self._files[DIGESTS].write(block.digests)
        if block.signatures is not None:
            self._files[SIGNATURES].write(block.signatures.tobytes())
        self._count(block)

    def _number_of(self, cause: Cause | None) -> int:
        return KEPT if cause is None else self._causes.setdefault(cause, len(self._causes))

    def _count(self, block: ExaminedBlock) -> None:
        piece, tally = block.end.piece, self._tally
        for event in block.events:
            tally.add_event(piece, event)
        for cause in filter(None, block.causes):
            tally.add_event(piece, Event(0, "filtered", reason=cause.reason))
        for reject in block.rejects:
            row = {"piece": piece, **{name: getattr(reject, name) for name in ("file", "line")}}
            row |= {"byte_offset": reject.offset, "reason": reject.reason}
            self._files[REJECTS].write(reject_line(row))
            tally.add_example("rejected", row)
        if block.rejects:
            tally.add(piece, "rejected", len(block.rejects))
        tally.reached(piece, lines=block.end.line - 1, offset=block.end.offset)

    def finish(self) -> None:
        """Make everything durable; the part is done."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        causes = [(cause.step, cause.reason) for cause in self._causes]
        data = {"tally": vars(self._tally), "subsets": list(self._subsets), "causes": causes}
        write_atomically(self._folder / EXAMINED, json.dumps(data))


@dataclass(frozen=True)
class ExaminedPart:
    """What the first pass found in a part."""

    folder: Path
    tally: Tally
    subsets: Sequence[str]
    causes: Sequence[Cause]

    @classmethod
    def read(cls, folder: Path) -> "ExaminedPart":
        """Read the result of a part.

        Raises:
            InputError: It is damaged.
        """
        path = folder / EXAMINED
        try:
            data = parse_json(path.read_text(encoding="utf-8"))
            causes = [Cause(step, reason) for step, reason in data["causes"]]
            return cls(folder, Tally.from_dict(data["tally"]), list(data["subsets"]), causes)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: damaged ({error}). Remove {folder.parent.parent}, then clean again.") from error

    @property
    def rows(self) -> npt.NDArray[Any]:
        """(documents,) of ROW, mapped."""
        return _mapped(self.folder / ROWS, ROW)

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """(passed, 2), mapped."""
        return _mapped(self.folder / DIGESTS, np.dtype("<u8")).reshape(-1, 2)

    def signatures(self, permutations: int) -> Signatures:
        """(passed, permutations), mapped."""
        return _mapped(self.folder / SIGNATURES, np.dtype("<u2")).reshape(-1, permutations)


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
