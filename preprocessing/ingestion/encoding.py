"""What a worker does with one block: parse its records, tokenize them, describe each document."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.dataset.indexed_dataset import MAX_SEQUENCE_TOKENS
from preprocessing.reading.blocks import LineBlock, Position, RowBlock
from preprocessing.reading.records import ParsedBlock, RecordFormat, Reject, parse_block
from preprocessing.reading.source_file import SourceFile
from preprocessing.tokenization.engines import Engine, choose_engine
from preprocessing.tokenization.tokenizer import Tokenizer, load_tokenizer

DIGEST_BYTES = 16
NO_SUBSET = "(none)"
CHECKED_LINES = 8  # of each file, besides one document in 256, chosen by its digest


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
        subsets: Only records of these subsets become documents; empty: all.
    """

    tokenizer: str
    form: RecordFormat
    keep_empty: bool
    eod_id: int | None
    bos_id: int | None
    subsets: frozenset[str] = frozenset()


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


def make_encoder(plan: EncodingPlan) -> Callable[[Any], Any]:
    """Return the function that a worker applies to each block."""
    tokenizer = load_tokenizer(plan.tokenizer)
    return partial(encode_block, plan=plan, tokenizer=tokenizer, engine=choose_engine(tokenizer))


def encode_block(
    block: LineBlock | RowBlock | Damage, *, plan: EncodingPlan, tokenizer: Tokenizer, engine: Engine
) -> EncodedBlock | Damage:
    """Parse and tokenize one block; a `Damage` passes through, to keep its place in the order."""
    if isinstance(block, Damage):
        return block
    parsed = parse_block(block, plan.form)
    if plan.keep_empty:
        parsed = parsed.with_empty()
    if plan.subsets:
        parsed = _of_subsets(parsed, plan.subsets)
    events = [Event(*item) for item in parsed.events]
    events += [Event(line, "filtered", reason=reason) for line, reason in parsed.filtered]
    if not plan.keep_empty:
        events += [Event(line, "empty") for line in parsed.empty_lines]
    ids, lengths = engine.encode(parsed.texts)
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise RuntimeError(
            f"{tokenizer.source} gave the id {int(ids.max())}, above its highest {tokenizer.vocab_size - 1}"
        )
    events += _special_tokens(parsed, tokenizer.special_tokens)
    digests = [_digest(text) for text in parsed.texts]
    events += _check_sample(parsed, digests, ids, lengths, tokenizer)
    texts, subsets = parsed.texts, parsed.subsets
    lines, offsets = np.array(parsed.lines, dtype=np.int64), np.array(parsed.offsets, dtype=np.int64)
    if not plan.keep_empty and not lengths.all():
        # A normalizer can make nothing of a text; such a document counts as empty.
        events += [Event(line, "empty") for line in lines[lengths == 0].tolist()]
        keep = np.flatnonzero(lengths).tolist()
        texts, subsets, digests = [texts[n] for n in keep], [subsets[n] for n in keep], [digests[n] for n in keep]
        lines, offsets, lengths = lines[keep], offsets[keep], lengths[keep]
    ids, lengths = _with_bounds(ids, lengths, plan)
    _refuse_too_long(block.end.piece, lines, lengths)
    return EncodedBlock(
        ids=ids.astype(tokenizer.token_dtype),
        lengths=lengths,
        lines=lines,
        offsets=offsets,
        sizes=np.array([_utf8_bytes(text) for text in texts], dtype=np.int64),
        digests=b"".join(digests),
        subsets=subsets,
        rejects=parsed.rejects,
        events=sorted(events, key=lambda event: event.line),
        end=block.end,
        file_bytes_read=block.file_bytes_read,
        engine=engine.name,
    )


def _of_subsets(parsed: ParsedBlock, subsets: frozenset[str]) -> ParsedBlock:
    """Leave the records of other subsets out, each listed by its subset."""
    names = [name or NO_SUBSET for name in parsed.subsets]
    keep = [n for n, name in enumerate(names) if name in subsets]
    if len(keep) == len(names):
        return parsed
    others = [(line, f"subset {name}") for line, name in zip(parsed.lines, names, strict=True) if name not in subsets]
    return replace(
        parsed,
        texts=[parsed.texts[n] for n in keep],
        lines=[parsed.lines[n] for n in keep],
        offsets=[parsed.offsets[n] for n in keep],
        subsets=[parsed.subsets[n] for n in keep],
        filtered=parsed.filtered + others,
    )


def _with_bounds(
    ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64], plan: EncodingPlan
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Put BOS before and EOD after every document."""
    lengths = lengths + (plan.eod_id is not None) + (plan.bos_id is not None)
    result = np.empty(int(lengths.sum()), dtype=np.uint32)
    is_text = np.ones(len(result), dtype=bool)
    ends = np.cumsum(lengths)
    if plan.eod_id is not None:
        result[ends - 1] = plan.eod_id
        is_text[ends - 1] = False
    if plan.bos_id is not None:
        result[ends - lengths] = plan.bos_id
        is_text[ends - lengths] = False
    result[is_text] = ids
    return result, lengths


def _special_tokens(parsed: ParsedBlock, tokens: Sequence[str]) -> list[Event]:
    """Count special tokens that stand in texts as characters; they were encoded as characters."""
    joined = "\n".join(parsed.texts)
    tokens = [token for token in tokens if token in joined]
    if not tokens:
        return []
    counts = (sum(text.count(token) for token in tokens) for text in parsed.texts)
    return [
        Event(line, "special_tokens_in_text", count) for line, count in zip(parsed.lines, counts, strict=True) if count
    ]


def _check_sample(
    parsed: ParsedBlock,
    digests: Sequence[bytes],
    ids: npt.NDArray[np.uint32],
    lengths: npt.NDArray[np.int64],
    tokenizer: Tokenizer,
) -> list[Event]:
    """Decode some documents and compare with their texts; compare the engine with the reference too."""
    events = []
    starts = np.cumsum(lengths) - lengths
    for number, (line, digest) in enumerate(zip(parsed.lines, digests, strict=True)):
        if line > CHECKED_LINES and digest[0]:
            continue
        text = parsed.texts[number]
        found = ids[starts[number] : starts[number] + lengths[number]].tolist()
        if found != tokenizer.encode(text):
            raise RuntimeError(f"{parsed.file}, line {line}: the fast engine differs from the tokenizers library")
        events.append(Event(line, "round_trip_checked"))
        if tokenizer.decode(found) != text:
            events.append(Event(line, "round_trip_differs"))
    return events


def _refuse_too_long(piece: int, lines: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
    if len(lengths) and int(lengths.max()) > MAX_SEQUENCE_TOKENS:
        line = int(lines[lengths.argmax()])
        reason = f"the document has more than {MAX_SEQUENCE_TOKENS} tokens, the format's limit"
        raise BadPieceRecordError(piece, line, reason)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
