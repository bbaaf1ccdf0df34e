"""Worker processes: order, errors, death."""

import inspect
import signal
from collections.abc import Callable
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
