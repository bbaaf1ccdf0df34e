"""Rules that tell text from what is no text: Gopher's and C4's, with the thresholds of their papers.

Gopher: Rae et al. 2021, arXiv 2112.11446, appendix A.1.1: the quality filter, and the repetition removal
of table A1. C4: Raffel et al. 2020, arXiv 1910.10683, section 2.2 (without its list of bad words and its
deduplication of three-sentence spans). Both were made for English web pages.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
MAX_DUPLICATE_NGRAM = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}  # in n-grams that occur twice

C4_MIN_SENTENCES, C4_MIN_LINE_WORDS = 3, 5
C4_ENDINGS = (".", "!", "?", '"', "”")
C4_POLICY = (
    *("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies"),
    "javascript",
)
_SENTENCE_END = re.compile(r"[.!?]+[\"'”)]*(?=\s|$)")
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
    words = text.split()
    return Verdict(text, _gopher_quality(text, words) or _gopher_repetition(text, words))


def c4(text: str) -> Verdict:
    """Apply C4's rules: lines that are no sentences go, then pages that are too short or no prose."""
    lowered = text.lower()
    if "lorem ipsum" in lowered:
        return Verdict(text, "c4: lorem ipsum")
    if "{" in text:
        return Verdict(text, "c4: curly bracket")
    kept = [line for line in text.splitlines() if _is_c4_line(line)]
    mended = "\n".join(kept)
    if len(_SENTENCE_END.findall(mended)) < C4_MIN_SENTENCES:
        return Verdict(text, f"c4: fewer than {C4_MIN_SENTENCES} sentences")
    return Verdict(mended if len(kept) < len(text.splitlines()) else text)


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
    if sum(any(map(str.isalpha, word)) for word in words) < MIN_ALPHABETIC_WORDS * len(words):
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
    characters = sum(map(len, words))
    for size, limit in MAX_TOP_NGRAM.items():
        if _top_ngram_characters(words, size) > limit * characters:
            return f"gopher: too many characters in the most frequent {size}-gram"
    for size, limit in MAX_DUPLICATE_NGRAM.items():
        if _duplicate_ngram_characters(words, size) > limit * characters:
            return f"gopher: too many characters in duplicate {size}-grams"
    return None


def _repeated(parts: Sequence[str]) -> list[str]:
    """Return the parts that stood before."""
    seen: set[str] = set()
    repeated = []
    for part in parts:
        if part in seen:
            repeated.append(part)
        seen.add(part)
    return repeated


def _ngrams(words: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[n:] for n in range(size)), strict=False))


def _top_ngram_characters(words: Sequence[str], size: int) -> int:
    """Return the characters in all occurrences of the most frequent n-gram; 0 if none occurs twice."""
    counts = Counter(_ngrams(words, size))
    if not counts:
        return 0
    gram, count = max(counts.items(), key=lambda item: (item[1], sum(map(len, item[0]))))
    return count * sum(map(len, gram)) if count > 1 else 0


def _duplicate_ngram_characters(words: Sequence[str], size: int) -> int:
    """Return the characters of words in n-grams that stood before; words in two of them count once."""
    seen: set[tuple[str, ...]] = set()
    total = covered = 0
    for start, gram in enumerate(_ngrams(words, size)):
        if gram in seen:
            first = max(start, covered)
            total += sum(map(len, words[first : start + size]))
            covered = start + size
        seen.add(gram)
    return total
