"""An engine of this project: the `tokenizers` library on pieces of documents, each distinct piece once.

Documents are cut where the pre-tokenizer cuts anyway, and the library is asked only for pieces that
were not seen lately: text repeats its words, so most of the work falls away.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from preprocessing.tokenization.byte_level import normalizes
from preprocessing.tokenization.patterns import CL100K_PATTERN, GPT2_PATTERN, QWEN2_PATTERN
from preprocessing.tokenization.reference_engine import Engine, Ids, Lengths, ReferenceEngine, UnusableEngineError
from preprocessing.tokenization.tokenizer import Tokenizer

CACHED_PIECE_CHARACTERS = 64
CACHE_PIECES = 500_000  # about 100 MB with keys, values and table

SAFE_PATTERNS = frozenset({GPT2_PATTERN, CL100K_PATTERN, QWEN2_PATTERN})

# A space before a character that is no white space. In each pattern of SAFE_PATTERNS no match can
# cross such a place: a space is only the first character of a match, or part of a run of white
# space, and a run that precedes \S gives up its last character by (?!\S). No pattern looks back, and
# the end of a piece satisfies (?!\S) just as the space that followed it did.
_CUT = re.compile(r"(?= \S)")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")

# The classes of the patterns, for text that is ASCII. (Python's own \s has \x1c-\x1f besides.)
_ASCII_CLASSES = (
    (r"[^\s\p{L}\p{N}]", r"[^ \t-\rA-Za-z0-9]"),
    (r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]"),
    (r"\p{L}", "[A-Za-z]"),
    (r"\p{N}", "[0-9]"),
    (r"\s", r"[ \t-\r]"),
    (r"\S", r"[^ \t-\r]"),
)


class PieceEngine:
    """The `tokenizers` library on pieces of documents, each distinct piece once.

    ASCII text is cut at every pre-token, other text at the places that are surely between
    pre-tokens. The cache is dropped when it is full.

    Args:
        pattern: Pre-tokenizer pattern of the tokenizer, one of SAFE_PATTERNS.
    """

    name = "pieces"

    def __init__(self, tokenizer: Tokenizer, pattern: str) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, bytes] = {}
        for unicode_class, ascii_class in _ASCII_CLASSES:
            pattern = pattern.replace(unicode_class, ascii_class)
        self._ascii_pre_tokens = re.compile(pattern)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        if len(self._known) > CACHE_PIECES:
            self._known = {}
        known = self._known
        documents = [self._cut(text) for text in texts]
        passing = self._learn([piece for piece in set().union(*documents) if piece not in known])
        find = (known | passing).__getitem__ if passing else known.__getitem__
        encoded = [b"".join(map(find, pieces)) for pieces in documents]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)) // 4
        return np.frombuffer(b"".join(encoded), dtype=np.uint32), lengths

    def _cut(self, text: str) -> list[str]:
        """Cut a text into pieces that are encoded alone: ASCII pre-tokens, and stretches around other characters."""
        pre_tokens = self._ascii_pre_tokens.findall
        if text.isascii():
            return pre_tokens(text)
        pieces: list[str] = []
        done = 0
        for match in _NOT_ASCII.finditer(text):
            if match.start() < done:
                continue
            begin = text.rfind(" ", done, match.start())
            while begin > done and text[begin + 1].isspace():
                begin = text.rfind(" ", done, begin)
            begin = max(begin, done)
            cut = _CUT.search(text, match.end())
            end = cut.start() if cut else len(text)
            pieces += pre_tokens(text, done, begin)
            pieces.append(text[begin:end])
            done = end
        pieces += pre_tokens(text, done)
        return pieces

    def _learn(self, pieces: list[str]) -> dict[str, bytes]:
        """Encode new pieces; return those that are too long to be worth keeping."""
        passing: dict[str, bytes] = {}
        ids, lengths = ReferenceEngine(self._tokenizer).encode(pieces)
        data = ids.tobytes()
        ends = np.cumsum(lengths) * 4
        start = 0
        for piece, end in zip(pieces, ends.tolist(), strict=True):
            (self._known if len(piece) <= CACHED_PIECE_CHARACTERS else passing)[piece] = data[start:end]
            start = end
        return passing


def piece_engine(tokenizer: Tokenizer) -> Engine:
    """Return the engine for a tokenizer whose pieces can be encoded alone.

    Raises:
        UnusableEngineError: It is of another kind.
    """
    pattern = safe_pattern(tokenizer.data)
    if pattern is None:
        raise UnusableEngineError("only byte-level BPE with a known pattern can be encoded by pieces")
    return PieceEngine(tokenizer, pattern)


def safe_pattern(definition: Mapping[str, Any]) -> str | None:
    """Return the pre-tokenizer pattern if encoding pieces gives the ids of the whole text, else None.

    So for byte-level BPE without normalizer whose pattern is one of `SAFE_PATTERNS`, and whose
    added tokens are all special (those are not parsed in text).
    """
    if normalizes(definition) or (definition.get("model") or {}).get("type", "BPE") != "BPE":
        return None
    if any(not token.get("special") for token in definition.get("added_tokens") or []):
        return None
    steps = definition.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    uses_regex = bool(last.get("use_regex", True))
    if len(steps) == 1:
        return GPT2_PATTERN if uses_regex else None
    split = steps[0]
    is_split = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    pattern = (split.get("pattern") or {}).get("Regex")
    return pattern if len(steps) == 2 and is_split and not uses_regex and pattern in SAFE_PATTERNS else None
