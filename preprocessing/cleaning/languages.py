"""The language of a text, by py3langid: 139 languages, a model of 4 MB in the package, no network.

py3langid is Lui and Baldwin's langid.py (2012, ACL system demonstrations) with its model retrained. A text is
told by up to three stretches of it, so that a long document costs no more than a short one.
"""

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from contracts.errors import ConfigError

STRETCH_CHARACTERS = 1000
_VERSIONS = ("0.4.",)  # another model gives other languages, and the fingerprint would not tell


class LanguageFilter:
    """Tells which texts are in the wanted languages.

    Args:
        languages: Codes of ISO 639-1, or -3 where there is none.
        min_score: Probability of the language that a text must have.

    Raises:
        ConfigError: The package is missing, has another model, or does not know a language.
    """

    def __init__(self, languages: Sequence[str], min_score: float) -> None:
        self._identifier = _identifier()
        self._wanted = frozenset(languages)
        self._min_score = min_score
        unknown = sorted(self._wanted - set(self._identifier.labels))
        if unknown:
            raise ConfigError(
                f"clean.languages: {', '.join(unknown)} is not known. "
                f"Known: {', '.join(sorted(self._identifier.labels))}."
            )

    def reason(self, text: str) -> str | None:
        """Say why a text is left out, or None."""
        language, score = self._identifier.classify(sampled(text))
        if score < self._min_score:
            return "language unsure"
        return None if language in self._wanted else f"language {language}"


def sampled(text: str) -> str:
    """Return beginning, middle and end of a long text; a short one whole."""
    size = STRETCH_CHARACTERS
    if len(text) <= 3 * size:
        return text
    middle = (len(text) - size) // 2
    return "\n".join((text[:size], text[middle : middle + size], text[-size:]))


def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise ConfigError("clean.languages needs the package py3langid. Install shardline[clean].") from None
    version = metadata.version("py3langid")
    if not version.startswith(_VERSIONS):
        raise ConfigError(
            f"clean.languages: py3langid {version} has another model than the one these results are known by. "
            "Install shardline[clean], which names the right one."
        )
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
