"""What a worker does with one block: parse its records, tokenize them, describe each document."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError
from preprocessing.dataset.indexed_dataset import MAX_SEQUENCE_TOKENS
from preprocessing.ingestion.encoding import (
    DIGEST_BYTES,
    NO_SUBSET,
    BadPieceRecordError,
    Damage,
    EncodedBlock,
    EncodingPlan,
    Event,
    Sequences,
)
from preprocessing.ingestion.sentences import divided, document_lengths, with_bounds, without_empty
from preprocessing.reading.blocks import Block
from preprocessing.reading.records import ParsedBlock, parse_block
from preprocessing.tokenization.audit import (
    WHOLE_CHARACTERS,
    ByteCheck,
    EngineRejectedError,
    audited_texts,
    first_difference,
)
from preprocessing.tokenization.engines import ENGINES, choose_engine, make_engine
from preprocessing.tokenization.loading import load_tokenizer
from preprocessing.tokenization.reference_engine import Engine, UnusableEngineError
from preprocessing.tokenization.tokenizer import Tokenizer

CHECKED_LINES = 8  # of each piece, besides one document in 256, chosen by its digest
PREFIX_CHARACTERS = 3  # of special tokens; few texts hold "<|e", which many tokens share

Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]


def make_encoder(plan: EncodingPlan) -> Callable[[Any], Any]:
    """Return the function that a worker applies to each block."""
    tokenizer = load_tokenizer(plan.tokenizer)
    try:
        engine = make_engine(plan.engine, tokenizer)
    except (ConfigError, UnusableEngineError):  # another machine of the job may lack the package
        engine = choose_engine(tokenizer)
    return BlockEncoder(plan, tokenizer, engine)


class BlockEncoder:
    """Encodes blocks, and compares what the engine gives with the reference on the way."""

    def __init__(self, plan: EncodingPlan, tokenizer: Tokenizer, engine: Engine) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._engine = engine
        self._byte_check = ByteCheck.of(tokenizer) if ENGINES[engine.name].is_fast else None
        self._special_tokens = _by_prefix(tokenizer.special_tokens)

    def __call__(self, block: Block | Damage) -> EncodedBlock | Damage:
        """Parse and tokenize one block; a `Damage` passes through, to keep its place in the order.

        Raises:
            EngineRejectedError: The engine gave other ids than the reference.
            BadPieceRecordError: A document has more tokens than the format can hold.
        """
        if isinstance(block, Damage):
            return block
        parsed = self._wanted(parse_block(block, self._plan.form))
        texts = parsed.texts
        utf8 = [text.encode() for text in texts]
        sizes = np.fromiter(map(len, utf8), dtype=np.int64, count=len(utf8))
        digests = [hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest() for text in utf8]
        joined = b"".join(utf8)
        events = [*self._events_of(parsed), *self._special_tokens_in(parsed, joined)]
        sequences: Sequences | None = None
        if self._plan.sentences is None and self._plan.form.turns is None:
            ids, lengths = self._encoded(parsed, joined, sizes, digests, events)
        else:
            units, counts = divided(parsed, self._plan.sentences)
            owners = np.repeat(np.arange(len(counts)), counts).tolist()
            unit_sizes = np.fromiter((len(text.encode()) for text in units.texts), np.int64, len(units.texts))
            ids, found = self._encoded(units, joined, unit_sizes, [digests[n] for n in owners], events)
            if parsed.turns:
                _refuse_empty_turns(block.end.piece, units.lines, found)
            sequences = Sequences(*without_empty(found, counts))
            lengths = document_lengths(sequences.lengths, sequences.counts)
        lines, offsets = np.array(parsed.lines, dtype=np.int64), np.array(parsed.offsets, dtype=np.int64)
        subsets = parsed.subsets
        if not self._plan.keep_empty and not lengths.all():
            # A normalizer can make nothing of a text; such a document counts as empty.
            events += [Event(line, "empty") for line in lines[lengths == 0].tolist()]
            keep = np.flatnonzero(lengths)
            subsets, digests = [subsets[n] for n in keep], [digests[n] for n in keep]
            if sequences is not None:  # a document of no token has one empty sentence
                is_kept = np.repeat(lengths > 0, sequences.counts)
                sequences = Sequences(sequences.lengths[is_kept], sequences.counts[keep])
            lines, offsets, sizes, lengths = lines[keep], offsets[keep], sizes[keep], lengths[keep]
        if sequences is not None:
            has_bos, has_eod = self._plan.bos_id is not None, self._plan.eod_id is not None
            bounded = with_bounds(sequences.lengths, sequences.counts, has_bos=has_bos, has_eod=has_eod)
            sequences = Sequences(bounded, sequences.counts)
        ids, lengths = _with_bounds(ids, lengths, self._plan, self._tokenizer.token_dtype)
        end = block.end  # counts the lines
        _refuse_too_long(end.piece, lines, lengths)
        return EncodedBlock(
            ids=ids,
            lengths=lengths,
            lines=lines,
            offsets=offsets,
            sizes=sizes,
            digests=b"".join(digests),
            subsets=subsets,
            rejects=parsed.rejects,
            events=sorted(events, key=lambda event: event.line),
            end=end,
            file_bytes_read=block.file_bytes_read,
            engine=self._engine.name,
            sequences=sequences,
        )

    def _encoded(
        self, parsed: ParsedBlock, joined: bytes, sizes: Lengths, digests: Sequence[bytes], events: list[Event]
    ) -> tuple[Ids, Lengths]:
        """Return the ids of all texts and the number of each; what the audit finds is added to `events`."""
        ids, lengths = self._engine.encode(parsed.texts)
        self._refuse_unknown_ids(ids)
        differing = [] if self._byte_check is None else self._byte_check.differing(ids, lengths, joined, sizes)
        events += self._audit(parsed, digests, ids, lengths, differing)
        return ids, lengths

    def _wanted(self, parsed: ParsedBlock) -> ParsedBlock:
        if self._plan.keep_empty:
            parsed = parsed.with_empty()
        return _of_subsets(parsed, self._plan.subsets) if self._plan.subsets else parsed

    def _events_of(self, parsed: ParsedBlock) -> list[Event]:
        events = [Event(*item) for item in parsed.events]
        events += [Event(line, "filtered", reason=reason) for line, reason in parsed.filtered]
        if not self._plan.keep_empty:
            events += [Event(line, "empty") for line in parsed.empty_lines]
        return events

    def _refuse_unknown_ids(self, ids: Ids) -> None:
        if len(ids) and int(ids.max()) >= self._tokenizer.vocab_size:
            if self._engine.name != "tokenizers":
                raise EngineRejectedError(self._engine.name, f"an id of {int(ids.max())}, above the highest")
            raise RuntimeError(
                f"{self._tokenizer.source} gave the id {int(ids.max())}, above its highest "
                f"{self._tokenizer.vocab_size - 1}"
            )

    def _special_tokens_in(self, parsed: ParsedBlock, joined: bytes) -> list[Event]:
        """Count special tokens that stand in texts as characters; they were encoded as characters."""
        found = [
            token
            for prefix, tokens in self._special_tokens.items()
            if prefix in joined
            for token in tokens
            if token.encode() in joined
        ]
        if not found:
            return []
        counts = (sum(text.count(token) for token in found) for text in parsed.texts)
        return [
            Event(line, "special_tokens_in_text", count)
            for line, count in zip(parsed.lines, counts, strict=True)
            if count
        ]

    def _audit(
        self, parsed: ParsedBlock, digests: Sequence[bytes], ids: Ids, lengths: Lengths, differing: Sequence[int]
    ) -> list[Event]:
        """Compare some documents with the reference, and decode them; `differing` are compared besides.

        Raises:
            EngineRejectedError: A document has other ids.
        """
        sample = [
            number
            for number, (line, digest) in enumerate(zip(parsed.lines, digests, strict=True))
            if not digest[0] or line <= CHECKED_LINES
        ]
        self._compare(parsed, sorted({*sample, *differing}), ids, lengths)
        events = [Event(parsed.lines[number], "round_trip_checked") for number in sample]
        lost = set(differing) if self._byte_check else {n for n in sample if not self._survives(parsed.texts[n])}
        events += [Event(parsed.lines[number], "round_trip_differs") for number in sample if number in lost]
        return events

    def _compare(self, parsed: ParsedBlock, numbers: Sequence[int], ids: Ids, lengths: Lengths) -> None:
        if self._engine.name == "tokenizers":
            return
        ends = np.cumsum(lengths)
        short = [number for number in numbers if len(parsed.texts[number]) <= WHOLE_CHARACTERS]
        found = [ids[ends[number] - lengths[number] : ends[number]] for number in short]
        given = _Given(self._engine.name, found)
        wrong = first_difference(given, self._tokenizer, [parsed.texts[number] for number in short])
        if wrong is not None:
            self._reject(parsed, short[wrong])
        for number in set(numbers) - set(short):
            if first_difference(self._engine, self._tokenizer, audited_texts(parsed.texts[number])) is not None:
                self._reject(parsed, number)

    def _reject(self, parsed: ParsedBlock, number: int) -> None:
        raise EngineRejectedError(self._engine.name, f"{parsed.file}, byte {parsed.offsets[number]} of its piece")

    def _survives(self, text: str) -> bool:
        return all(self._tokenizer.decode(self._tokenizer.encode(part)) == part for part in audited_texts(text))


class _Given:
    """Ids that an engine gave already, in the form of an engine."""

    def __init__(self, name: str, found: Sequence[Ids]) -> None:
        self.name = name
        self._found = found

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        lengths = np.array([len(item) for item in self._found], dtype=np.int64)
        return np.concatenate(self._found), lengths


def _by_prefix(tokens: Sequence[str]) -> dict[bytes, list[str]]:
    groups: dict[bytes, list[str]] = {}
    for token in filter(None, tokens):
        groups.setdefault(token[:PREFIX_CHARACTERS].encode(), []).append(token)
    return groups


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
        turns=[parsed.turns[n] for n in keep] if parsed.turns else [],
        filtered=parsed.filtered + others,
    )


def _with_bounds(
    ids: Ids, lengths: Lengths, plan: EncodingPlan, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], Lengths]:
    """Put BOS before and EOD after every document, in the dataset's token type."""
    has_bos, has_eod = plan.bos_id is not None, plan.eod_id is not None
    result = np.empty(len(ids) + len(lengths) * (has_bos + has_eod), dtype=dtype)
    read = written = 0
    for length in lengths.tolist():
        if has_bos:
            result[written] = plan.bos_id
            written += 1
        result[written : written + length] = ids[read : read + length]
        read += length
        written += length
        if has_eod:
            result[written] = plan.eod_id
            written += 1
    return result, lengths + (has_bos + has_eod)


def _refuse_empty_turns(piece: int, lines: Sequence[int], lengths: Lengths) -> None:
    if len(lengths) and not lengths.all():
        line = lines[int(np.flatnonzero(lengths == 0)[0])]
        raise BadPieceRecordError(piece, line, "a turn of the conversation gives no token with this tokenizer")


def _refuse_too_long(piece: int, lines: npt.NDArray[np.int64], lengths: Lengths) -> None:
    if len(lengths) and int(lengths.max()) > MAX_SEQUENCE_TOKENS:
        line = int(lines[lengths.argmax()])
        reason = f"the document has more than {MAX_SEQUENCE_TOKENS} tokens, the format's limit"
        raise BadPieceRecordError(piece, line, reason)
