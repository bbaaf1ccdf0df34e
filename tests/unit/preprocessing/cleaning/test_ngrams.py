"""Words, n-grams and evaluation sets."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocessing.cleaning import ngrams
from preprocessing.cleaning.contamination import EvaluationIndex, evaluation_keys
from preprocessing.cleaning.ngrams import WordHasher, ngram_keys
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.source_file import SourceFile


def keys(text: str, size: int = 3) -> list[int]:
    return ngram_keys(WordHasher()(text), size).tolist()


def test_punctuation_case_and_line_breaks_do_not_hide_a_copy():
    assert keys("The quick, brown fox\njumps!") == keys("the quick brown   FOX: jumps")
    assert keys("the quick brown") != keys("quick the brown")


def test_scripts_without_spaces_have_a_word_for_each_character():
    assert len(WordHasher()("数据模型，abc 日本語テスト")) == 4 + 1 + 6
    assert set(keys("我们训练语言模型")) & set(keys("他们训练语言模型"))


def test_a_short_text_is_one_ngram_and_an_empty_one_none():
    assert len(keys("two words")) == 1
    assert keys("two words") == keys("two words", size=2)
    assert keys("!?") == keys("") == []


@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 8))
def test_equal_ngrams_have_equal_keys_and_others_do_not(words: list[str], size: int):
    found = keys(" ".join(words), size)
    width = min(size, len(words))
    grams = [tuple(words[n : n + width]) for n in range(len(words) - width + 1)] if words else []

    assert len(found) == len(grams)
    assert len(set(found)) == len(set(grams))
    assert len(set(zip(found, grams, strict=True))) == len(set(grams))


def test_the_words_of_a_long_text_are_those_of_its_lines(monkeypatch: pytest.MonkeyPatch):
    text = "\n".join(f"line {n} of a long text" for n in range(500))
    whole = WordHasher()(text)
    monkeypatch.setattr(ngrams, "STRETCH_CHARACTERS", 100)
    monkeypatch.setattr(ngrams, "MAX_KNOWN_WORDS", 10)
    hasher = WordHasher()

    assert np.array_equal(hasher(text), whole)
    assert len(hasher) < 100


def test_hashes_are_the_same_on_every_machine():
    assert keys("one two three four") == [8323441920800711432, 15021864574431179037]


@pytest.mark.parametrize("text", ["x" * 2**22, "数" * 2**20, "a " * 2**20, "!" * 2**22])
def test_hostile_texts_take_no_longer_than_others(text: str):
    started = time.process_time()
    keys(text, 13)

    assert time.process_time() - started < 3


def test_overlap_counts_the_ngrams_that_evaluation_sets_have(tmp_path: Path):
    hasher = WordHasher()
    sets = [ngram_keys(hasher(text), 4) for text in ("a b c d e f", "one two three four five")]
    EvaluationIndex.of(sets).save(tmp_path)
    index = EvaluationIndex.load(tmp_path)

    clean = index.overlap(hasher("a b c x d e f and one two three"), 4)
    some = index.overlap(hasher("x One, two, three, four y"), 4)

    assert (clean.shared, clean.total, clean.owner) == (0, 8, -1)
    assert (some.shared, some.total, some.owner) == (1, 3, 1)
    assert index.overlap(hasher("..."), 4).total == 0


def test_evaluation_sets_are_read_by_the_keys_that_hold_text(tmp_path: Path):
    path = tmp_path / "task.jsonl"
    path.write_text(json.dumps({"question": "what is the answer", "answer": "it is forty two"}) + "\n")
    source = SourceFile("task.jsonl", path)
    hasher = WordHasher()

    found = evaluation_keys(source, ("question", "answer", "other"), RecordFormat(), 3)

    assert set(found.tolist()) == {
        key for text in ("what is the answer", "it is forty two") for key in ngram_keys(hasher(text), 3).tolist()
    }
    assert len(evaluation_keys(source, ("text",), RecordFormat(), 3)) == 0
