"""A stage as MLflow sees it while it runs: a thread of the launcher that never slows or stops it.

Training appends to `metrics.jsonl`; the file is the queue. The thread pushes what is new, in
batches. A server that is slow or dead costs nothing but the freshness of its page; what is left at
the end is pushed by `lineage sync`.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.errors import ShardlineError
from contracts.fingerprint import Recipe
from contracts.lease import lease_holder
from contracts.metrics import Point, Replays, read_points
from contracts.projection import (
    METRICS_FILE,
    log_settings,
    one_at_a_time,
    project,
    push_points,
    pushed_step,
    repair,
    run_tags,
    store_id,
)
from contracts.store import ArtifactStore
from contracts.tracking import RunView, Status, Tracker, load_mlflow

Note = Callable[[str], None]


class MetricTailer:
    """Pushes the lines that are appended to a `metrics.jsonl`, from a thread of its own.

    Args:
        path: The file; it may not exist yet, end in half a line, or be cut by a resume.
        tracker: Where the lines go.
        run: The run they belong to, or a function that makes it; that is tried until it works.
        interval_s: Seconds between two looks; doubled up to a minute while MLflow fails.
    """

    def __init__(
        self, path: Path, tracker: Tracker, run: RunView | Callable[[], RunView | None], *, interval_s: float = 2.0
    ) -> None:
        self.path = path
        self.run: RunView | None = run if isinstance(run, RunView) else None
        self.error: ShardlineError | None = None
        self._make_run = run if callable(run) else lambda: run
        self._tracker = tracker
        self._interval_s = interval_s
        self._offset = 0
        self._queue: list[Point] = []
        self._replays = Replays()
        self._pushed_step = pushed_step(self.run) if self.run else -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="metric-tailer", daemon=True)

    def start(self) -> "MetricTailer":
        """Begin to follow the file."""
        self._thread.start()
        return self

    def close(self, timeout_s: float = 10.0) -> int:
        """Push the rest, but wait no longer than `timeout_s`; returns how many lines are left."""
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.error = ShardlineError("MLflow does not answer; `shardline lineage sync` catches up.")
        points, _ = read_points(self.path, self._offset)
        return len(self._queue) + len(points)

    def _follow(self) -> None:
        pause_s = min(0.2, self._interval_s)
        while not self._stop.wait(pause_s):
            pause_s = self._interval_s if self._push() else min(60.0, 2 * pause_s)
        self._push()

    def _push(self) -> bool:
        try:
            self._read()
            if self.run is None:
                self.run = self._make_run()
                if self.run is None:
                    return True
                self._pushed_step = pushed_step(self.run)
            while self._queue:  # what fails stays in the queue
                batch = self._queue[:100]
                self._pushed_step = push_points(
                    self._tracker,
                    self.run.run_id,
                    batch,
                    repeated=self._replays.resumed_from,
                    pushed_step=self._pushed_step,
                )
                del self._queue[: len(batch)]
            self.error = None
            return True
        except ShardlineError as error:
            self.error = error
        except Exception as error:  # a thread that dies would be silent; nothing here may stop a stage
            self.error = ShardlineError(f"Following {self.path} failed: {error!r}.")
        return False

    def _read(self) -> None:
        try:
            if self.path.stat().st_size < self._offset:  # a resume cut the file: known steps are dropped again
                self._offset = 0
        except OSError:
            return
        points, self._offset = read_points(self.path, self._offset)
        self._queue += self._replays.fresh(points)


def run_tracked(
    build: Callable[[], Artifact],
    *,
    tracker: Tracker,
    store: ArtifactStore,
    kind: str,
    label: str,
    recipe: Recipe,
    config: Mapping[str, Any],
    note: Note,
) -> Artifact:
    """Build an artifact and let the tracker show it: RUNNING meanwhile, and how it ended.

    Args:
        build: Builds the artifact, by `Stage.run`; called once, whatever the tracker does.
        config: The full settings.
        note: Told, once, when the tracker could not follow.

    Raises:
        BaseException: What `build` raises, and nothing else.
    """
    path = store.locate(kind, label, recipe)
    name = path.name

    def open_run() -> RunView | None:
        holder = lease_holder(path)
        if holder is None or holder.pid != os.getpid():
            return None  # another process builds, and shows it
        return _open_run(tracker, store, recipe, name=name, path=path, config=config)

    if not _tell_failure(load_mlflow, note):
        return build()
    tailer = MetricTailer(path / METRICS_FILE, tracker, open_run).start()
    try:
        artifact = build()
    except BaseException as error:
        status: Status = "FAILED" if isinstance(error, Exception) else "KILLED"
        left = tailer.close()
        run = tailer.run
        if run is not None:
            _tell_failure(lambda: tracker.set_status(run.run_id, status, end_ms=round(time.time() * 1000)), note)
        if left and run is not None:
            note(f"{left} lines of {path / METRICS_FILE} are not in MLflow yet; the next start pushes them.")
        raise
    left = tailer.close()
    if tailer.error is not None:  # a server that is down now would only be waited for once more
        note(str(tailer.error))
    elif _tell_failure(lambda: project(artifact, store, tracker), note):
        return artifact
    if left:
        note(f"{left} lines of {artifact.path / METRICS_FILE} wait for `shardline lineage sync`.")
    return artifact


def _open_run(
    tracker: Tracker, store: ArtifactStore, recipe: Recipe, *, name: str, path: Path, config: Mapping[str, Any]
) -> RunView:
    """Make the run of a build that begins, or re-open the one that it goes on with."""
    with one_at_a_time(store):
        repair(tracker, store, except_fingerprint=recipe.fingerprint)
        run = tracker.find_unfinished(recipe.fingerprint, store_id(store))
        if run is None:
            start_ms = round(time.time() * 1000)
            run = tracker.create_run(name, run_tags(store, recipe, path), start_ms=start_ms)
        else:
            tracker.set_status(run.run_id, "RUNNING")
    log_settings(tracker, run, config)
    return run


def _tell_failure(action: Callable[[], object], note: Note) -> bool:
    """Do what may fail without harm; tell if it does. True for success."""
    try:
        action()
        return True
    except ShardlineError as error:
        note(str(error))
    except Exception as error:  # MLflow must never stop a stage that is done
        note(f"MLflow could not be written ({error!r}); `shardline lineage sync` catches up.")
    return False
