"""Several machines that ingest into one folder: ranks in any order, alone or at once, killed or refused."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import shardline
from corpora import texts, write_corpus
from ingest_cases import CASES

from contracts.artifact import Artifact, read_artifact
from contracts.errors import ConfigError, InputError, RecordError
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig
from preprocessing.ingestion.ingest import INGEST
from preprocessing.ingestion.ranks import ingest_share

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "infra" / "slurm" / "ingest_array.sbatch"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "a.jsonl", texts(400))


def settings_for(source: Path, **more: Any) -> IngestConfig:
    usual = {"part_bytes": 6000, "shard_tokens": 3000, "workers": 1}
    tokenizer = str(CASES / "_tokenizers" / "byte257")
    return IngestConfig.model_validate({"sources": (str(source),), "tokenizer": tokenizer, **usual, **more})


def store_for(folder: Path) -> ArtifactStore:
    return ArtifactStore(folder / "store", output=folder / "out")


def share(source: Path, folder: Path, rank: int, world: int, **more: Any) -> Artifact | None:
    return ingest_share(settings_for(source, **more), {}, store_for(folder), rank=rank, world=world)


def test_any_number_of_ranks_in_any_order_gives_the_same_dataset(tmp_path: Path, source: Path):
    alone = INGEST.run(settings_for(source), store=store_for(tmp_path / "alone"))
    orders = [(0,), (1, 0), *itertools.permutations(range(3))]

    for n, order in enumerate(orders):
        folder = tmp_path / f"ranks{n}"
        results = [share(source, folder, rank, len(order)) for rank in order]
        assert results[:-1] == [None] * (len(order) - 1)
        assert results[-1] is not None
        assert results[-1].manifest.content == alone.manifest.content
        assert results[-1].summary == {**alone.summary, "sources": results[-1].summary["sources"]}
        assert not (folder / "out" / "unfinished").exists()
        assert share(source, folder, 0, len(order)) is not None  # a rank that comes late finds the dataset


def test_more_ranks_than_parts_is_fine(tmp_path: Path, source: Path):
    results = [share(source, tmp_path, rank, 4, part_bytes=2**20) for rank in (3, 2, 1, 0)]

    assert [result is not None for result in results] == [False, False, False, True]


def test_a_plain_ingest_completes_what_ranks_left(tmp_path: Path, source: Path):
    assert share(source, tmp_path, 1, 3) is None
    kept = {path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.idx")}

    artifact = INGEST.run(settings_for(source), store=store_for(tmp_path))

    alone = INGEST.run(settings_for(source), store=store_for(tmp_path / "alone"))
    assert artifact.manifest.content == alone.manifest.content
    assert kept
    assert kept <= {path.stat().st_mtime_ns for path in artifact.path.glob("*.idx")}


def test_a_refusal_by_one_rank_leaves_nothing_and_ends_the_others(tmp_path: Path, source: Path):
    lines = source.read_bytes().split(b"\n")
    lines[-20] = b"{}"
    source.write_bytes(b"\n".join(lines))
    refused = []

    for rank in (0, 1, 2):
        try:
            share(source, tmp_path, rank, 3)
        except RecordError as error:
            refused.append(error.line)
            break

    assert refused == [len(lines) - 19]
    assert not (tmp_path / "out").exists()


def test_a_rank_whose_build_was_given_up_says_so(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("preprocessing.ingestion.parts.REPORT_S", 0.0)
    from preprocessing.ingestion import parts

    write = parts.ShardWriter.write

    def lose_the_plan(self: Any, block: Any) -> None:
        (tmp_path / "out" / "unfinished" / "plan.json").unlink(missing_ok=True)
        write(self, block)

    monkeypatch.setattr(parts.ShardWriter, "write", lose_the_plan)
    monkeypatch.setattr("preprocessing.ingestion.ingest.IN_PROCESS_BYTES", 2**30)
    with pytest.raises(InputError, match="was given up by another process, which refused its input"):
        share(source, tmp_path, 0, 2, workers=None)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(tmp_path: Path, source: Path, rank: int, world: int):
    with pytest.raises(ConfigError, match="ranks are counted from 0"):
        share(source, tmp_path, rank, world)


def _command(source: Path, folder: Path, rank: int, world: int) -> list[str]:
    words = ["ingest", "--source", source, "--tokenizer", CASES / "_tokenizers" / "byte257", "--workers", 1]
    words += ["--part-bytes", 6000, "--shard-tokens", 3000, "--store", folder / "store", "--output", folder / "out"]
    return [str(word) for word in [*words, "--rank", rank, "--world", world]]


def test_ranks_at_once_and_the_same_rank_twice_do_not_damage_each_other(tmp_path: Path, source: Path):
    alone = INGEST.run(settings_for(source), store=store_for(tmp_path / "alone"))
    ranks = (0, 1, 2, 1, 0)
    commands = [[sys.executable, "-m", "flows.cli", *_command(source, tmp_path, rank, 3)] for rank in ranks]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate(timeout=120)[0] for process in running]

    assert [process.returncode for process in running] == [0] * len(ranks)
    assert any("complete; fingerprint" in output for output in outputs)
    assert read_artifact(tmp_path / "out").manifest.content == alone.manifest.content


def test_a_killed_rank_goes_on_where_it_stopped(tmp_path: Path, source: Path):
    process = subprocess.Popen([sys.executable, "-m", "flows.cli", *_command(source, tmp_path, 0, 2)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while process.poll() is None and not list(tmp_path.glob("out/unfinished/part-00002/*")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)

    share(source, tmp_path, 1, 2)
    artifact = share(source, tmp_path, 0, 2)

    alone = INGEST.run(settings_for(source), store=store_for(tmp_path / "alone"))
    assert artifact is not None
    assert artifact.manifest.content == alone.manifest.content


def test_the_command_says_what_is_left(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]):
    first = shardline(capsys, *_command(source, tmp_path, 1, 2))
    second = shardline(capsys, *_command(source, tmp_path, 0, 2), "--json")

    assert (first.code, second.code) == (0, 0)
    assert "rank 1 of 2 is done; parts of other ranks are not" in first.out
    assert "of 8 in all" in first.err or " in all" in first.err
    assert second.data["is_complete"]
    assert shardline(capsys, *_command(source, tmp_path, 0, 2)[:-2]).code == 2  # --rank without --world


def test_the_array_template_starts_its_rank(tmp_path: Path, source: Path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "shardline").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (programs / "shardline").chmod(0o755)
    array = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "4", "SLURM_ARRAY_TASK_ID": "3"}
    environment = {**array, "SLURM_CPUS_PER_TASK": "8", "SHARDLINE_STORE": "/s", "PATH": f"{programs}:/usr/bin:/bin"}

    def run(**more: str) -> "subprocess.CompletedProcess[str]":
        command = ["bash", str(TEMPLATE), "--source", "*.zst"]
        return subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, check=False)

    words = run(SLURM_ARRAY_TASK_COUNT="4").stdout.split()
    assert words == ["ingest", "--source", "*.zst", "--store", "/s", "--workers", "8", "--rank", "2", "--world", "4"]
    assert run(SLURM_ARRAY_TASK_COUNT="2").returncode == 2


def test_a_rank_that_finds_the_dataset_put_together_meanwhile_is_done(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    from preprocessing.ingestion import ranks

    do_parts = ranks.do_parts

    def late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(ranks, "do_parts", do_parts)
        INGEST.run(settings_for(source), store=store_for(tmp_path))
        return do_parts(*args, **kwargs)

    monkeypatch.setattr(ranks, "do_parts", late)
    artifact = share(source, tmp_path, 0, 2)

    assert artifact is not None
    assert not (artifact.path / "unfinished").exists()
    assert not (artifact.path / ".locks").exists()
