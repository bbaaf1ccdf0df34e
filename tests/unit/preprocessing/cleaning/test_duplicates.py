"""Exact and near duplicates against what is true of all pairs."""

import itertools
import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import ConfigError
from preprocessing.cleaning import duplicates, signatures
from preprocessing.cleaning.config import MinHashConfig
from preprocessing.cleaning.duplicates import KEPT, Clusters, exact_duplicates, near_duplicates
from preprocessing.cleaning.ngrams import WordHasher, ngram_keys
from preprocessing.cleaning.signatures import Signer, band_keys

CONFIG = MinHashConfig()


def in_parts(rows: np.ndarray, bounds: list[int]) -> list[np.ndarray]:
    return np.split(rows, sorted(min(bound, len(rows)) for bound in bounds))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=40), st.lists(st.integers(0, 40), max_size=3))
def test_the_first_of_equal_digests_stays_however_the_corpus_is_cut(rows: list[tuple[int, int]], bounds: list[int]):
    table = np.array(rows, dtype=np.uint64).reshape(-1, 2)

    found = exact_duplicates(in_parts(table, bounds)).tolist()

    assert found == [KEPT if rows.index(row) == n else rows.index(row) for n, row in enumerate(rows)]


def test_many_small_groups_find_what_one_finds(monkeypatch: pytest.MonkeyPatch):
    generator = np.random.default_rng(1)
    table = generator.integers(0, 50, (1000, 2)).astype(np.uint64)
    signed = generator.integers(0, 2, (1000, 12)).astype(np.uint16)
    config = MinHashConfig(permutations=12, bands=3, threshold=0.8)
    whole = exact_duplicates([table]), near_duplicates([signed], np.ones(1000, bool), config)
    monkeypatch.setattr(duplicates, "GROUP_DOCUMENTS", 90)
    monkeypatch.setattr(duplicates, "ROWS_AT_ONCE", 64)

    parts = np.split(table, [100, 350]), np.split(signed, [100, 350])

    assert np.array_equal(exact_duplicates(parts[0]), whole[0])
    assert np.array_equal(near_duplicates(parts[1], np.ones(1000, bool), config), whole[1])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_clusters_are_the_connected_documents_known_by_their_first(pairs: list[tuple[int, int]]):
    clusters = Clusters(21)
    for one, other in pairs:
        clusters.join(one, other)
    expected = list(range(21))
    for _ in range(21):
        for one, other in pairs:
            expected[one] = expected[other] = min(expected[one], expected[other])

    assert clusters.roots(np.arange(21)).tolist() == expected


def variants(generator: random.Random, count: int) -> list[str]:
    """Documents of 150 words, and for each several with 1 to 90 words changed."""
    vocabulary = [f"word{n}" for n in range(5000)]
    documents = []
    for _ in range(count):
        base = generator.choices(vocabulary, k=150)
        documents.append(base)
        for changed in (1, 3, 10, 30, 90):
            other = list(base)
            for place in generator.sample(range(150), changed):
                other[place] = generator.choice(vocabulary)
            documents.append(other)
    return [" ".join(words) for words in documents]


def test_near_duplicates_are_found_and_others_are_not():
    documents = variants(random.Random(5), 60)
    hasher = WordHasher()
    words = [hasher(text) for text in documents]
    sets = [set(ngram_keys(item, CONFIG.ngram).tolist()) for item in words]
    signed = Signer(CONFIG)(words)

    found = near_duplicates([signed], np.ones(len(documents), bool), CONFIG)

    cluster = np.where(found == KEPT, np.arange(len(found)), found)
    similar = dissimilar = missed = wrong = 0
    for one, other in itertools.combinations(range(len(documents)), 2):
        jaccard = len(sets[one] & sets[other]) / len(sets[one] | sets[other])
        if jaccard >= 0.85:
            similar += 1
            missed += cluster[one] != cluster[other]
        elif jaccard < 0.3:
            dissimilar += 1
            wrong += cluster[one] == cluster[other]
    assert similar > 60
    assert missed == 0
    assert (dissimilar > 50_000, wrong) == (True, 0)


def test_signatures_estimate_the_jaccard_similarity():
    generator = np.random.default_rng(2)
    signer = Signer(MinHashConfig(ngram=1, permutations=1000, bands=10))
    for shared in (100, 500, 900):
        words = generator.integers(0, 2**63, 2000 - shared).astype(np.uint64)
        one, other = signer([words[:1000], words[1000 - shared :]])
        assert float((one == other).mean()) == pytest.approx(shared / (2000 - shared), abs=0.05)


def test_documents_without_words_are_not_alike():
    hasher = WordHasher()
    signed = Signer(CONFIG)([hasher(text) for text in ("!!!", "???", "same two", "Same, two!")])

    assert near_duplicates([signed], np.ones(4, bool), CONFIG).tolist() == [KEPT, KEPT, KEPT, 2]


def test_a_huge_group_of_one_band_takes_bounded_time():
    signed = np.random.default_rng(3).integers(0, 2**16, (50_000, 12)).astype(np.uint16)
    signed[:, :4] = 7  # one band is equal in all of them

    found = near_duplicates(
        [signed], np.ones(len(signed), bool), MinHashConfig(permutations=12, bands=3, threshold=0.9)
    )

    assert (found == KEPT).all()


def test_signatures_and_bands_are_the_same_on_every_machine():
    signed = Signer(CONFIG)([WordHasher()("one two three four five six")])

    assert signed[0, :4].tolist() == [13571, 13128, 44330, 23240]
    assert band_keys(signed, 0, CONFIG.bands).tolist() == [11069012455178179766]


def test_another_algorithm_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signatures, "ALGORITHM", 99)

    with pytest.raises(ConfigError, match=r"algorithm 2.*Install shardline\[clean\]"):
        Signer(CONFIG)


def test_without_the_package_the_cure_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rensa", None)

    with pytest.raises(ConfigError, match=r"clean\.minhash needs the package rensa\. Install shardline\[clean\]"):
        Signer(CONFIG)
