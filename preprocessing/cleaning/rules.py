"""The rules that judge one document by itself: length, quality, language, evaluation sets.

A document is left out by the first rule that does not let it pass; rules of quality may mend its
text. Digest and signature, by which duplicates are found, are of the mended text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from preprocessing.cleaning.config import CleanConfig
from preprocessing.cleaning.contamination import EvaluationIndex
from preprocessing.cleaning.languages import LanguageFilter
from preprocessing.cleaning.ngrams import Keys, WordHasher
from preprocessing.cleaning.quality import RULES

STEPS = ("length", "quality", "language", "decontamination", "exact", "near")
"""What may leave a document out, in the order of the stage."""


@dataclass(frozen=True)
class Cause:
    """Why a document is left out: the step, and what that step says."""

    step: str
    reason: str


@dataclass(frozen=True)
class Judged:
    """A document as the rules leave it.

    Args:
        text: Mended.
        cause: Why it is left out, or None.
        words: Hashes of its words, where a later step needs them.
    """

    text: str
    cause: Cause | None
    words: Keys | None = None


class Rules:
    """Judges documents.

    Args:
        folder: Where the n-grams of evaluation sets are.
        set_names: Names of the evaluation sets; none: nothing is compared.

    Raises:
        ConfigError: A package is missing, or a language is unknown.
    """

    def __init__(self, settings: CleanConfig, folder: Path, set_names: Sequence[str]) -> None:
        self._settings = settings
        self._set_names = set_names
        self._languages = None
        if settings.languages:
            self._languages = LanguageFilter(settings.languages, settings.min_language_score)
        self._evaluation = EvaluationIndex.load(folder) if set_names else None
        self._words = WordHasher()
        self._needs_words = self._evaluation is not None or settings.minhash is not None

    def __call__(self, text: str) -> Judged:
        """Judge one document."""
        settings = self._settings
        if len(text) < settings.min_characters:
            return _left_out(text, "length", f"shorter than {settings.min_characters} characters")
        if settings.max_characters is not None and len(text) > settings.max_characters:
            return _left_out(text, "length", f"longer than {settings.max_characters} characters")
        for name in settings.quality:
            verdict = RULES[name](text)
            if verdict.reason is not None:
                return _left_out(text, "quality", verdict.reason)
            text = verdict.text
        if self._languages is not None and (reason := self._languages.reason(text)) is not None:
            return _left_out(text, "language", reason)
        words = self._words(text) if self._needs_words else None
        if self._evaluation is not None and words is not None:
            overlap = self._evaluation.overlap(words, settings.ngram)
            if overlap.shared > settings.max_share * overlap.total:
                owner = self._set_names[overlap.owner]
                return _left_out(text, "decontamination", f"{settings.ngram}-grams of {owner}")
        return Judged(text, None, words)


def mended(text: str, settings: CleanConfig) -> str:
    """Return the text of a document that passed, as the rules of quality mend it."""
    for name in settings.quality:
        text = RULES[name](text).text if name == "c4" else text
    return text


def _left_out(text: str, step: str, reason: str) -> Judged:
    return Judged(text, Cause(step, reason))
