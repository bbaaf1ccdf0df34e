"""What passes between reading, encoding and writing: the plan of encoding, and blocks of encoded documents."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.reading.blocks import Position
from preprocessing.reading.records import RecordFormat, Reject
from preprocessing.reading.source_file import SourceFile

DIGEST_BYTES = 16
NO_SUBSET = "(none)"


class BadPieceRecordError(Exception):
    """A bad record that stops the stage, at its line within a piece: the part knows which file that is.

    Args:
        piece: Number of the piece in the part.
        line: 1-based, from the piece's first record.
        reason: What is wrong.
    """

    def __init__(self, piece: int, line: int, reason: str) -> None:
        super().__init__(piece, line, reason)
        self.piece = piece
        self.line = line
        self.reason = reason


@dataclass(frozen=True)
class EncodingPlan:
    """How documents become token sequences.

    Args:
        tokenizer: Path of the tokenizer.
        subsets: Only records of these subsets become documents; empty: all.
        engine: What runs the tokenizer: a name in `ENGINES`. It does not change the ids.
        sentences: Language by whose rules documents are divided into sentences; None: they are one sequence each.
    """

    tokenizer: str
    form: RecordFormat
    keep_empty: bool
    eod_id: int | None
    bos_id: int | None
    subsets: frozenset[str] = frozenset()
    engine: str = "tokenizers"
    sentences: str | None = None


@dataclass(frozen=True)
class Damage:
    """A damaged or truncated file: stands in the row of blocks where its good part ends."""

    source: SourceFile
    piece: int
    reason: str
    is_truncated: bool


@dataclass(frozen=True)
class Event:
    """Something to count that happened at a line: "empty", "replaced_characters", and so on.

    Args:
        reason: Why a record was "filtered".
    """

    line: int
    name: str
    count: int = 1
    reason: str = ""


@dataclass(frozen=True)
class Sequences:
    """The sequences of documents that have several.

    Args:
        lengths: (sequences,) tokens of each.
        counts: (documents,) sequences of each.
    """

    lengths: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    def of(self, documents: slice) -> "Sequences":
        """Return those of some documents."""
        first = int(self.counts[: documents.start].sum())
        counts = self.counts[documents]
        return Sequences(self.lengths[first : first + int(counts.sum())], counts)


@dataclass
class EncodedBlock:
    """The documents of one block, ready to be written.

    Args:
        ids: (tokens,) ids of all documents, EOD and BOS in place, in the dataset's token type.
        lengths, lines, offsets, sizes: (documents,) tokens, record line, byte offset of the
            record, and bytes of UTF-8 text of each.
        digests: blake2b of each text, 16 bytes each.
        subsets: Subset name of each, or None.
        events: What else there is to count, by line.
        end: Where the next block begins.
        engine: What made the ids; they would be the same by any other.
        sequences: Of documents that were divided; None: each is one sequence.
    """

    ids: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    digests: bytes
    subsets: list[str | None]
    rejects: list[Reject]
    events: list[Event]
    end: Position
    file_bytes_read: int
    engine: str
    sequences: Sequences | None = None
