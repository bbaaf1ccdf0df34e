"""The language of texts."""

import sys
import time

import pytest

from contracts.errors import ConfigError
from preprocessing.cleaning import languages
from preprocessing.cleaning.languages import LanguageFilter, sampled

TEXTS = {
    "en": "The committee has not yet decided whether the new bridge should be built across the river this year.",
    "de": "Der Ausschuss hat noch nicht entschieden, ob die neue Brücke in diesem Jahr über den Fluss gebaut wird.",
    "fr": "Le comité n'a pas encore décidé si le nouveau pont doit être construit cette année sur la rivière.",
    "zh": "委员会尚未决定今年是否应该在河上修建新桥，因为资金还没有到位。",
    "ru": "Комитет ещё не решил, следует ли в этом году строить новый мост через реку.",
}


@pytest.fixture(scope="module")
def english() -> LanguageFilter:
    return LanguageFilter(["en"], 0.5)


def test_only_texts_in_the_wanted_languages_pass(english: LanguageFilter):
    assert {code: english.reason(text) for code, text in TEXTS.items()} == {
        code: None if code == "en" else f"language {code}" for code in TEXTS
    }


def test_a_text_of_no_language_is_unsure(english: LanguageFilter):
    assert english.reason("12 34") == "language unsure"


def test_a_long_text_is_told_by_stretches_of_it(english: LanguageFilter):
    started = time.process_time()

    assert english.reason(TEXTS["en"] * 300_000) is None
    assert time.process_time() - started < 1
    assert sampled("short") == "short"
    assert len(sampled("x" * 10_000)) == 3002


def test_an_unknown_language_and_another_model_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"clean\.languages: english, xx is not known\. Known: ace, af, .*zh"):
        LanguageFilter(["en", "xx", "english"], 0.5)
    monkeypatch.setattr(languages, "_VERSIONS", ("9.",))
    with pytest.raises(ConfigError, match=r"py3langid 0\.4.* has another model"):
        LanguageFilter(["en"], 0.5)


def test_without_the_package_the_cure_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)

    with pytest.raises(ConfigError, match=r"py3langid\. Install shardline\[clean\]"):
        LanguageFilter(["en"], 0.5)
