"""Rules that tell text from what is no text: Gopher's and C4's, with the thresholds of their papers.

Gopher: Rae et al. 2021, arXiv 2112.11446, appendix A.1.1: the quality filter, and the repetition removal
of table A1. C4: Raffel et al. 2020, arXiv 1910.10683, section 2.2 (without its list of bad words and its
deduplication of three-sentence spans). Both were made for English web pages: they drop most code and
most text in other languages.

What Gopher's paper leaves open is done as in datatrove (FineWeb, Penedo et al. 2024, arXiv 2406.17557):
words stand between spaces; of what is repeated the first occurrence does not count. Shares of
n-grams are of the characters in words, without the spaces between them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MIN_WORDS, MAX_WORDS = 50, 100_000
MIN_MEAN_WORD, MAX_MEAN_WORD = 3, 10  # characters
MAX_SYMBOL_RATIO = 0.1  # of # or ellipses to words
MAX_BULLET_LINES, MAX_ELLIPSIS_LINES = 0.9, 0.3
MIN_ALPHABETIC_WORDS = 0.8
STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
MIN_STOP_WORDS = 2

MAX_DUPLICATE_LINES, MAX_DUPLICATE_LINE_CHARACTERS = 0.30, 0.20
MAX_DUPLICATE_PARAGRAPHS, MAX_DUPLICATE_PARAGRAPH_CHARACTERS = 0.30, 0.20
MAX_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}  # share of characters in the most frequent n-gram of words
MAX_DUPLICATE_NGRAM = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}  # in n-grams that stood before

C4_MIN_SENTENCES, C4_MIN_LINE_WORDS = 3, 5
C4_ENDINGS = (".", "!", "?", '"', "”")
C4_POLICY = (
    *("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies"),
    "javascript",
)
C4_CITATION = re.compile(r"\[\d{0,6}\]|\[(?:edit|citation needed)\]")
# A row of marks is looked at once, from its beginning: a million dots are no slower than other text.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”)]*+(?=\s|$)")
_BULLETS = ("•", "‣", "▪", "◦", "●", "-", "*", "–")
_ELLIPSES = ("...", "…")
_PARAGRAPH = re.compile(r"\n{2,}")


@dataclass(frozen=True)
class Verdict:
    """What a rule says of a document: its text, perhaps mended, and why it is left out, or None."""

    text: str
    reason: str | None = None


def gopher(text: str) -> Verdict:
    """Apply Gopher's quality filter and its repetition removal."""
    words = text.split(None, MAX_WORDS)  # the rest of a longer text stays in one: it is left out anyway
    return Verdict(text, _gopher_quality(text, words) or _gopher_repetition(text, words))


def c4(text: str) -> Verdict:
    """Apply C4's rules: citation marks and lines that are no sentences go, then pages too short or no prose."""
    lowered = text.lower()
    if "lorem ipsum" in lowered:
        return Verdict(text, "c4: lorem ipsum")
    if "{" in text:
        return Verdict(text, "c4: curly bracket")
    lines = C4_CITATION.sub("", text).splitlines() if "[" in text else text.splitlines()
    mended = "\n".join(line for line in lines if _is_c4_line(line))
    if len(_SENTENCE_END.findall(mended)) < C4_MIN_SENTENCES:
        return Verdict(text, f"c4: fewer than {C4_MIN_SENTENCES} sentences")
    return Verdict(mended)


RULES: dict[str, Callable[[str], Verdict]] = {"gopher": gopher, "c4": c4}


def _is_c4_line(line: str) -> bool:
    stripped = line.strip()
    if not stripped.endswith(C4_ENDINGS) or stripped.endswith(_ELLIPSES) or len(stripped.split()) < C4_MIN_LINE_WORDS:
        return False
    lowered = stripped.lower()
    return not any(phrase in lowered for phrase in C4_POLICY)


def _gopher_quality(text: str, words: Sequence[str]) -> str | None:
    if not MIN_WORDS <= len(words) <= MAX_WORDS:
        return f"gopher: not {MIN_WORDS} to {MAX_WORDS} words"
    mean = sum(map(len, words)) / len(words)
    if not MIN_MEAN_WORD <= mean <= MAX_MEAN_WORD:
        return f"gopher: mean word length not {MIN_MEAN_WORD} to {MAX_MEAN_WORD}"
    if text.count("#") > MAX_SYMBOL_RATIO * len(words):
        return "gopher: too many hashes"
    if sum(map(text.count, _ELLIPSES)) > MAX_SYMBOL_RATIO * len(words):
        return "gopher: too many ellipses"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if sum(line.startswith(_BULLETS) for line in lines) > MAX_BULLET_LINES * len(lines):
        return "gopher: too many bullet lines"
    if sum(line.endswith(_ELLIPSES) for line in lines) > MAX_ELLIPSIS_LINES * len(lines):
        return "gopher: too many lines end in an ellipsis"
    enough = MIN_ALPHABETIC_WORDS * len(words)
    # Words of letters alone are counted first: mostly they are enough, and that is ten times as fast.
    if sum(map(str.isalpha, words)) < enough and sum(any(map(str.isalpha, word)) for word in words) < enough:
        return "gopher: too few words with a letter"
    if len(STOP_WORDS.intersection(map(str.lower, words))) < MIN_STOP_WORDS:
        return "gopher: fewer than two stop words"
    return None


