"""What is counted while records are read: of a part by its pieces, of a dataset by its files.

Every line is one of LINE_COUNTS. Inside a part, lines and byte offsets count from the first record
of a piece; `Bases` say how much of the file stands before each piece, once all parts are done.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from preprocessing.ingestion.encoding import NO_SUBSET, EncodedBlock, Event
from preprocessing.reading.pieces import Piece

LINE_COUNTS = ("documents", "empty", "filtered", "rejected")
NUM_EXAMPLES = 10


@dataclass
class Tally:
    """Counts as plain data, so that they can be saved.

    Args:
        counts: documents, empty, filtered, rejected, tokens, bytes, and what was mended.
        places: The same, and `lines` and `offset` read so far, by number of the piece (in a part)
            or of the file (in a dataset).
        subsets: documents, tokens, bytes by subset.
        filtered: Records by the reason why they were filtered.
        damaged: By number of the piece or file, why its end is missing.
        examples: The first places of some kinds of event; `piece` or `file` is a number.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, Counter[str]] = field(default_factory=dict)
    subsets: dict[str, Counter[str]] = field(default_factory=dict)
    filtered: Counter[str] = field(default_factory=Counter)
    damaged: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Tally":
        def counters(group: str) -> dict[str, Counter[str]]:
            return {name: Counter(counts) for name, counts in data[group].items()}

        return cls(
            Counter(data["counts"]),
            counters("places"),
            counters("subsets"),
            Counter(data["filtered"]),
            data["damaged"],
            data["examples"],
        )

    def add(self, place: int, name: str, count: int) -> None:
        self.counts[name] += count
        self.places.setdefault(str(place), Counter())[name] += count

    def add_event(self, place: int, event: Event) -> None:
        self.add(place, event.name, event.count)
        if event.name == "filtered":
            self.filtered[event.reason] += event.count
        if event.name == "replaced_characters":
            self.add(place, "replaced_records", 1)
        if event.name == "round_trip_differs":
            self.add_example(event.name, {"piece": place, "line": event.line})

    def add_example(self, kind: str, example: dict[str, Any]) -> None:
        examples = self.examples.setdefault(kind, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(example)

    def add_documents(self, place: int, block: EncodedBlock, rows: slice) -> None:
        """Count the documents `rows` of a block."""
        lengths, sizes = block.lengths[rows], block.sizes[rows]
        self.add(place, "documents", len(lengths))
        self.add(place, "tokens", int(lengths.sum()))
        self.add(place, "bytes", int(sizes.sum()))
        numbers: dict[str, int] = {}
        codes = [numbers.setdefault(subset or NO_SUBSET, len(numbers)) for subset in block.subsets[rows]]
        of_subset = np.array(codes, dtype=np.int64)
        documents = np.bincount(of_subset, minlength=len(numbers)).tolist()
        # Sums in float64 are exact: a block holds far less than 2**53 tokens or bytes.
        tokens = np.bincount(of_subset, weights=lengths, minlength=len(numbers)).tolist()
        sizes_bytes = np.bincount(of_subset, weights=sizes, minlength=len(numbers)).tolist()
        for subset, number in numbers.items():
            counts = self.subsets.setdefault(subset, Counter())
            counts["documents"] += documents[number]
            counts["tokens"] += int(tokens[number])
            counts["bytes"] += int(sizes_bytes[number])

    def reached(self, place: int, *, lines: int, offset: int) -> None:
        """Note how many lines and bytes of a piece were read."""
        counts = self.places.setdefault(str(place), Counter())
        counts["lines"], counts["offset"] = lines, offset


@dataclass(frozen=True)
class Bases:
    """For each piece of a part: its file, and the lines and bytes of that file that stand before it."""

    files: Sequence[int]
    lines: Sequence[int]
    offsets: Sequence[int]

    def placed(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """Turn an example of a part into one of the dataset: number of the file, its true line and byte."""
        piece = example["piece"]
        found = {key: value for key, value in example.items() if key != "piece"}
        if "byte_offset" in found:
            found["byte_offset"] += self.offsets[piece]
        return {**found, "file_number": self.files[piece], "line": found["line"] + self.lines[piece]}


def bases_of(parts: Iterable[tuple[Sequence[Piece], Tally]]) -> list[Bases]:
    """Return the bases of every part, given the pieces and the final counts of all parts in order."""
    before: dict[int, tuple[int, int]] = {}
    result = []
    for pieces, tally in parts:
        lines, offsets = [], []
        for number, piece in enumerate(pieces):
            line, offset = before.get(piece.file, (0, 0))
            lines.append(line)
            offsets.append(offset)
            read: Mapping[str, int] = tally.places.get(str(number), {})
            before[piece.file] = (line + read.get("lines", 0), offset + read.get("offset", 0))
        result.append(Bases([piece.file for piece in pieces], lines, offsets))
    return result


def joined(tallies: Sequence[Tally], bases: Sequence[Bases]) -> Tally:
    """Add up the counts of all parts; pieces become files."""
    whole = Tally()
    for tally, base in zip(tallies, bases, strict=True):
        whole.counts.update(tally.counts)
        whole.filtered.update(tally.filtered)
        for subset, counts in tally.subsets.items():
            whole.subsets.setdefault(subset, Counter()).update(counts)
        for piece, counts in tally.places.items():
            whole.places.setdefault(str(base.files[int(piece)]), Counter()).update(counts)
        for piece, damage in tally.damaged.items():
            whole.damaged.setdefault(str(base.files[int(piece)]), damage)
        for kind, examples in tally.examples.items():
            for example in examples:
                whole.add_example(kind, base.placed(example))
    return whole
