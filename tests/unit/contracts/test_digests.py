import hashlib
import json
import os
from pathlib import Path

import pytest
from small_artifacts import make

import contracts.digests
from contracts.digests import DigestCache, damaged_files, missing_files
from contracts.errors import ConfigError
from contracts.store import ArtifactStore


def old_file(path: Path, text: str = "x") -> Path:
    path.write_text(text)
    os.utime(path, (1_000_000, 1_000_000))
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were really read."""
    found: list[Path] = []

    def read(path: Path) -> str:
        found.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(contracts.digests, "sha256_of", read)
    return found


def test_a_file_is_read_once_over_two_runs(tmp_path: Path, reads: list[Path]):
    file = old_file(tmp_path / "a")

    digests = [DigestCache(tmp_path / "cache").digest(file) for _ in range(2)]

    assert digests == [hashlib.sha256(b"x").hexdigest()] * 2
    assert reads == [file]


def test_a_file_that_changed_is_read_again(tmp_path: Path, reads: list[Path]):
    cache = DigestCache(tmp_path / "cache")
    file = old_file(tmp_path / "a", "x")
    first = cache.digest(file)
    file.write_text("y")
    os.utime(file, (1_000_001, 1_000_001))

    assert cache.digest(file) != first
    assert len(reads) == 2


def test_a_file_written_this_moment_is_not_remembered(tmp_path: Path, reads: list[Path]):
    file = tmp_path / "a"
    file.write_text("x")
    cache = DigestCache(tmp_path / "cache")

    cache.digest(file)
    cache.digest(file)

    assert len(reads) == 2


def test_two_processes_that_write_at_once_lose_nothing(tmp_path: Path, reads: list[Path]):
    files = [old_file(tmp_path / str(n), str(n)) for n in range(4)]
    one, two = DigestCache(tmp_path / "cache"), DigestCache(tmp_path / "cache")
    for a, b in (files[:2], files[2:]):
        one.digest(a)
        two.digest(b)

    third = DigestCache(tmp_path / "cache")
    before = len(reads)
    for file in files:
        third.digest(file)
    assert len(reads) == before


def test_a_damaged_memory_costs_time_and_nothing_else(tmp_path: Path):
    file = old_file(tmp_path / "a")
    (tmp_path / "cache").write_text('nonsense\n["half", 1\n[1]\n{"a": 2}\n["' + str(file) + '", 1, 2, "short"]\n')

    assert DigestCache(tmp_path / "cache").digest(file) == hashlib.sha256(b"x").hexdigest()


def test_the_memory_does_not_grow_for_ever(tmp_path: Path):
    line = json.dumps(["/gone", 1, 2, "a" * 64]) + "\n"
    (tmp_path / "cache").write_text(line * 3000)

    DigestCache(tmp_path / "cache").digest(old_file(tmp_path / "a"))

    assert len((tmp_path / "cache").read_text().splitlines()) == 2


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read \(No such file"):
        DigestCache(tmp_path / "cache").digest(tmp_path / "none.jsonl")


def test_known_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {str(n): old_file(tmp_path / f"{n}.jsonl", str(n)) for n in range(50)}
    first = DigestCache(tmp_path / "cache").digest_all(files)
    monkeypatch.setattr("contracts.digests.sha256_of", lambda path: pytest.fail(f"{path} was read again"))

    assert DigestCache(tmp_path / "cache").digest_all(files) == first


def test_a_flipped_bit_is_found_by_the_full_check_alone(tmp_path: Path):
    artifact = make(ArtifactStore(tmp_path), "dataset", "ingest", files={"a.bin": "good", "b.bin": "good"})
    (artifact.path / "a.bin").write_text("gooe")

    assert missing_files(artifact) == []
    assert damaged_files(artifact) == ["a.bin"]


def test_a_lost_file_is_found_by_both_checks(tmp_path: Path):
    artifact = make(ArtifactStore(tmp_path), "dataset", "ingest", files={"a.bin": "good", "b.bin": "good"})
    (artifact.path / "b.bin").unlink()

    assert missing_files(artifact) == damaged_files(artifact) == ["b.bin"]
