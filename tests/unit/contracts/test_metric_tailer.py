import threading
import time
from pathlib import Path

import pytest
from small_artifacts import metric_lines

from contracts.following import MetricTailer
from contracts.tracking import Number, RunView, TrackingError

RUN = RunView("run", "RUNNING", {}, {}, frozenset(), frozenset())


class RecordingTracker:
    """Stands for MLflow: keeps numbers, and fails or stalls on demand."""

    def __init__(self) -> None:
        self.numbers: list[Number] = []
        self.batches: list[int] = []
        self.tags: dict[str, str] = {}
        self.is_down = False
        self.stall = threading.Event()
        self.stall.set()

    def log_numbers(self, run_id: str, numbers: list[Number]) -> None:
        self.stall.wait(30)
        if self.is_down:
            raise TrackingError("down")
        self.numbers += numbers
        self.batches.append(len(numbers))

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self.tags.update(tags)

    def steps(self) -> list[int]:
        return [number.step for number in self.numbers if number.key == "train/loss_nats"]


@pytest.fixture
def tracker() -> RecordingTracker:
    return RecordingTracker()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def follow(path: Path, tracker: RecordingTracker, run: RunView = RUN) -> MetricTailer:
    return MetricTailer(path, tracker, run, interval_s=0.02).start()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within 5 s"
        time.sleep(0.01)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_lines_arrive_while_the_file_grows(path: Path, tracker: RecordingTracker):
    tailer = follow(path, tracker)  # the file does not exist yet
    append(path, metric_lines(3))
    wait_for(lambda: tracker.steps() == [1, 2, 3])
    append(path, metric_lines(2, first=4))

    assert tailer.close() == 0
    assert tracker.steps() == [1, 2, 3, 4, 5]
    assert tracker.tags["shardline.metrics_step"] == "5"


def test_a_half_written_line_waits_for_its_rest(path: Path, tracker: RecordingTracker):
    text = metric_lines(2)
    tailer = follow(path, tracker)
    append(path, text[:-10])
    wait_for(lambda: tracker.steps() == [1])
    append(path, text[-10:])

    tailer.close()

    assert tracker.steps() == [1, 2]


def test_a_dead_server_loses_nothing_when_it_comes_back(path: Path, tracker: RecordingTracker):
    tracker.is_down = True
    append(path, metric_lines(3))
    tailer = follow(path, tracker)
    wait_for(lambda: tailer.error is not None)
    append(path, metric_lines(2, first=4))
    tracker.is_down = False

    assert tailer.close() == 0
    assert tracker.steps() == [1, 2, 3, 4, 5]


def test_the_lines_that_are_left_are_counted(path: Path, tracker: RecordingTracker):
    tracker.is_down = True
    append(path, metric_lines(7))
    tailer = follow(path, tracker)

    assert tailer.close() == 7
    assert "down" in str(tailer.error)


def test_a_server_that_does_not_answer_holds_nobody_up(path: Path, tracker: RecordingTracker):
    tracker.stall.clear()
    append(path, metric_lines(7))
    tailer = follow(path, tracker)
    start_s = time.monotonic()

    assert tailer.close(timeout_s=0.3) == 7
    assert time.monotonic() - start_s < 2
    tracker.stall.set()


def test_steps_that_the_run_holds_are_not_pushed_again(path: Path, tracker: RecordingTracker):
    append(path, metric_lines(6))
    run = RunView("run", "RUNNING", {"shardline.metrics_step": "4"}, {}, frozenset(), frozenset())

    follow(path, tracker, run).close()

    assert tracker.steps() == [5, 6]


def test_steps_that_a_resume_repeats_are_dropped(path: Path, tracker: RecordingTracker):
    tailer = follow(path, tracker)
    append(path, metric_lines(6))
    append(path, metric_lines(4, first=5))

    tailer.close()

    assert tracker.steps() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_file_that_a_resume_cut_is_followed_on(path: Path, tracker: RecordingTracker):
    tailer = follow(path, tracker)
    append(path, metric_lines(6))
    wait_for(lambda: len(tracker.steps()) == 6)
    path.write_text(metric_lines(4))
    time.sleep(0.1)
    append(path, metric_lines(4, first=5))

    tailer.close()

    assert tracker.steps() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_step_repeated_with_another_loss_is_kept_and_marked(path: Path, tracker: RecordingTracker):
    append(path, metric_lines(3) + metric_lines(1, first=3).replace("4.97", "4.5"))

    follow(path, tracker).close()

    assert [n.value for n in tracker.numbers if n.step == 3 and n.key == "train/loss_nats"] == [4.97, 4.5]
    assert tracker.tags["shardline.resumed_from"] == "3"


def test_batches_hold_at_most_a_thousand_numbers(path: Path, tracker: RecordingTracker):
    append(path, metric_lines(2500))

    follow(path, tracker).close()

    assert sum(tracker.batches) == 5000
    assert max(tracker.batches) <= 1000


def test_a_run_that_cannot_be_made_yet_is_tried_again(path: Path, tracker: RecordingTracker):
    answers: list[RunView | None] = [None, None, RUN]
    append(path, metric_lines(2))
    tailer = MetricTailer(path, tracker, lambda: answers.pop(0), interval_s=0.02).start()

    wait_for(lambda: tracker.steps() == [1, 2])
    tailer.close()


def test_an_unexpected_failure_is_kept_and_stops_nothing(path: Path, tracker: RecordingTracker):
    def broken() -> RunView:
        raise RuntimeError("surprise")

    append(path, metric_lines(2))
    tailer = MetricTailer(path, tracker, broken, interval_s=0.02).start()

    assert tailer.close() == 2
    assert "surprise" in str(tailer.error)
