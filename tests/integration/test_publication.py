"""A build is killed with -9 at every step, and raced by several processes."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from processes import kill_at, run_forked, start_forked
from small_artifacts import folder_names, recipe_of, write

from contracts.artifact import MANIFEST, Artifact
from contracts.digests import damaged_files
from contracts.lease import lease_holder
from contracts.store import ArtifactStore, Workspace

RECIPE = recipe_of("ingest", size=3)
FILES = {"data-0.bin": "zero", "data-1.bin": "one", "sub/data-2.bin": "two"}


def build(root: Path, output: Path | None = None) -> Artifact:
    return ArtifactStore(root, output=output).make("dataset", "pile", RECIPE, write(FILES, {"tokens": 3}))


def build_and_die(root: Path, number: int, is_after: bool) -> None:
    kill_at(number, is_after=is_after)
    build(root)


def count_calls(root: Path, target: Path) -> None:
    seen = kill_at(10**9, is_after=False)
    build(root)
    target.write_text(json.dumps(seen))


def assert_complete_or_not_there(root: Path) -> None:
    for artifact in ArtifactStore(root).artifacts(on_broken=pytest.fail):
        assert damaged_files(artifact) == []


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("situation", ["nothing", "corrupt"])
def test_kill_9_at_any_step_leaves_a_whole_artifact_or_none_and_the_next_run_completes_it(
    tmp_path: Path, is_after: bool, situation: str
):
    def prepare(root: Path) -> None:
        if situation == "corrupt":
            (build(root).path / "data-0.bin").write_text("?")

    prepare(tmp_path / "count")
    assert run_forked(count_calls, tmp_path / "count", tmp_path / "calls.json") == 0
    calls = json.loads((tmp_path / "calls.json").read_text())
    assert {"link", "replace", "fsync", "unlink"} <= set(calls)
    assert len(calls) > 15

    for number in range(1, len(calls) + 1):
        root = tmp_path / f"killed-{number}"
        prepare(root)
        assert run_forked(build_and_die, root, number, is_after) == -signal.SIGKILL
        if situation == "nothing":
            assert_complete_or_not_there(root)

        artifact = build(root)

        assert damaged_files(artifact) == []
        # Killed between publication and the end, a run leaves its lock, which no longer means anything.
        names = [name for name in folder_names(artifact.path) if name not in (".lock", "attempts.jsonl")]
        assert names == ["data-0.bin", "data-1.bin", MANIFEST, "recipe.json", "sub"], number
        assert lease_holder(artifact.path) is None
        assert ArtifactStore(root).state("dataset", "pile", RECIPE) == "done"


def test_of_three_processes_one_builds_and_all_get_the_artifact(tmp_path: Path):
    def slow(workspace: Workspace) -> dict:
        with (tmp_path / "builders").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        (workspace.path / "data.bin").write_text("x")
        return {}

    def race() -> None:
        artifact = ArtifactStore(tmp_path / "store").make("dataset", "pile", RECIPE, slow)
        with (tmp_path / "got").open("a") as file:
            file.write(f"{artifact.manifest.content}\n")

    racers = [start_forked(race) for _ in range(3)]
    for racer in racers:
        racer.join(60)

    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert len((tmp_path / "builders").read_text().splitlines()) == 1
    got = (tmp_path / "got").read_text().splitlines()
    assert len(got) == 3
    assert len(set(got)) == 1


@pytest.mark.parametrize("trial", range(3))
def test_of_many_that_find_a_dead_holder_one_at_a_time_builds(tmp_path: Path, trial: int):
    """Six processes find the lock of a killed one; all refuse in turn, so that each takes the lease."""
    store = ArtifactStore(tmp_path / "store")

    def die(workspace: Workspace) -> dict:
        (workspace.path / "part.bin").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    assert run_forked(lambda: store.make("dataset", "pile", RECIPE, die)) == -signal.SIGKILL

    def alone(_: Workspace) -> dict:
        inside = os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL)  # fails if another is inside
        time.sleep(0.02)
        os.close(inside)
        os.unlink(tmp_path / "inside")  # noqa: PTH108
        with (tmp_path / "turns").open("a") as file:
            file.write("x")
        os._exit(9 if len((tmp_path / "turns").read_text()) < 6 else 0)  # dies with the lock in place

    racers = [start_forked(lambda: store.make("dataset", "pile", RECIPE, alone)) for _ in range(6)]
    for racer in racers:
        racer.join(60)

    assert sorted(racer.exitcode for racer in racers) == [0, 9, 9, 9, 9, 9]


def test_a_waiting_run_takes_over_when_the_builder_is_killed(tmp_path: Path):
    def hang(workspace: Workspace) -> dict:
        (workspace.path / "part.bin").write_text("half")
        time.sleep(60)
        return {}

    builder = start_forked(lambda: ArtifactStore(tmp_path).make("dataset", "pile", RECIPE, hang))
    while not list(tmp_path.glob("dataset/*/part.bin")):
        time.sleep(0.02)
    waiter = start_forked(build, tmp_path)
    time.sleep(0.4)
    assert waiter.is_alive()

    builder.kill()
    builder.join()
    waiter.join(10)

    assert waiter.exitcode == 0
    assert ArtifactStore(tmp_path).state("dataset", "pile", RECIPE) == "done"


def test_processes_that_refuse_while_others_wait_do_not_disturb_them(tmp_path: Path):
    """A refusing build removes its empty folder; those who wait in it make it again."""

    def work(workspace: Workspace) -> dict:
        with (tmp_path / "turns").open("a") as file:
            file.write("x")
        if len((tmp_path / "turns").read_text()) < 8:
            workspace.discard()
            os.environ["DONE"] = "1"
            raise KeyboardInterrupt
        (workspace.path / "data.bin").write_text("x")
        return {}

    def race() -> None:
        try:
            ArtifactStore(tmp_path / "store").make("dataset", "pile", RECIPE, work)
        except KeyboardInterrupt:
            os._exit(7)

    racers = [start_forked(race) for _ in range(8)]
    for racer in racers:
        racer.join(60)

    assert sorted(racer.exitcode for racer in racers) == [0, 7, 7, 7, 7, 7, 7, 7]
