"""Words and n-grams of words as 64-bit hashes: what near duplicates and evaluation sets are found by.

Words are rows of letters and digits in lower case, so that punctuation and line breaks do not
hide a copy. Scripts that are written without spaces (Chinese, Japanese, Thai and its neighbours)
give one word for each character. The hashes are the same on every machine.
"""

import hashlib
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

MAX_KNOWN_WORDS = 2**18  # about 40 MB
STRETCH_CHARACTERS = 2**20  # words of a longer text are not all in memory at once

_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    r"\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[^\W_{_UNSPACED}]+|[{_UNSPACED}]")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Keys = npt.NDArray[np.uint64]


class WordHasher(dict[str, int]):
    """Hashes words; remembers those it met, up to a limit."""

    def __call__(self, text: str) -> Keys:
        """Return the hash of every word of a text: (words,)."""
        return np.concatenate([np.empty(0, np.uint64), *map(self._of, _stretches(text))])

    def _of(self, text: str) -> Keys:
        words = _WORD.findall(text.lower())
        if len(self) > MAX_KNOWN_WORDS:
            self.clear()
        return np.fromiter(map(self.__getitem__, words), np.uint64, len(words))

    def __missing__(self, word: str) -> int:
        key = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        self[word] = key
        return key


def _stretches(text: str) -> Iterator[str]:
    """Cut a long text between words; a row of letters longer than a stretch is cut where it stands."""
    start = 0
    while len(text) - start > STRETCH_CHARACTERS:
        limit = start + STRETCH_CHARACTERS
        stop = max(text.rfind(" ", start, limit), text.rfind("\n", start, limit)) + 1
        stop = stop if stop > start else limit
        yield text[start:stop]
        start = stop
    yield text[start:]


def ngram_keys(words: Keys, size: int) -> Keys:
    """Hash every n-gram of words: (words - size + 1,).

    A text of fewer words is one n-gram of all of them, whose length is part of its hash; one without words has none.
    """
    width = min(size, len(words))
    if not width:
        return words
    count = len(words) - width + 1
    result = np.full(count, np.uint64(width), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for n in range(width):
            result = (result ^ words[n : n + count]) * _MULTIPLIER
            result ^= result >> np.uint64(29)
    return result
