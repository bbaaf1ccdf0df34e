"""Shards of a dataset while they are written: pairs, document rows, counts, and where to go on.

A shard is closed before the document that would take it over `shard_tokens`, so its bytes depend
on the corpus alone, not on workers or on how often the run was killed. When a shard is closed,
`unfinished/state.json` says what is counted so far and at which record the next one begins.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InputError, RecordError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from preprocessing.dataset.indexed_dataset import PairWriter
from preprocessing.ingestion.document_table import DOCUMENTS, DocumentRows, join_tables
from preprocessing.ingestion.encoding import NO_SUBSET, Damage, EncodedBlock
from preprocessing.reading.blocks import Position
from preprocessing.reading.records import Reject
from preprocessing.reading.source_file import SourceFile

UNFINISHED = "unfinished"
STATE = "state.json"
REJECTS = "rejects.jsonl"
NUM_EXAMPLES = 10


def shard_name(number: int) -> str:
    return f"data-{number:05d}"


@dataclass
class Tally:
    """What was counted, in total, by file and by subset; plain data, so that it can be saved.

    Args:
        counts: lines, documents, empty, filtered, rejected, tokens, bytes, and what was mended.
        files: The same by number of the file.
        subsets: documents, tokens, bytes by subset.
        damaged: By number of the file, why its end is missing.
        examples: The first places of some kinds of event.
    """

    counts: Counter[str] = field(default_factory=Counter)
    files: dict[str, Counter[str]] = field(default_factory=dict)
    subsets: dict[str, Counter[str]] = field(default_factory=dict)
    damaged: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Tally":
        def counters(group: str) -> dict[str, Counter[str]]:
            return {name: Counter(counts) for name, counts in data[group].items()}

        return cls(Counter(data["counts"]), counters("files"), counters("subsets"), data["damaged"], data["examples"])

    def add(self, file: int, name: str, count: int) -> None:
        self.counts[name] += count
        self.files.setdefault(str(file), Counter())[name] += count

    def add_example(self, kind: str, example: dict[str, Any]) -> None:
        examples = self.examples.setdefault(kind, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(example)

    def add_documents(self, file: int, block: EncodedBlock, part: slice) -> None:
        """Count the documents of a block in `part`."""
        numbers = {"documents": len(block.lengths[part]), "tokens": int(block.lengths[part].sum())}
        numbers["bytes"] = int(block.sizes[part].sum())
        for name, count in numbers.items():
            self.add(file, name, count)
        names = np.array([subset or NO_SUBSET for subset in block.subsets[part]], dtype=object)
        for subset in dict.fromkeys(names):
            chosen = names == subset
            counts = self.subsets.setdefault(subset, Counter())
            counts["documents"] += int(chosen.sum())
            counts["tokens"] += int(block.lengths[part][chosen].sum())
            counts["bytes"] += int(block.sizes[part][chosen].sum())


class ShardWriter:
    """Takes encoded blocks in order and writes shards; goes on where a killed run stopped.

    Args:
        folder: The dataset's folder.
        stops_at_rejects: Raise RecordError at the first bad record.
        is_resumed: Look for the state of a killed run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: np.dtype[Any],
        shard_tokens: int,
        stops_at_rejects: bool,
        is_resumed: bool,
    ) -> None:
        self._folder = folder
        self._unfinished = folder / UNFINISHED
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._stops_at_rejects = stops_at_rejects
        self.num_shards = 0
        self.num_documents = 0
        self.position = Position()
        self.tally = Tally()
        self._pair: PairWriter | None = None
        self._rows: DocumentRows | None = None
        self._unfinished.mkdir(exist_ok=True)
        rejects_bytes = self._load_state() if is_resumed else 0
        self._rejects = (self._unfinished / REJECTS).open("ab")
        self._rejects.truncate(rejects_bytes)

    def _load_state(self) -> int:
        try:
            state = parse_json((self._unfinished / STATE).read_text(encoding="utf-8"))
            position, tally = Position(**state["next"]), Tally.from_dict(state["tally"])
            num_shards, num_documents = int(state["shards"]), int(state["documents"])
            rejects_bytes = int(state["rejects_bytes"])
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self._unfinished / STATE}: damaged ({error}). Remove {self._unfinished.parent}, then ingest again."
            ) from error
        self.num_shards, self.num_documents = num_shards, num_documents
        self.position, self.tally = position, tally
        return rejects_bytes

    def write(self, block: EncodedBlock | Damage) -> None:
        """Write one block.

        Raises:
            RecordError: It holds a bad record, and bad records stop the stage.
        """
        if isinstance(block, Damage):
            self.tally.damaged[str(block.file)] = {"reason": block.reason, "is_truncated": block.is_truncated}
            return
        if block.rejects and self._stops_at_rejects:
            first = block.rejects[0]
            raise RecordError(first.file, first.line, first.reason)
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
            pair.append(block.ids[before : int(totals[stop - 1]) if stop else 0], block.lengths[start:stop])
            rows.append(self.num_documents + pair.num_documents - (stop - start), block, slice(start, stop))
            self.tally.add_documents(block.end.piece, block, slice(start, stop))
            if stop < len(totals):
                line, offset = int(block.lines[stop]), int(block.offsets[stop])
                self._account(block, from_line, line)
                from_line = line
                self._close_shard(Position(block.end.piece, line, offset))
            start = stop
        self._account(block, from_line, block.end.line)

    def _open_shard(self) -> tuple[PairWriter, DocumentRows]:
        """Return the writers of the current shard, new ones if the last shard is closed."""
        if self._pair is None or self._rows is None:
            self._pair = PairWriter(self._folder / shard_name(self.num_shards), self._dtype)
            self._rows = DocumentRows(self._rows_path(self.num_shards), self.num_shards)
        return self._pair, self._rows

    def _rows_path(self, shard: int) -> Path:
        return self._unfinished / f"{shard_name(shard)}.parquet"

    def _account(self, block: EncodedBlock, from_line: int, to_line: int) -> None:
        """Count what happened at the lines `from_line` up to `to_line`."""
        file = block.end.piece
        for event in block.events:
            if from_line <= event.line < to_line:
                self.tally.add(file, event.name, event.count)
                if event.name == "replaced_characters":
                    self.tally.add(file, "replaced_records", 1)
                if event.name == "round_trip_differs":
                    self.tally.add_example(event.name, {"file_number": file, "line": event.line})
        rejects = [reject for reject in block.rejects if from_line <= reject.line < to_line]
        if rejects:
            self._write_rejects(file, rejects)
        self.tally.files.setdefault(str(file), Counter())["lines"] = to_line - 1

    def _write_rejects(self, file: int, rejects: Sequence[Reject]) -> None:
        self.tally.add(file, "rejected", len(rejects))
        for reject in rejects:
            row = {"file": reject.file, "line": reject.line, "byte_offset": reject.offset, "reason": reject.reason}
            # A lone surrogate in a key becomes its JSON escape.
            line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")
            self._rejects.write(line + b"\n")
            self.tally.add_example("rejected", row)

    def _close_shard(self, next_position: Position) -> None:
        """Finish the current pair and its document rows, then note where the next one begins."""
        if self._pair is None or self._rows is None:
            return
        self._rows.close()
        self.num_documents += self._pair.finish().num_documents
        self._pair = self._rows = None
        self.num_shards += 1
        self._rejects.flush()
        os.fsync(self._rejects.fileno())
        state = {
            "shards": self.num_shards,
            "documents": self.num_documents,
            "next": asdict(next_position),
            "rejects_bytes": self._rejects.tell(),
            "tally": vars(self.tally),
        }
        write_atomically(self._unfinished / STATE, json.dumps(state))

    def finish(self, files: Sequence[SourceFile]) -> None:
        """Close the last shard and write `documents.parquet` and, if there are any, `rejects.jsonl`."""
        self._close_shard(Position(len(files)))
        self._rejects.close()
        parts = [self._rows_path(number) for number in range(self.num_shards)]
        join_tables(parts, [file.name for file in files], self._folder / DOCUMENTS)
        if self.tally.counts["rejected"]:
            shutil.copyfile(self._unfinished / REJECTS, self._folder / f"{REJECTS}.tmp")
            (self._folder / f"{REJECTS}.tmp").replace(self._folder / REJECTS)
        # The state goes first: a run killed here begins anew instead of missing what is gone.
        (self._unfinished / STATE).unlink(missing_ok=True)
        shutil.rmtree(self._unfinished)

    def close(self) -> None:
        """Give up, leaving what a resumed run needs."""
        self._rejects.close()
        if self._pair is not None:
            self._pair.close()
