"""Worker processes: order, errors, death."""

import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_tasks import make_task

from contracts.errors import InputError, RecordError
from preprocessing.ingestion.workers import InProcess, Pool, Processes


def two(make: Callable[..., Any]) -> Pool:
    return Processes(2, make, ("x",))


@pytest.fixture(autouse=True)
def _tasks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(inspect.getfile(make_task)).parent))


@pytest.mark.parametrize("pool", [two, lambda make: InProcess(make, ("x",))])
def test_results_come_in_the_order_of_the_tasks(pool: Callable[[Any], Pool]):
    with pool(make_task) as workers:
        assert list(workers.ordered(range(20))) == [f"x{n}" for n in range(20)]


def test_an_error_of_a_task_is_raised_with_its_fields():
    with pytest.raises(RecordError) as caught, two(make_task) as workers:
        list(workers.ordered([1, "bad", 2]))
    assert (caught.value.file, caught.value.line, caught.value.reason) == ("f", 7, "why")


def test_the_death_of_a_worker_is_an_error_and_no_hang():
    with pytest.raises(InputError, match=f"ended with code -{signal.SIGKILL.value}"), two(make_task) as workers:
        list(workers.ordered([1, 2, "die", 3, 4]))


def test_results_can_come_as_they_are_ready_with_ticks_between():
    with Processes(2, make_task, ("x",)) as workers:
        found = list(workers.completed(range(20), tick_s=0.0001))

    assert sorted(item for item in found if item is not None) == sorted(f"x{n}" for n in range(20))


def test_an_error_of_the_reader_is_raised_and_ends_its_thread():
    def tasks() -> Iterator[int]:
        yield from range(5)
        raise RecordError("f", 3, "the reader says so")

    with pytest.raises(RecordError, match="the reader says so"), two(make_task) as workers:
        list(workers.ordered(tasks()))
    assert "reader" not in {thread.name for thread in threading.enumerate()}


def test_tasks_are_read_no_further_ahead_than_needed():
    taken: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    with Processes(1, make_task, ("x",)) as workers, contextlib.closing(workers.ordered(tasks())) as results:
        assert next(results) == "x0"
        assert len(taken) < 10
