"""Parts of a corpus: the same bytes however they are run, true lines of cut files, refusals that leave nothing."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpora import texts, write_corpus
from ingest_cases import ingest_files

from contracts.artifact import Artifact
from contracts.errors import RecordError
from preprocessing.config import IngestConfig
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.ingestion.accounting import EmptyDatasetError, TooManyRejectsError
from preprocessing.ingestion.executors import Wave
from preprocessing.ingestion.parts import plan_parts
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.sources import expand_sources

PART_BYTES = 9000


def write_frames(path: Path, documents: list[str], *, num_frames: int) -> Path:
    """Write a zstd file of several frames, whose bounds fall into lines."""
    plain = write_corpus(path.with_suffix(".plain"), documents)
    data = plain.read_bytes()
    plain.unlink()
    step = len(data) // num_frames + 1
    frames = [zstandard.compress(data[n : n + step]) for n in range(0, len(data), step)]
    path.write_bytes(b"".join(frames))
    return path


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """A plain file, one of frames, one that cannot be cut, Parquet, and small ones; some records are bad."""
    folder = tmp_path / "sources"
    folder.mkdir()
    plain = write_corpus(folder / "a.jsonl", texts(250, seed=1))
    lines = plain.read_bytes().split(b"\n")
    for number in (30, 31, 120, 200):
        lines[number] = b'{"other": 1}'
    plain.write_bytes(b"\n".join(lines))
    write_frames(folder / "b.jsonl.zst", texts(300, seed=2), num_frames=12)
    write_corpus(folder / "c.jsonl.gz", texts(200, seed=3))
    table = pa.table({"text": texts(100, seed=4), "meta": [{"pile_set_name": "Set2"}] * 100})
    pq.write_table(table, folder / "d.parquet", row_group_size=20)
    for number in range(5):
        write_corpus(folder / f"e{number}.jsonl", texts(10, seed=10 + number))
    return [str(folder / name) for name in ("a.jsonl", "b.jsonl.zst", "c.jsonl.gz", "d.parquet", "e*.jsonl")]


def ingest(sources: list[str], output: Path, **settings: Any) -> Artifact:
    usual = {"on_error": "quarantine", "part_bytes": PART_BYTES, "shard_tokens": 4000}
    return ingest_files(sources, output, **{**usual, **settings})


def test_the_dataset_does_not_depend_on_workers_or_on_how_parts_are_run(
    tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch
):
    num_parts = len(plan_parts(expand_sources(sources), form=RecordFormat(), part_bytes=PART_BYTES))
    made = [ingest(sources, tmp_path / f"out{workers}", workers=workers) for workers in (None, 1, 2, 4)]
    for lanes, workers in ((1, 2), (2, 1)):  # blocks of a part are fed to workers, one part at a time or two
        monkeypatch.setattr(
            "preprocessing.ingestion.executors.schedule",
            lambda sizes, _, lanes=lanes, workers=workers: [Wave(tuple(sizes), lanes, workers)],
        )
        made.append(ingest(sources, tmp_path / f"fed{lanes}", workers=2))

    assert num_parts > 10
    assert made[0].summary["shards"] > num_parts
    assert len({artifact.manifest.content for artifact in made}) == 1
    assert all(artifact.summary == made[0].summary for artifact in made)


def test_lines_and_offsets_are_those_of_the_whole_file(tmp_path: Path, sources: list[str]):
    cut = ingest(sources, tmp_path / "cut")
    whole = ingest(sources, tmp_path / "whole", part_bytes=2**30)

    tables = [pq.read_table(artifact.path / "documents.parquet").drop_columns(["shard"]) for artifact in (cut, whole)]
    assert tables[0].equals(tables[1])
    rejects = [(artifact.path / "rejects.jsonl").read_bytes() for artifact in (cut, whole)]
    assert rejects[0] == rejects[1]
    assert [json.loads(line)["line"] for line in rejects[0].splitlines()] == [31, 32, 121, 201]
    for name in ("lines", "documents", "empty", "rejected", "tokens", "bytes", "subsets", "sources"):
        assert cut.summary[name] == whole.summary[name]
    assert [list(TokenDataset(cut.path).sequence(n)) for n in range(0, 800, 50)] == [
        list(TokenDataset(whole.path).sequence(n)) for n in range(0, 800, 50)
    ]


def test_lines_add_up_for_every_file(tmp_path: Path, sources: list[str]):
    artifact = ingest(sources, tmp_path / "out", workers=2, subsets=("Set0", "Set2"))

    for counts in [artifact.summary, *artifact.summary["sources"]]:
        found = sum(counts[name] for name in ("documents", "empty", "filtered", "rejected"))
        assert counts["lines"] == found > 0
    assert artifact.summary["filtered_by"] == {"subset Set1": artifact.summary["filtered"]}
    assert set(artifact.summary["subsets"]) == {"Set0", "Set2"}
    everything = ingest(sources, tmp_path / "all").summary["subsets"]
    assert artifact.summary["subsets"] == {name: everything[name] for name in ("Set0", "Set2")}


@pytest.mark.parametrize("workers", [None, 2])
def test_a_bad_record_in_a_late_part_stops_with_the_line_of_the_file(tmp_path: Path, workers: int | None):
    source = write_frames(tmp_path / "a.jsonl.zst", [*texts(400), "bad"], num_frames=9)
    data = zstandard.ZstdDecompressor().stream_reader(source.open("rb"), read_across_frames=True).read()
    bad = data.replace(b'"text": "bad"', b'"texts": "bad"')
    (tmp_path / "a.jsonl").write_bytes(bad)
    line = 1 + bad[: bad.index(b'"texts"')].count(b"\n")

    with pytest.raises(RecordError, match=rf"a\.jsonl, line {line}: no key 'text'"):
        ingest([str(tmp_path / "a.jsonl")], tmp_path / "out", on_error="stop", workers=workers)
    assert line > 400
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("max_rejects", [0, 3, 0.003])
@pytest.mark.parametrize("workers", [None, 2])
def test_too_many_rejects_fail_and_leave_nothing(
    tmp_path: Path, sources: list[str], max_rejects: float, workers: int | None
):
    with pytest.raises(TooManyRejectsError, match=r"bad records, but ingest\.max_rejects \(--max-rejects\) allows"):
        ingest(sources, tmp_path / "out", max_rejects=max_rejects, workers=workers)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("max_rejects", [4, 0.01])
def test_as_many_rejects_as_allowed_are_set_aside(tmp_path: Path, sources: list[str], max_rejects: float):
    assert ingest(sources, tmp_path / "out", max_rejects=max_rejects).summary["rejected"] == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_rejects": 3}, "max_rejects needs on_error: quarantine"),
        ({"max_rejects": 1.5, "on_error": "quarantine"}, "max_rejects is 1.5; give a share below 1"),
        ({"cluster": "tcp://there:1"}, "set executor to ray or dask"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        IngestConfig(**settings)


def test_a_subset_that_no_record_has_is_an_error_that_lists_those_found(tmp_path: Path, sources: list[str]):
    with pytest.raises(EmptyDatasetError, match=r"897 filtered: subset Set1 \(399\), .*Check ingest\.subsets"):
        ingest(sources, tmp_path / "out", subsets=("set0",))


def test_a_damaged_frame_of_a_cut_file_stops_or_is_listed_and_the_other_frames_are_kept(tmp_path: Path):
    source = write_frames(tmp_path / "a.jsonl.zst", texts(400), num_frames=6)
    data = bytearray(source.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    source.write_bytes(data)

    with pytest.raises(DamagedStreamError, match=r"a\.jsonl\.zst: damaged zstd data"):
        ingest([str(source)], tmp_path / "strict", on_error="stop", part_bytes=1000, workers=2)
    assert not (tmp_path / "strict").exists()

    artifact = ingest([str(source)], tmp_path / "out", part_bytes=1000)
    (counts,) = artifact.summary["sources"]
    assert artifact.summary["damaged_files"] == 1
    assert "damaged zstd data" in counts["damaged"]["reason"]
    assert 150 < counts["documents"] < 400
    assert counts["lines"] == sum(counts[name] for name in ("documents", "empty", "filtered", "rejected"))


def test_a_small_input_is_one_part_and_empty_files_are_none(tmp_path: Path):
    write_corpus(tmp_path / "a.jsonl", texts(20))
    (tmp_path / "b.jsonl").touch()
    files = expand_sources([str(tmp_path / "*.jsonl")])

    assert len(plan_parts(files, form=RecordFormat(), part_bytes=2**20)) == 1
    assert ingest([str(tmp_path / "*.jsonl")], tmp_path / "out").summary["sources"][1]["lines"] == 0