def _gopher_repetition(text: str, words: Sequence[str]) -> str | None:
    lines = [line for line in text.split("\n") if line.strip()]
    paragraphs = [part for part in _PARAGRAPH.split(text) if part.strip()]
    for name, parts, max_count, max_characters in (
        ("line", lines, MAX_DUPLICATE_LINES, MAX_DUPLICATE_LINE_CHARACTERS),
        ("paragraph", paragraphs, MAX_DUPLICATE_PARAGRAPHS, MAX_DUPLICATE_PARAGRAPH_CHARACTERS),
    ):
        repeated = _repeated(parts)
        if len(repeated) > max_count * len(parts):
            return f"gopher: too many duplicate {name}s"
        if sum(map(len, repeated)) > max_characters * len(text):
            return f"gopher: too many characters in duplicate {name}s"
    return _gopher_ngrams(words)


def _repeated(parts: Sequence[str]) -> list[str]:
    """Return the parts that stood before."""
    seen: set[str] = set()
    repeated = []
    for part in parts:
        if part in seen:
            repeated.append(part)
        seen.add(part)
    return repeated


@dataclass(frozen=True)
class _Ngrams:
    """The n-grams of one size that occur more than once.

    Args:
        starts: (occurrences,) number of the first word of each, ascending.
        codes: (occurrences,) equal for equal n-grams.
    """

    starts: npt.NDArray[np.int64]
    codes: npt.NDArray[np.int64]

    def longer(self, words: npt.NDArray[np.int64]) -> "_Ngrams":
        """Return the n-grams of one word more; each begins with one of these, and its rest is one too."""
        is_followed = np.zeros(len(words) + 1, dtype=bool)
        is_followed[self.starts] = True
        follows = np.zeros(len(words) + 1, dtype=np.int64)
        follows[self.starts] = self.codes
        keep = is_followed[self.starts + 1]
        return _occurring_twice(self.starts[keep], self.codes[keep], follows[self.starts[keep] + 1])

    def top_characters(self, before: npt.NDArray[np.int64], size: int) -> int:
        """Return the characters in all occurrences of the most frequent, the longest of those that are equally so."""
        if not len(self.codes):
            return 0
        counts = np.bincount(self.codes)
        often = self.starts[counts[self.codes] == counts.max()]
        return int(counts.max()) * int((before[often + size] - before[often]).max())

    def repeated_characters(self, before: npt.NDArray[np.int64], size: int) -> int:
        """Return the characters of words in n-grams that stood before; a word in two of them counts once."""
        if not len(self.codes):
            return 0
        _, first = np.unique(self.codes, return_index=True)
        is_repeat = np.ones(len(self.codes), dtype=bool)
        is_repeat[first] = False
        starts = self.starts[is_repeat]
        covered = np.concatenate([[0], starts[:-1] + size])  # ascending, as starts are
        return int((before[starts + size] - before[np.maximum(starts, covered)]).sum())


def _occurring_twice(
    starts: npt.NDArray[np.int64], first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]
) -> _Ngrams:
    """Keep the pairs that occur more than once, and number them."""
    if not len(starts):
        return _Ngrams(starts, first)
    pairs = first * (int(second.max()) + 1) + second
    _, codes, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    keep = counts[codes] > 1
    return _Ngrams(starts[keep], codes[keep])


class _Numbered(dict[str, int]):
    """Numbers words in the order in which they are met."""

    def __missing__(self, word: str) -> int:
        self[word] = len(self)
        return self[word]


def _gopher_ngrams(words: Sequence[str]) -> str | None:
    ids = np.fromiter(map(_Numbered().__getitem__, words), np.int64, len(words))
    before = np.concatenate([[0], np.cumsum(np.fromiter(map(len, words), np.int64, len(words)))])
    characters = int(before[-1])
    found = _occurring_twice(np.arange(len(ids) - 1), ids[:-1], ids[1:])
    for size in range(2, max(MAX_DUPLICATE_NGRAM) + 1):
        if size in MAX_TOP_NGRAM and found.top_characters(before, size) > MAX_TOP_NGRAM[size] * characters:
            return f"gopher: too many characters in the most frequent {size}-gram"
        limit = MAX_DUPLICATE_NGRAM.get(size, 1.0)
        if found.repeated_characters(before, size) > limit * characters:
            return f"gopher: too many characters in duplicate {size}-grams"
        if not len(found.starts):
            return None
        found = found.longer(ids)
    return None
