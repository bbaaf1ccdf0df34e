"""The audit of an engine: its ids against the reference's, in the very run that uses them.

Three nets, each with other holes:

- before work, documents spread over the corpus are encoded by both;
- in every block, some documents are (those chosen by their digest, and the first of each piece);
- of a byte-level tokenizer every document is decoded and compared with its text, by a compiled loop
  (480 MB a CPU-second). What it does not see is another segmentation of the same bytes.

A difference anywhere rejects the engine for the whole run.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.tokenization.byte_level import token_bytes
from preprocessing.tokenization.reference_engine import Engine, Ids, Lengths, ReferenceEngine
from preprocessing.tokenization.tokenizer import Tokenizer

WHOLE_CHARACTERS = 2**20  # longer documents are compared in three windows, to bound memory
WINDOW_CHARACTERS = 2**16
COMPILE_ABOVE = 100_000  # tokens; below, the plain loop is done before numba is imported


class EngineRejectedError(Exception):
    """An engine gave other ids than the reference; nothing that it made may be kept.

    Args:
        engine: Its name.
        place: The document: file and line, or what is known of it.
    """

    def __init__(self, engine: str, place: str) -> None:
        super().__init__(engine, place)
        self.engine = engine
        self.place = place

    def __str__(self) -> str:
        return f"the engine {self.engine} differs from the reference tokenizer at {self.place}"


def audited_texts(text: str) -> list[str]:
    """Return what is compared of a document: all of it, or of a long one its head, middle and tail."""
    if len(text) <= WHOLE_CHARACTERS:
        return [text]
    middle = (len(text) - WINDOW_CHARACTERS) // 2
    return [text[:WINDOW_CHARACTERS], text[middle : middle + WINDOW_CHARACTERS], text[-WINDOW_CHARACTERS:]]


def first_difference(engine: Engine, tokenizer: Tokenizer, texts: Sequence[str]) -> int | None:
    """Return the number of the first text that engine and reference encode otherwise; None if there is none."""
    if not texts:
        return None
    ids, lengths = engine.encode(texts)
    expected, expected_lengths = ReferenceEngine(tokenizer).encode(texts)
    if np.array_equal(lengths, expected_lengths) and np.array_equal(ids, expected):
        return None
    ends, expected_ends = np.cumsum(lengths), np.cumsum(expected_lengths)
    for number in range(len(texts)):
        found = ids[ends[number] - lengths[number] : ends[number]]
        right = expected[expected_ends[number] - expected_lengths[number] : expected_ends[number]]
        if not np.array_equal(found, right):
            return number
    raise RuntimeError("two encodings differ as a whole, but in no document; this is a defect")


class ByteCheck:
    """Decodes whole blocks and compares them with their texts, for byte-level tokenizers.

    Args:
        table: Bytes of each id.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._starts = np.zeros(len(table) + 1, dtype=np.uint32)
        np.cumsum([len(item) for item in table], out=self._starts[1:])
        self._bytes = np.frombuffer(b"".join(table) or b"\0", dtype=np.uint8)
        self._table = table

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ByteCheck | None":
        """Return the check for a tokenizer; None if its tokens are no bytes of the text."""
        table = token_bytes(tokenizer)
        return None if table is None else cls(table)

    def differing(self, ids: Ids, lengths: Lengths, text: bytes, sizes: npt.NDArray[np.int64]) -> list[int]:
        """Return the numbers of the documents that do not decode to their text.

        Args:
            ids, lengths: (tokens,) ids of all documents and (documents,) tokens of each.
            text, sizes: UTF-8 of all documents, and (documents,) bytes of each.
        """
        if len(ids) < COMPILE_ABOVE or find_spec("numba") is None:
            return self._differing_plainly(ids, lengths, text, sizes)
        is_wrong = np.zeros(len(lengths), dtype=np.bool_)
        data = np.frombuffer(text or b"\0", dtype=np.uint8)
        _compiled()(ids, lengths, data, sizes, self._bytes, self._starts, is_wrong)
        return [int(number) for number in np.flatnonzero(is_wrong)]

    def _differing_plainly(self, ids: Ids, lengths: Lengths, text: bytes, sizes: npt.NDArray[np.int64]) -> list[int]:
        wrong = []
        token, byte = 0, 0
        for number, (num_tokens, size) in enumerate(zip(lengths.tolist(), sizes.tolist(), strict=True)):
            found = ids[token : token + num_tokens].tolist()
            is_known = all(item < len(self._table) for item in found)
            if not is_known or b"".join(self._table[item] for item in found) != text[byte : byte + size]:
                wrong.append(number)
            token += num_tokens
            byte += size
        return wrong


def _compare(ids: Any, lengths: Any, text: Any, sizes: Any, table: Any, starts: Any, is_wrong: Any) -> None:
    # Unsigned places: numba looks for negative ones otherwise, at a third of the loop's time.
    num_ids = np.uint32(len(starts) - 1)
    token = np.uint64(0)
    end = np.uint64(0)
    for document in range(len(lengths)):
        byte = end
        end += np.uint64(sizes[document])
        last = token + np.uint64(lengths[document])
        while token < last:
            number = ids[token]
            if number >= num_ids:
                break
            start = np.uint64(starts[number])
            size = np.uint64(starts[number + np.uint32(1)]) - start
            if byte + size > end:
                break
            difference = np.uint8(0)
            for place in range(size):
                difference |= table[start + place] ^ text[byte + place]
            if difference:
                break
            byte += size
            token += np.uint64(1)
        if token < last or byte != end:
            is_wrong[document] = True
        token = last


@cache
def _compiled() -> Any:
    import numba

    return numba.njit(cache=True)(_compare)
