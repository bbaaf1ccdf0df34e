"""Gopher's and C4's rules: the thresholds of the papers, and counts against a plain reading of them."""

import random
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocessing.cleaning import quality
from preprocessing.cleaning.quality import c4, gopher

PROSE = (
    "It was the best of times and it was the worst of times, said somebody who had seen both of them. "
    "We have all read that book with great care, and few remember how its second chapter begins. "
    "A river runs to the sea that lies behind those hills, where old ships wait for wind to carry them home. "
    "Nobody in our village could be sure what became of its captain after that stormy winter night."
)


def sentence(number: int) -> str:
    generator = random.Random(number)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(3, 8))) for _ in range(9)]
    return "The " + " ".join(words) + " of it."


def test_prose_passes_both_rules():
    assert gopher(PROSE).reason is None
    assert c4(PROSE) == quality.Verdict(PROSE)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" ".join(PROSE.split()[:49]), "not 50 to 100000 words"),
        ("the of " + "ab " * 60, "mean word length"),
        ("the of " + "abcdefghijklm " * 60, "mean word length"),
        (PROSE + " # x" * 12, "too many hashes"),
        (PROSE + " ..." * 5 + " …" * 4, "too many ellipses"),
        ("\n".join(f"- {sentence(n)}" for n in range(20)), "bullet lines"),
        (PROSE + "\nso it goes on...\nand on...", "ellipsis"),
        (PROSE + " 12345" * 20, "words with a letter"),
        ("zwei drei vier " + " ".join(sentence(n)[4:-7] for n in range(10)), "stop words"),
    ],
)
def test_gopher_leaves_out_what_its_paper_names(text: str, reason: str):
    assert reason in str(gopher(text).reason)


@pytest.mark.parametrize(("hashes", "is_kept"), [(7, True), (8, False)])
def test_the_ratio_of_symbols_may_be_reached_but_not_passed(hashes: int, is_kept: bool):
    words = PROSE.split()[:70]
    for n in range(hashes):
        words[n * 8] = f"#{words[n * 8]}"

    assert (gopher(" ".join(words)).reason is None) is is_kept


def test_repeated_lines_and_paragraphs_are_left_out():
    lines = [sentence(n) for n in range(10)]

    assert gopher("\n".join(lines)).reason is None
    assert "duplicate lines" in str(gopher("\n".join(lines + lines[:5])).reason)  # 5 of 15 lines
    paragraphs = ["\n".join(sentence(n + 10 * k) for n in range(10)) for k in range(3)]
    assert "duplicate paragraphs" in str(gopher("\n\n".join(paragraphs + [sentence(99)] * 4)).reason)


def test_a_phrase_that_comes_back_is_left_out():
    words = [word for n in range(12) for word in (*sentence(n).split()[1:8], "buy", "cheap", "watches")]

    assert "most frequent" in str(gopher("the that " + " ".join(words)).reason)


def plain_top(words: list[str], size: int) -> int:
    counts = Counter(tuple(words[n : n + size]) for n in range(len(words) - size + 1))
    repeated = [(count, sum(map(len, gram))) for gram, count in counts.items() if count > 1]
    return max(count * length for count, length in repeated if count == max(repeated)[0]) if repeated else 0


def plain_duplicates(words: list[str], size: int) -> int:
    seen, covered = set(), set()
    for n in range(len(words) - size + 1):
        gram = tuple(words[n : n + size])
        if gram in seen:
            covered.update(range(n, n + size))
        seen.add(gram)
    return sum(len(words[n]) for n in covered)


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "dd"]), min_size=2, max_size=60))
def test_ngrams_are_counted_as_a_plain_reading_counts_them(words: list[str]):
    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(word, len(numbers)) for word in words], dtype=np.int64)
    before = np.cumsum([0, *map(len, words)])
    found = quality._occurring_twice(np.arange(len(ids) - 1), ids[:-1], ids[1:])
    for size in range(2, 11):
        assert found.top_characters(before, size) == plain_top(words, size)
        assert found.repeated_characters(before, size) == plain_duplicates(words, size)
        found = found.longer(ids)


def test_c4_keeps_sentences_and_drops_other_lines_and_citation_marks():
    text = f"Menu | Home | About\n{PROSE}\nPlease enable Javascript to see this very page.\nIt is so.[1]\nShort line."
    expected = PROSE

    assert c4(text).text == expected
    assert c4(f"{PROSE}[12] See there [citation needed] for it all, and more.").text == (
        f"{PROSE} See there  for it all, and more."
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{PROSE} Lorem ipsum dolor sit amet.", "lorem ipsum"),
        (f"{PROSE} if (x) {{ y; }}.", "curly bracket"),
        ("This is one sentence of it. This is the second one.", "fewer than 3 sentences"),
        ("By visiting this page you accept our cookie policy, don't you?\n" * 5, "fewer than 3 sentences"),
        ("We go on and on and on...\n" * 9, "fewer than 3 sentences"),
    ],
)
def test_c4_leaves_out_what_its_paper_names(text: str, reason: str):
    assert reason in str(c4(text).reason)


@pytest.mark.parametrize(
    "text", ["." * 2**20 + "x", '."' * 2**19, "[" * 2**20, "a " * 2**20, "\n" * 2**20, "数据" * 2**19]
)
def test_hostile_texts_take_no_longer_than_others(text: str):
    started = time.process_time()
    gopher(text)
    c4(text)

    assert time.process_time() - started < 3
