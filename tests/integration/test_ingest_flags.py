"""What the ingest command offers for large corpora, and what it shows while it works."""

import json
from pathlib import Path

import pytest
from command_line import shardline
from corpora import texts, write_corpus
from ingest_cases import CASES

from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig
from preprocessing.ingestion.ingest import INGEST

TOKENIZER = CASES / "_tokenizers" / "byte257"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_one_dataset_for_each_subset(capsys: pytest.CaptureFixture[str]):
    write_corpus(Path("a.jsonl"), texts(60))
    words = ["ingest", "--source", "a.jsonl", "--tokenizer", TOKENIZER, "--json"]

    outcomes = [shardline(capsys, *words, "--subset", f"Set{n}", "--output", f"out{n}") for n in (0, 1)]

    assert [list(outcome.data["subsets"]) for outcome in outcomes] == [["Set0"], ["Set1"]]
    assert [outcome.data["filtered"] for outcome in outcomes] == [30, 30]
    assert outcomes[0].data["fingerprint"] != outcomes[1].data["fingerprint"]
    assert "30 records were filtered: subset Set1 (30)" in outcomes[0].err


@pytest.mark.parametrize("limit", ["1", "0.01"])
def test_too_many_bad_records_end_with_the_first_and_the_cure(capsys: pytest.CaptureFixture[str], limit: str):
    write_corpus(Path("a.jsonl"), texts(60))
    with Path("a.jsonl").open("a") as file:
        file.write("{}\n" * 2)
    words = ["ingest", "--source", "a.jsonl", "--tokenizer", TOKENIZER, "--output", "out", "--on-error", "quarantine"]

    outcome = shardline(capsys, *words, "--max-rejects", limit)

    assert outcome.code == 1
    assert "2 bad records, but ingest.max_rejects (--max-rejects) allows" in outcome.err
    assert not Path("out").exists()
    assert shardline(capsys, *words, "--max-rejects", "2").code == 0
    assert shardline(capsys, *words[:-2], "--max-rejects", "2").code == 2  # without quarantine it means nothing


def test_the_help_names_what_large_corpora_need(capsys: pytest.CaptureFixture[str]):
    text = shardline(capsys, "ingest", "--help").out

    for flag in (
        "--workers",
        "--part-bytes",
        "--rank",
        "--world",
        "--executor",
        "--cluster",
        "--max-rejects",
        "--subset",
    ):
        assert flag in text


class _Reports:
    def __init__(self) -> None:
        self.done: list[float] = []
        self.totals: set[float | None] = set()

    def update(self, done: float, *, total: float | None, unit: str, **numbers: float | str) -> None:
        self.done.append(done)
        self.totals.add(total)

    def note(self, text: str) -> None:
        return None


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_counts_the_bytes_of_the_input(tmp_path: Path, workers: int):
    source = write_corpus(tmp_path / "a.jsonl", texts(400))
    settings = IngestConfig(sources=(str(source),), tokenizer=str(TOKENIZER), workers=workers, part_bytes=9000)
    reports = _Reports()
    INGEST.run(settings, store=ArtifactStore(tmp_path / "store"), progress=reports)

    size_bytes = source.stat().st_size
    assert reports.totals == {size_bytes}
    assert reports.done == sorted(reports.done)
    assert reports.done[-1] == size_bytes
    assert len(set(reports.done)) > 5


def test_reports_of_parts_elsewhere_move_the_progress_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from preprocessing.ingestion import overview
    from preprocessing.ingestion.ingest import prepare

    source = write_corpus(tmp_path / "a.jsonl", texts(400))
    settings = IngestConfig(sources=(str(source),), tokenizer=str(TOKENIZER), part_bytes=9000)
    reports = _Reports()
    (tmp_path / "out").mkdir()
    job = prepare(settings, {}, tmp_path / "out", progress=reports).job
    job.part_folder(1).mkdir()
    report = {"bytes": 700, "documents": 5, "tokens": 90, "rejected": 0}
    (job.part_folder(1) / "progress.json").write_text(json.dumps(report))

    def running():
        yield None

    overview.Overview(job, range(len(job.parts)), settings, reports).follow(running())

    assert reports.done == [700]


@pytest.mark.parametrize("executor", ["ray", "dask"])
def test_a_cluster_cannot_read_the_memory_of_this_process(tmp_path: Path, executor: str):
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/lonely/a.jsonl", b'{"text": "a"}\n')
    settings = IngestConfig(sources=("memory://lonely/a.jsonl",), tokenizer=str(TOKENIZER), executor=executor)

    with pytest.raises(ConfigError, match=r"a\.jsonl is in the memory of this process, where a cluster cannot read it"):
        INGEST.run(settings, store=ArtifactStore(tmp_path / "store"))
