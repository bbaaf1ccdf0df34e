"""The shards of one part while they are written: pairs, document rows, counts, and where to go on.

A shard is closed before the document that would take it over `shard_tokens`, so its bytes depend
on the corpus alone, not on workers or on how often a run was killed. When a shard is closed,
`state.json` in the part's folder says what is counted so far and at which record the next begins.
Shards, documents, lines and offsets are numbered within the part; `assembly` numbers them anew.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contracts.digests import sha256_of
from contracts.errors import InputError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from preprocessing.dataset.indexed_dataset import PairWriter
from preprocessing.ingestion.document_table import DocumentRows
from preprocessing.ingestion.encoding import BadPieceRecordError, Damage, EncodedBlock
from preprocessing.ingestion.tally import Tally
from preprocessing.reading.blocks import Position
from preprocessing.reading.records import Reject

STATE = "state.json"
REJECTS = "rejects.jsonl"


def shard_name(number: int) -> str:
    return f"data-{number:05d}"


@dataclass
class PartState:
    """How far a part is.

    Args:
        shards, documents: Finished so far.
        digests: (sha256 of `.bin`, of `.idx`) of each finished shard.
        position: Where the next shard begins.
        rejects_bytes: Length of the part's list of rejects.
        is_done: All pieces were read.
        engines: What ran the tokenizer for its finished shards.
    """

    shards: int = 0
    documents: int = 0
    digests: list[tuple[str, str]] = field(default_factory=list)
    position: Position = field(default_factory=Position)
    rejects_bytes: int = 0
    tally: Tally = field(default_factory=Tally)
    is_done: bool = False
    engines: list[str] = field(default_factory=list)


def read_state(folder: Path) -> PartState:
    """Read the state of a part; a new one if nothing was finished yet.

    Raises:
        InputError: It is damaged.
    """
    path = folder / STATE
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        return PartState(
            shards=int(data["shards"]),
            documents=int(data["documents"]),
            digests=[(str(tokens), str(index)) for tokens, index in data["digests"]],
            position=Position(**data["position"]),
            rejects_bytes=int(data["rejects_bytes"]),
            tally=Tally.from_dict(data["tally"]),
            is_done=bool(data["is_done"]),
            engines=list(data.get("engines", ())),
        )
    except FileNotFoundError:
        return PartState()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: damaged ({error}). Remove {folder.parent.parent}, then ingest again.") from error


class ShardWriter:
    """Takes encoded blocks in order and writes shards; goes on where a killed run stopped.

    Args:
        folder: The part's folder.
        stops_at_rejects: Raise BadPieceRecordError at the first bad record.
        check: Called before a shard counts as finished; raises if this process may not write here.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: np.dtype[Any],
        shard_tokens: int,
        stops_at_rejects: bool,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._stops_at_rejects = stops_at_rejects
        self._check = check
        self.state = read_state(folder)
        self._pair: PairWriter | None = None
        self._rows: DocumentRows | None = None
        self._digest = hashlib.sha256()
        self._rejects = (folder / REJECTS).open("ab")
        self._rejects.truncate(self.state.rejects_bytes)

    @property
    def tally(self) -> Tally:
        return self.state.tally

    def write(self, block: EncodedBlock | Damage) -> None:
        """Write one block.

        Raises:
            BadPieceRecordError: It holds a bad record, and bad records stop the stage.
        """
        if isinstance(block, Damage):
            self.tally.damaged[str(block.piece)] = {"reason": block.reason, "is_truncated": block.is_truncated}
            return
        if block.rejects and self._stops_at_rejects:
            first = block.rejects[0]
            raise BadPieceRecordError(block.end.piece, first.line, first.reason)
        totals = np.cumsum(block.lengths)
        start = 0
        from_line = 0
        while start < len(totals):
            pair, rows = self._open_shard()
            before = int(totals[start - 1]) if start else 0
            room = before + self._shard_tokens - pair.num_tokens
            stop = int(np.searchsorted(totals, room, side="right"))
            if stop == start and pair.num_documents == 0:
                stop = start + 1  # a document longer than a shard has one of its own
            if stop > start:
                self._write_documents(pair, rows, block, slice(start, stop), block.ids[before : int(totals[stop - 1])])
            if stop < len(totals):
                line, offset = int(block.lines[stop]), int(block.offsets[stop])
                self._account(block, from_line, line, offset)
                from_line = line
                self._close_shard(Position(block.end.piece, line, offset))
            start = stop
        self._account(block, from_line, block.end.line, block.end.offset)

    def _open_shard(self) -> tuple[PairWriter, DocumentRows]:
        """Return the writers of the current shard, new ones if the last shard is closed."""
        if self._pair is None or self._rows is None:
            number = self.state.shards
            self._pair = PairWriter(self._folder / shard_name(number), self._dtype)
            self._rows = DocumentRows(self._folder / f"{shard_name(number)}.parquet", number)
            self._digest = hashlib.sha256()
        return self._pair, self._rows

    def _write_documents(
        self, pair: PairWriter, rows: DocumentRows, block: EncodedBlock, documents: slice, ids: Any
    ) -> None:
        if block.engine not in self.state.engines:
            self.state.engines.append(block.engine)
        tokens = np.ascontiguousarray(ids, dtype=self._dtype)
        rows.append(self.state.documents + pair.num_documents, block, documents)
        if block.sequences is None:
            pair.append(tokens, block.lengths[documents])
        else:
            sequences = block.sequences.of(documents)
            pair.append_sequences(tokens, sequences.lengths, sequences.counts)
        self._digest.update(tokens.data)
        self.tally.add_documents(block.end.piece, block, documents)

    def _account(self, block: EncodedBlock, from_line: int, to_line: int, offset: int) -> None:
        """Count what happened at the lines `from_line` up to `to_line`, which begins at `offset`."""
        piece = block.end.piece
        for event in block.events:
            if from_line <= event.line < to_line:
                self.tally.add_event(piece, event)
        rejects = [reject for reject in block.rejects if from_line <= reject.line < to_line]
        if rejects:
            self._write_rejects(piece, rejects)
        self.tally.reached(piece, lines=to_line - 1, offset=offset)

    def _write_rejects(self, piece: int, rejects: Sequence[Reject]) -> None:
        self.tally.add(piece, "rejected", len(rejects))
        for reject in rejects:
            row = {
                "piece": piece,
                "file": reject.file,
                "line": reject.line,
                "byte_offset": reject.offset,
                "reason": reject.reason,
            }
            self._rejects.write(reject_line(row))
            self.tally.add_example("rejected", row)

    def _close_shard(self, next_position: Position, *, is_last: bool = False) -> None:
        """Finish the current pair and its document rows, then note where the next one begins."""
        state = self.state
        if self._pair is not None and self._rows is not None:
            self._check()
            self._rows.close()
            state.documents += self._pair.finish().num_documents
            index = self._folder / f"{shard_name(state.shards)}.idx"
            state.digests.append((self._digest.hexdigest(), sha256_of(index)))
            self._pair = self._rows = None
            state.shards += 1
        self._rejects.flush()
        os.fsync(self._rejects.fileno())
        state.position = next_position
        state.rejects_bytes = self._rejects.tell()
        state.is_done = is_last
        self._check()
        data = {**vars(state), "position": asdict(next_position), "tally": vars(self.tally)}
        write_atomically(self._folder / STATE, json.dumps(data))

    def finish(self, num_pieces: int) -> None:
        """Close the last shard; the part is done."""
        self._close_shard(Position(num_pieces), is_last=True)
        self._rejects.close()

    def close(self) -> None:
        """Give up, leaving what a resumed run needs."""
        self._rejects.close()
        if self._pair is not None:
            self._pair.close()


def reject_line(row: dict[str, Any]) -> bytes:
    """Write one reject as a line of JSON; a lone surrogate in a key becomes its JSON escape."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
