"""Sample indices for any lengths: they read the stream of tokens as it is, and every unit once an epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocessing.samples import kernels
from preprocessing.samples.sample_index import build_sample_index, plan_epochs

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
