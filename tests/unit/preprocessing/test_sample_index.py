"""Sample indices for any lengths: they read the stream of tokens as it is, and every unit once an epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocessing.samples import kernels
from preprocessing.samples.sample_index import build_sample_index, plan_epochs, shuffled_units

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(sum)


@given(LENGTHS, st.integers(1, 12), st.integers(1, 60), st.integers(0, 2**31))
def test_samples_are_consecutive_windows_of_the_units_in_reading_order(lengths, seq_length, num_samples, seed):
    array = np.array(lengths, dtype=np.int32)
    units = [np.arange(n) + 1000 * number for number, n in enumerate(lengths)]
    built = build_sample_index(array, range(len(lengths)), seq_length=seq_length, num_samples=num_samples, seed=seed)

    stream = np.concatenate([units[unit] for unit in built.document_index])
    starts = np.cumsum([0, *array[built.document_index]])
    assert built.plan.num_samples == (len(stream) - 1) // seq_length >= num_samples
    for k, (position, offset) in enumerate(built.sample_index):
        assert starts[position] + offset == k * seq_length
    epochs = built.document_index.reshape(-1)
    assert sorted(epochs.tolist()) == sorted(list(range(len(lengths))) * built.plan.num_epochs)
    assert sorted(built.shuffle_index.tolist()) == list(range(built.plan.num_samples))


@given(LENGTHS, st.integers(1, 12), st.integers(1, 60))
def test_epochs_are_as_few_as_give_the_samples(lengths, seq_length, num_samples):
    plan = plan_epochs(sum(lengths), seq_length, num_samples)
    assert plan.num_samples >= num_samples
    if plan.num_epochs > 1:
        assert ((plan.num_epochs - 1) * sum(lengths) - 1) // seq_length < num_samples


@given(st.integers(0, 2000), st.integers(0, 2**32 - 1))
def test_the_compiled_shuffle_is_numpys(size: int, seed: int):
    wanted, found = np.arange(size), np.arange(size)
    theirs, ours = np.random.RandomState(seed), np.random.RandomState(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "COMPILE_ABOVE", 0)
        for _ in range(2):
            theirs.shuffle(wanted)
            kernels.legacy_shuffle(found, ours)
    np.testing.assert_array_equal(found, wanted)
    assert ours.randint(2**31) == theirs.randint(2**31)


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=6), st.integers(0, 300))
def test_a_blend_gives_each_dataset_its_share_to_within_one(weights: list[float], size: int):
    shares = np.array(weights) / np.sum(weights)
    chosen, sample = kernels.blend(shares, size)
    drawn = np.bincount(chosen, minlength=len(weights))
    assert (np.abs(drawn - shares * size) <= len(weights)).all()
    for number, count in enumerate(drawn):
        assert sample[chosen == number].tolist() == list(range(count))


@pytest.mark.parametrize("compile_above", [0, 10**12])
def test_more_tokens_than_31_bits_hold(compile_above: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "COMPILE_ABOVE", compile_above)
    lengths = np.full(300, 2**24 + 7, dtype=np.int32)  # 5e9 tokens
    built = build_sample_index(lengths, range(300), seq_length=2**20, num_samples=None, seed=1)
    assert built.plan.num_samples == (300 * (2**24 + 7) - 1) // 2**20 == 4800
    position, offset = built.sample_index[1:].astype(np.int64).T
    np.testing.assert_array_equal(position * (2**24 + 7) + offset, np.arange(1, 4801) * 2**20)


def test_more_samples_than_32_bits_hold():
    from preprocessing.samples import compiled

    plan = plan_epochs(2**34, 2, None)
    assert plan.num_samples == plan.samples_per_epoch == 2**33 - 1
    # A row far beyond 2^32 samples, over documents of 4 tokens that take no memory.
    documents = np.broadcast_to(np.int32(0), (2**32,))
    first = 2**32 + 12_345
    state = np.array([first, first // 2, first // 2 * 4], dtype=np.int64)
    rows = np.empty((1000, 2), dtype=np.int64)
    compiled.starts(np.array([4], dtype=np.int32), documents, 2, 1, state, rows)
    np.testing.assert_array_equal(rows[:, 0] * 4 + rows[:, 1], (first + np.arange(1000)) * 2)
    assert rows[:, 1].max() < 4
    assert state[0] == first + 1000


def test_sequence_numbers_beyond_31_bits_get_more_room():
    plan = plan_epochs(4000, 4, None)
    few, many = (shuffled_units(range(n, n + 1000), plan, np.random.RandomState(3)) for n in (2**31 - 1000, 2**31))
    assert (few.dtype, many.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(few.astype(np.int64) + 1000, many)


def test_chunks_of_rows_join_to_the_whole(monkeypatch: pytest.MonkeyPatch):
    lengths = np.random.default_rng(0).integers(0, 90, 500).astype(np.int32)
    whole = build_sample_index(lengths, range(500), seq_length=7, num_samples=4000, seed=5)
    monkeypatch.setattr(kernels, "COMPILE_ABOVE", 0)
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 64)
    cut = build_sample_index(lengths, range(500), seq_length=7, num_samples=4000, seed=5)
    np.testing.assert_array_equal(whole.sample_index, cut.sample_index)
    np.testing.assert_array_equal(whole.shuffle_index, cut.shuffle_index)
