"""A stage that runs while MLflow (a real sqlite database, or a server that is dead or mute) looks on."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow_database import copy_template, described
from small_artifacts import metric_lines, recipe_of

from contracts.artifact import Artifact
from contracts.errors import ShardlineError
from contracts.following import run_tracked
from contracts.projection import run_tags, sync
from contracts.store import ArtifactStore, Workspace
from contracts.tracking import Tracker

RECIPE = recipe_of("pretrain", seed=1)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    assert Tracker(folder, "none").experiment_id
    return folder / "mlflow.db"


@pytest.fixture
def store(tmp_path: Path, template: Path) -> ArtifactStore:
    copy_template(template, tmp_path / "store")
    return ArtifactStore(tmp_path / "store")


@pytest.fixture
def notes() -> list[str]:
    return []


def train(
    store: ArtifactStore, tracker: Tracker, notes: list[str], work: Callable[[Workspace], dict], seed: int = 1
) -> Artifact:
    recipe = recipe_of("pretrain", seed=seed)
    return run_tracked(
        lambda: store.make("checkpoint", "gpt", recipe, work, config={"seed": seed}),
        tracker=tracker,
        store=store,
        kind="checkpoint",
        label="gpt",
        recipe=recipe,
        config={"seed": seed},
        note=notes.append,
    )


def write_curve(workspace: Workspace) -> dict:
    (workspace.path / "metrics.jsonl").write_text(metric_lines(20))
    return {"final_loss_nats": 4.8, "step": 20}


def wait_for_run(tracker: Tracker, status: str) -> None:
    deadline = time.monotonic() + 60
    while not [run for run in tracker.runs() if run.status == status]:
        assert time.monotonic() < deadline, f"no run became {status}"
        time.sleep(0.1)


def test_a_run_is_running_while_it_runs_and_finished_after_it(store: ArtifactStore, notes: list[str]):
    seen = []

    def work(workspace: Workspace) -> dict:
        summary = write_curve(workspace)
        observer = Tracker(store.root, "pile")
        wait_for_run(observer, "RUNNING")
        seen.extend(observer.runs())
        return summary

    artifact = train(store, Tracker(store.root, "pile"), notes, work)

    assert seen[0].fingerprint == artifact.fingerprint
    (run,) = described(Tracker(store.root, "pile"))["runs"].values()
    assert run["status"] == "FINISHED"
    assert run["params"] == {"seed": "1"}
    assert len(run["history"]["train/loss_nats"]) == 20
    assert notes == []


@pytest.mark.parametrize(("error", "status"), [(ShardlineError("bad"), "FAILED"), (KeyboardInterrupt(), "KILLED")])
def test_a_run_that_ends_badly_says_how_and_goes_on_as_the_same_run(
    store: ArtifactStore, notes: list[str], error: BaseException, status: str
):
    tracker = Tracker(store.root, "pile")

    def work(workspace: Workspace) -> dict:
        (workspace.path / "metrics.jsonl").write_text(metric_lines(7))
        wait_for_run(Tracker(store.root, "pile"), "RUNNING")
        raise error

    with pytest.raises(type(error)):
        train(store, tracker, notes, work)
    (before,) = tracker.runs()
    assert before.status == status

    train(store, tracker, notes, write_curve)

    (after,) = tracker.runs()
    assert (after.run_id, after.status) == (before.run_id, "FINISHED")
    (run,) = described(tracker)["runs"].values()
    assert [step for step, _, _ in run["history"]["train/loss_nats"]] == list(range(1, 21))


KILLED = """
    import time
    from pathlib import Path
    from small_artifacts import recipe_of
    from contracts.following import run_tracked
    from contracts.store import ArtifactStore
    from contracts.tracking import Tracker
    store = ArtifactStore(Path({store!r}))
    def work(workspace):
        (workspace.path / "part.bin").write_text("half")
        time.sleep(120)
    recipe = recipe_of("pretrain", seed=1)
    run_tracked(lambda: store.make("checkpoint", "gpt", recipe, work), tracker=Tracker(store.root, "pile"),
        store=store, kind="checkpoint", label="gpt", recipe=recipe, config={{}}, note=print)
"""


def test_the_next_start_mends_the_state_of_a_run_that_was_killed_with_9(store: ArtifactStore, notes: list[str]):
    tracker = Tracker(store.root, "pile")
    support = Path(__file__).parents[1] / "support"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED.format(store=str(store.root)))],
        env={**os.environ, "PYTHONPATH": f"{support}{os.pathsep}{Path(__file__).parents[2]}"},
    )
    try:
        wait_for_run(tracker, "RUNNING")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [run.status for run in tracker.runs()] == ["RUNNING"], "nobody could tell yet"

    def work(workspace: Workspace) -> dict:
        wait_for_run(Tracker(store.root, "pile"), "KILLED")
        return write_curve(workspace)

    train(store, tracker, notes, work, seed=2)

    assert sorted(run.status for run in tracker.runs()) == ["FINISHED", "KILLED"]


def test_a_run_of_another_store_on_the_same_server_is_left_alone(
    store: ArtifactStore, notes: list[str], tmp_path: Path
):
    tracker = Tracker(store.root, "pile")
    other = ArtifactStore(tmp_path / "other")
    run = tracker.create_run("gpt", run_tags(other, RECIPE, other.root / "checkpoint" / "gpt"), start_ms=1)

    train(store, tracker, notes, write_curve)

    assert {r.run_id: r.status for r in tracker.runs()}[run.run_id] == "RUNNING"
    assert len(tracker.runs()) == 2


def test_a_dead_server_neither_stops_nor_slows_a_stage(store: ArtifactStore, notes: list[str]):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_s = time.monotonic()

    artifact = train(store, Tracker(store.root, "pile", uri=f"http://127.0.0.1:{port}"), notes, write_curve)

    assert time.monotonic() - start_s < 15
    assert artifact.summary["step"] == 20
    assert any("lineage sync" in text for text in notes)


def test_a_mute_server_neither_stops_nor_slows_a_stage(
    store: ArtifactStore, notes: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        uri = f"http://127.0.0.1:{mute.getsockname()[1]}"
        start_s = time.monotonic()

        artifact = train(store, Tracker(store.root, "pile", uri=uri), notes, write_curve)

    assert time.monotonic() - start_s < 20
    assert artifact.summary["step"] == 20
    assert any("lineage sync" in text for text in notes)
    assert Tracker(store.root, "pile").runs() == []


def test_what_a_dead_server_missed_is_written_by_sync(store: ArtifactStore, notes: list[str]):
    artifact = train(store, Tracker(store.root, "pile", uri="http://127.0.0.1:9"), notes, write_curve)
    tracker = Tracker(store.root, "pile")

    sync(store, tracker)

    run = described(tracker)["runs"][artifact.fingerprint]
    assert len(run["history"]["train/loss_nats"]) == 20


def test_a_process_that_waited_for_another_makes_no_second_run(store: ArtifactStore, notes: list[str]):
    tracker = Tracker(store.root, "pile")
    train(store, tracker, notes, write_curve)

    train(store, Tracker(store.root, "pile"), notes, write_curve)

    assert len(tracker.runs()) == 1


def test_a_stage_runs_without_mlflow_installed(store: ArtifactStore, notes: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)

    artifact = train(store, Tracker(store.root, "pile"), notes, write_curve)

    assert artifact.summary["step"] == 20
    assert "MLflow could not be written" in notes[0]
