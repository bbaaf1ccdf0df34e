"""Ingest that is killed, meets another run, or a disk that is full or read-only."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import shardline
from corpora import texts, write_corpus
from ingest_cases import CASES, ingest_files

from contracts.artifact import read_artifact
from contracts.errors import InputError, ShardlineError
from preprocessing.ingestion import assembly, ingest

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"part_bytes": 20_000, "shard_tokens": 1500, "on_error": "quarantine"}
WORKERS = 2


# Takes time around the moments that matter, in workers too, so that kills fall everywhere.
SLOWER = """
import time
from preprocessing.ingestion import shards
def slow(name, owner):
    function = getattr(owner, name)
    def slowly(*args, **kwargs):
        time.sleep(0.01)
        result = function(*args, **kwargs)
        time.sleep(0.01)
        return result
    setattr(owner, name, slowly)
slow("finish", shards.PairWriter)
slow("write_atomically", shards)
"""


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    plain = write_corpus(tmp_path / "a.jsonl", texts(300, seed=1))
    plain.write_bytes(plain.read_bytes().replace(b'"text"', b'"other"', 3))
    return [str(plain), str(write_corpus(tmp_path / "b.jsonl.gz", texts(300, seed=2)))]


def _command(sources: list[str], folder: Path) -> list[str]:
    words: list[object] = ["ingest", "--source", *sources, "--tokenizer", CASES / "_tokenizers" / "byte257"]
    words += ["--workers", WORKERS, "--on-error", "quarantine", "--part-bytes", SETTINGS["part_bytes"]]
    words += ["--shard-tokens", SETTINGS["shard_tokens"], "--store", folder / "store", "--output", folder / "out"]
    return [str(word) for word in words]


def _start(sources: list[str], folder: Path, *path: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "flows.cli", *_command(sources, folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)


def _shards(folder: Path) -> set[int]:
    """Time stamps of finished shards: those in the states of parts, and those that have their names."""
    found = set()
    for state in folder.glob("out/unfinished/part-*/state.json"):
        number = json.loads(state.read_text())["shards"]
        paths = [state.parent / f"data-{n:05d}.idx" for n in range(number)]
        found |= {path.stat().st_mtime_ns for path in paths if path.exists()}
    return found | {path.stat().st_mtime_ns for path in folder.glob("out/*.idx")}


@pytest.mark.slow
def test_runs_killed_at_random_moments_redo_at_most_one_shard_a_worker(tmp_path: Path, sources: list[str]):
    whole = ingest_files(sources, tmp_path / "whole", **SETTINGS)
    generator = random.Random(7)
    folder, slower = tmp_path / "killed", tmp_path / "slower"
    slower.mkdir()
    (slower / "sitecustomize.py").write_text(SLOWER)
    redone, kills = [], 0
    while not (folder / "out" / "manifest.json").exists():
        noted, written = _shards(folder), _pairs(folder)
        process = _start(sources, folder, slower)
        wanted = len(written) + generator.randint(1, 12)
        deadline = time.monotonic() + 120
        while process.poll() is None and len(_pairs(folder)) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.02))
        if process.poll() is None:
            # Together with its workers, or alone: then they stop when they notice.
            kill = os.killpg if kills % 3 else os.kill
            kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait(timeout=120)
        _wait_for_workers(folder)
        kept = _pairs(folder)
        assert noted <= kept  # what was noted as finished is never written again
        redone.append(len(written - kept))

    assert kills > 2
    assert max(redone) <= WORKERS
    artifact = read_artifact(folder / "out")
    assert artifact.manifest.content == whole.manifest.content
    assert artifact.summary["rejected"] == 3
    assert not list(artifact.path.rglob("*.tmp"))
    assert not (artifact.path / "unfinished").exists()


def _pairs(folder: Path) -> set[int]:
    """Time stamps of all finished pairs, also of those that move or vanish at this moment."""
    found = set()
    for place, _, names in os.walk(folder / "out"):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if name.endswith(".idx"):
                    found.add((Path(place) / name).stat().st_mtime_ns)
    return found


def _wait_for_workers(folder: Path) -> None:
    """Wait until the workers of a killed run have noticed."""
    for lock in folder.glob("out/.locks/*/.lock"):
        with_pid = json.loads(lock.read_text())["pid"] if lock.exists() else 0
        while with_pid and Path(f"/proc/{with_pid}").exists() and "Z" not in _status(with_pid):
            time.sleep(0.01)


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


STEPS = [(assembly, "join_tables"), (assembly, "_join_rejects"), (assembly, "_move"), (ingest, "summarize")]


@pytest.mark.parametrize(("module", "name"), [*STEPS, (ingest, "close_build")])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_run_killed_in_any_step_of_the_assembly_keeps_every_shard(
    tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch, module: Any, name: str, is_after: bool
):
    whole = ingest_files(sources, tmp_path / "whole", **SETTINGS)
    step = getattr(module, name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        if is_after:
            step(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, killed)
        ingest_files(sources, tmp_path / "out", **SETTINGS)
    kept = {path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.idx")}
    artifact = ingest_files(sources, tmp_path / "out", **SETTINGS)

    assert artifact.manifest.content == whole.manifest.content
    assert artifact.summary == whole.summary
    assert kept == {path.stat().st_mtime_ns for path in artifact.path.glob("*.idx")}
    assert not (artifact.path / "unfinished").exists()


def test_publication_does_not_read_the_pairs_again(tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch):
    from contracts import digests

    read: list[str] = []
    digest = digests.sha256_of
    monkeypatch.setattr(digests, "sha256_of", lambda path: (read.append(path.name), digest(path))[1])
    artifact = ingest_files(sources, tmp_path / "out", **SETTINGS)

    assert not [name for name in read if name.endswith((".bin", ".idx")) and (artifact.path / name).exists()]
    assert not digests.damaged_files(artifact)


def test_two_runs_at_once_make_one_dataset(tmp_path: Path, sources: list[str]):
    whole = ingest_files(sources, tmp_path / "whole", **SETTINGS)
    running = [_start(sources, tmp_path) for _ in range(2)]

    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert read_artifact(tmp_path / "out").manifest.content == whole.manifest.content


def test_a_finished_pair_that_is_gone_is_named(tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(assembly, "join_tables", _interrupt)
        ingest_files(sources, tmp_path / "out", **SETTINGS)
    (tmp_path / "out" / "data-00001.bin").unlink()

    with pytest.raises(InputError, match=r"data-0000\d\.bin: this finished file is gone\. Remove .*out"):
        ingest_files(sources, tmp_path / "out", **SETTINGS)


def test_a_damaged_state_is_named(tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ingest, "_finish", _interrupt)
        ingest_files(sources, tmp_path / "out", **SETTINGS)
    (tmp_path / "out" / "unfinished" / "part-00001" / "state.json").write_text('{"shards": 1}')

    with pytest.raises(InputError, match=r"part-00001/state\.json: damaged .*Remove .*out, then ingest again"):
        ingest_files(sources, tmp_path / "out", **SETTINGS)


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [0, WORKERS])
def test_a_disk_that_is_full_ends_cleanly_and_the_run_goes_on_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
):
    # A limit on the size of a file stands for the full disk: writes fail in the middle of a shard.
    source = write_corpus(tmp_path / "a.jsonl", texts(2000))
    words = ["ingest", "--source", source, "--tokenizer", CASES / "_tokenizers" / "byte257", "--output", "out"]
    words += ["--part-bytes", 10**5, *(["--workers", workers] if workers else [])]
    command = [sys.executable, "-m", "flows.cli", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))

    full = subprocess.run(
        command, cwd=tmp_path, env=environment, preexec_fn=limited, capture_output=True, text=True, check=False
    )
    assert full.returncode == 1, full.stderr
    assert "File too large. Raise the limit on the size of a file" in full.stderr
    assert "Traceback" not in full.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()

    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    whole = ingest_files([str(source)], tmp_path / "whole", part_bytes=10**5)
    assert read_artifact(tmp_path / "out").manifest.content == whole.manifest.content


@pytest.mark.parametrize("workers", [None, WORKERS])
@pytest.mark.parametrize("step", ["preprocessing.dataset.indexed_dataset.PairWriter.finish", "os.fsync"])
def test_a_full_disk_is_told_with_its_cure(
    tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch, workers: int | None, step: str
):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ShardlineError, match=r"No space left on device\. Free some"):
        patch.setattr(step, full)
        ingest_files(sources, tmp_path / "out", **SETTINGS)

    assert ingest_files(sources, tmp_path / "out", workers=workers, **SETTINGS).summary["documents"] == 597


def test_an_output_that_cannot_be_written_is_refused_cleanly(
    tmp_path: Path, sources: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # Root may write anywhere, so the file system itself has to refuse.
    words = ["ingest", "--source", *sources, "--tokenizer", CASES / "_tokenizers" / "byte257"]
    outcome = shardline(capsys, *words, "--store", tmp_path / "store", "--output", "/proc/self/out")

    assert outcome.code in (1, 2)
    assert "/proc/self" in outcome.err
    assert "defect" not in outcome.err
