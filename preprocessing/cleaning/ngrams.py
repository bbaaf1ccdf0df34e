"""N-grams shared with evaluation sets: which documents hold passages that models are measured on.

GPT-3 removed what shares a 13-gram of words with a benchmark (Brown et al. 2020, arXiv 2005.14165,
appendix C); 8-grams find more and err more (PaLM, Chowdhery et al. 2022, arXiv 2204.02311, section 8, asks
for a share of 8-grams). Words are what stands between characters that are neither letter nor digit, in
lower case, so that punctuation and line breaks do not hide a copy.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"[^\W_]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Overlap:
    """How much of a document is in the evaluation sets.

    Args:
        shared: Its n-grams that are there.
        total: All its n-grams.
        name: Set of the first that is.
    """

    shared: int
    total: int
    name: str | None


class NgramIndex:
    """The n-grams of evaluation sets, as 64-bit hashes.

    Args:
        size: Words in an n-gram.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._names: list[str] = []
        self._keys: list[Keys] = []
        self._sets: list[npt.NDArray[np.int32]] = []
        self._sorted: Keys = np.empty(0, np.uint64)
        self._owners: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def add(self, name: str, texts: Iterable[str]) -> int:
        """Add the texts of one set; return how many n-grams they have. Shorter texts count as one n-gram."""
        found = [ngram_keys(words_of(text), self.size, keeps_short=True) for text in texts]
        keys = np.unique(np.concatenate([np.empty(0, np.uint64), *found]))
        self._names.append(name)
        self._keys.append(keys)
        self._sets.append(np.full(len(keys), len(self._names) - 1, dtype=np.int32))
        joined, owners = np.concatenate(self._keys), np.concatenate(self._sets)
        order = np.argsort(joined, kind="stable")
        self._sorted, self._owners = joined[order], owners[order]
        return len(keys)

    def __len__(self) -> int:
        return len(self._sorted)

    def overlap(self, text: str) -> Overlap:
        """Compare one document."""
        keys = ngram_keys(words_of(text), self.size, keeps_short=True)
        if not len(keys) or not len(self._sorted):
            return Overlap(0, len(keys), None)
        places = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        is_shared = self._sorted[places] == keys
        if not is_shared.any():
            return Overlap(0, len(keys), None)
        first = int(places[int(is_shared.argmax())])
        return Overlap(int(is_shared.sum()), len(keys), self._names[int(self._owners[first])])


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def ngram_keys(words: Sequence[str], size: int, *, keeps_short: bool = False) -> Keys:
    """Hash every n-gram of words: (len(words) - size + 1,).

    Args:
        keeps_short: A text of fewer words is one n-gram of all of them, not none; its length is part of its hash.
    """
    if not words:
        return np.empty(0, np.uint64)
    known: dict[str, int] = {}
    hashes = np.fromiter((_word_key(word, known) for word in words), dtype=np.uint64, count=len(words))
    width = size
    if len(words) < size:
        if not keeps_short:
            return np.empty(0, np.uint64)
        width = len(words)
    count = len(words) - width + 1
    with np.errstate(over="ignore"):
        result = np.full(count, np.uint64(width), dtype=np.uint64)
        for n in range(width):
            result = (result ^ hashes[n : n + count]) * _MULTIPLIER
            result ^= result >> np.uint64(29)
    return result


def _word_key(word: str, known: dict[str, int]) -> int:
    key = known.get(word)
    if key is None:
        key = known[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
    return key
