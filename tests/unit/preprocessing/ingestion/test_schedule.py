"""How workers are divided among parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocessing.ingestion.executors import Wave, schedule


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(0, 70))
def test_every_part_runs_once_and_no_more_processes_than_workers(sizes: list[int], workers: int):
    waves = schedule(dict(enumerate(sizes)), workers)

    assert sorted(number for wave in waves for number in wave.parts) == list(range(len(sizes)))
    for wave in waves:
        assert 1 <= wave.lanes <= max(1, workers)
        assert wave.lanes * max(1, wave.workers) <= max(1, workers)
        assert list(wave.parts) == sorted(wave.parts, key=lambda number: -sizes[number]) or workers == 0


@pytest.mark.parametrize(
    ("sizes", "workers", "waves"),
    [
        ([5, 5], 0, [Wave((0, 1), 1, 0)]),  # in this process
        ([5], 8, [Wave((0,), 1, 8)]),  # one long stream is fed to all workers
        ([5] * 8, 8, [Wave(tuple(range(8)), 8, 0)]),  # whole parts, one worker each
        ([5] * 30, 64, [Wave(tuple(range(30)), 30, 2)]),  # the Pile's files, two workers each
        ([100, 1, 1, 1], 4, [Wave((0,), 1, 4), Wave((1, 2, 3), 3, 0)]),  # the long one first, by all
        ([7, 9], 1, [Wave((1, 0), 1, 1)]),
    ],
)
def test_workers_go_where_the_work_is(sizes: list[int], workers: int, waves: list[Wave]):
    assert schedule(dict(enumerate(sizes)), workers) == waves
