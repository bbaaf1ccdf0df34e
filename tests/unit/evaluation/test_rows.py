"""Windows, batches and the metrics over them, without a model."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.intervals import bootstrap_ratio
from evaluation.perplexity import DocumentScores, by_document, metrics_of
from evaluation.rows import RowScores, batches, padded_batch, rows_of
from evaluation.windows import document_rows
from training.config import IGNORE_INDEX


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 16))
def test_every_token_of_every_document_is_a_target_exactly_once(sizes: list[int], window: int) -> None:
    documents = [np.arange(1, size + 1) for size in sizes]

    rows, owners = document_rows(documents, prefix=0, window=window)

    for number, document in enumerate(documents):
        targets = [
            token
            for row in np.flatnonzero(owners == number)
            for token in rows.tokens[rows.bounds[row] + 1 : rows.bounds[row + 1]]
        ]
        assert targets == list(document)
    assert len(rows) == 0 or rows.lengths.max() <= window


def test_a_window_begins_with_the_token_before_it() -> None:
    rows, _ = document_rows([np.array([5, 6, 7])], prefix=9, window=2)

    assert [list(rows.tokens[rows.bounds[n] : rows.bounds[n + 1]]) for n in range(len(rows))] == [[9, 5, 6], [6, 7]]


@given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(1, 64), st.integers(1, 4))
def test_batches_hold_every_row_once_and_stay_within_their_tokens(
    lengths: list[int], budget: int, multiple: int
) -> None:
    rows = rows_of([list(range(n)) for n in lengths], [1] * len(lengths))

    groups = list(batches(rows, batch_tokens=budget, multiple=multiple))

    assert sorted(int(n) for group in groups for n in group) == list(range(len(lengths)))
    for group in groups:
        inputs, _ = padded_batch(rows, group, multiple)
        assert inputs.shape[1] % multiple == 0
        assert len(group) == 1 or inputs.size <= budget


def test_only_the_continuation_is_scored() -> None:
    rows = rows_of([[1, 2, 3, 4]], [2])

    inputs, targets = padded_batch(rows, np.array([0]), 4)

    assert inputs.tolist() == [[1, 2, 3, 0]]
    assert targets.tolist() == [[IGNORE_INDEX, 3, 4, IGNORE_INDEX]]


def test_groups_are_weighted_by_tokens_and_bytes_and_empty_documents_are_counted_apart() -> None:
    scores = DocumentScores(
        subsets=["a", "a", "b", "b"],
        num_bytes=np.array([4, 8, 2, 0]),
        num_tokens=np.array([2, 4, 1, 0]),
        nats=np.array([2.0, 8.0, 3.0, 0.0]),
        num_greedy=np.array([1, 1, 0, 0]),
    )

    metrics = metrics_of(scores)

    assert metrics["subsets"]["a"]["loss_nats"] == pytest.approx(10 / 6)
    assert metrics["subsets"]["a"]["bits_per_byte"] == pytest.approx(10 / 12 / math.log(2))
    assert metrics["perplexity"] == pytest.approx(math.exp(13 / 7))
    assert (metrics["documents"], metrics["empty_documents"]) == (3, 1)
    assert metrics["bits_per_byte_low"] <= metrics["bits_per_byte"] <= metrics["bits_per_byte_high"]


def test_a_group_without_tokens_has_counts_and_no_ratios() -> None:
    metrics = metrics_of(DocumentScores(["a"], np.array([0]), np.array([0]), np.array([0.0]), np.array([0])))

    assert metrics["tokens"] == 0
    assert "perplexity" not in metrics


def test_rows_of_one_document_are_added_up() -> None:
    scores = RowScores(np.array([-1.0, -2.0, -4.0]), np.array([1, 2, 3]), np.array([0, 1, 1]))

    documents = by_document(scores, np.array([0, 0, 2]), ["a", "a", "b"], np.array([3, 0, 5]))

    assert documents.nats.tolist() == [3.0, 0.0, 4.0]
    assert documents.num_tokens.tolist() == [3, 0, 3]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(7)
    hits = 0
    for seed in range(100):
        size = generator.integers(50, 200, 80).astype(np.float64)
        nats = size * generator.normal(0.7, 0.1, 80)
        low, high = bootstrap_ratio(nats, size, resamples=300, seed=seed)
        hits += low <= 0.7 <= high

    assert 88 <= hits <= 100
