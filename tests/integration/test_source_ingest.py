"""Datasets made of every kind of source: the same tokens, every record accounted for, each found again."""

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import fsspec
import pytest
from ingest_cases import ingest_files
from object_store import object_store
from packed_files import KINDS, TEXTS, json_lines, warc, write_kind

from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from preprocessing.config import CorpusConfig, IngestConfig
from preprocessing.corpus.gather import CORPUS
from preprocessing.dataset.inspection import inspect_dataset
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.ingestion.accounting import EmptyDatasetError
from preprocessing.ingestion.ingest import INGEST
from preprocessing.reading.damage import DamagedStreamError, ForeignFileError
from preprocessing.reading.pile import PARTS
from preprocessing.samples.trace import read_source_text


def texts_in(folder: Path) -> list[str]:
    dataset = TokenDataset(folder)
    return [dataset.tokenizer.decode(dataset.document(n)[:-1]) for n in range(dataset.num_documents)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_source_makes_the_same_dataset_and_its_records_are_found_again(tmp_path: Path, name: str):
    source = write_kind(tmp_path, name)
    artifact = ingest_files([str(source.place)], tmp_path / "out")

    assert texts_in(artifact.path) == TEXTS
    summary = artifact.summary
    assert summary["lines"] == sum(summary[key] for key in ("documents", "empty", "filtered", "rejected"))
    assert summary["filtered"] == (1 if "warc" in name else 0)
    dataset = TokenDataset(artifact.path)
    assert [read_source_text(dataset, n) for n in range(5)] == TEXTS


@pytest.mark.parametrize(
    "name", ["a.jsonl.xz", "open.tar", "packed.tar.gz", "stream.arrow", "a.warc.wet.gz", "a.parquet"]
)
def test_a_truncated_source_leaves_no_dataset(tmp_path: Path, name: str):
    source = write_kind(tmp_path, name)
    source.path.write_bytes(source.path.read_bytes()[: -len(KINDS[name]()) // 3])
    with pytest.raises(DamagedStreamError, match=name):
        ingest_files([str(source.place)], tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list((tmp_path / "out").glob("*.bin"))


def test_a_file_of_a_foreign_form_leaves_no_dataset(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b"PK\x03\x04")
    with pytest.raises(ForeignFileError, match="say zip, which is not read"):
        ingest_files([str(tmp_path / "a.jsonl")], tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(("unit", "documents"), [("line", 3), ("paragraph", 2), ("document", 1)])
def test_plain_text_makes_documents_by_its_unit(tmp_path: Path, unit: str, documents: int):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    artifact = ingest_files([str(tmp_path)], tmp_path / "out", format="text", text_unit=unit)
    assert artifact.summary["documents"] == documents
    assert read_source_text(TokenDataset(artifact.path), 0).startswith("one")


def test_other_warc_records_are_filtered_by_their_type(tmp_path: Path):
    (tmp_path / "a.warc").write_bytes(warc(TEXTS[:1]) + warc(TEXTS[1:3], kind="response"))
    artifact = ingest_files([str(tmp_path / "a.warc")], tmp_path / "out")
    assert artifact.summary["filtered_by"] == {"WARC record of type response": 2, "WARC record of type warcinfo": 2}


def test_the_corpus_stage_takes_every_kind(tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in KINDS:
        write_kind(folder, name)
    settings = CorpusConfig(sources=(str(folder),), heldout_fraction=0)
    artifact = CORPUS.run(settings, store=ArtifactStore(tmp_path / "store"))
    assert artifact.summary["documents"] == len(TEXTS)
    assert artifact.summary["duplicates"] == len(TEXTS) * (len(KINDS) - 1)
    assert artifact.summary["filtered"] == 2  # the headers of two WARC files


def test_a_saved_dataset_and_a_hub_dataset_make_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rows = datasets.Dataset.from_list([json.loads(line) for line in json_lines().splitlines()])
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    (tmp_path / "hub").mkdir()
    for n in range(3):
        (tmp_path / "hub" / f"{n}.jsonl").write_bytes(
            b"".join(json_lines().splitlines(keepends=True)[2 * n : 2 * n + 2])
        )
    for number, source in enumerate([str(tmp_path / "saved"), f"hf://{tmp_path / 'hub'}:train"]):
        artifact = ingest_files([source], tmp_path / f"out{number}", part_bytes=1 if number else 2**20)
        assert texts_in(artifact.path) == TEXTS
        assert read_source_text(TokenDataset(artifact.path), 3) == TEXTS[3]


def test_what_is_in_memory_is_read_by_this_process_and_encoded_by_workers(tmp_path: Path):
    system = fsspec.filesystem("memory")
    system.pipe_file("/corpus/a.jsonl", json_lines() * 200)
    try:
        alone = ingest_files(["memory://corpus/a.jsonl"], tmp_path / "a", part_bytes=4000)
        helped = ingest_files(["memory://corpus/a.jsonl"], tmp_path / "b", part_bytes=4000, workers=2)
    finally:
        system.store.clear()
    assert alone.summary["documents"] == 1000
    assert alone.manifest.content == helped.manifest.content


@pytest.fixture
def _store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with object_store(monkeypatch):
        yield


@pytest.mark.usefixtures("_store")
def test_an_object_store_gives_the_bytes_that_local_files_give(tmp_path: Path):
    bucket = fsspec.filesystem("s3")
    bucket.mkdir("corpus")
    folder = tmp_path / "data"
    folder.mkdir()
    for name in KINDS:
        if name != "open.tar":  # read as a stream there, as members here
            write_kind(folder, name)
            bucket.pipe_file(f"corpus/data/{name}", KINDS[name]())
    here = ingest_files([str(folder)], tmp_path / "here")
    there = ingest_files(["s3://corpus/data"], tmp_path / "there", workers=2, part_bytes=300)
    cut = ingest_files([str(folder)], tmp_path / "cut", part_bytes=300)

    assert texts_in(there.path) == texts_in(here.path) == TEXTS * 16
    names = ("documents.parquet", "data-00000.bin")
    assert [(there.path / name).read_bytes() for name in names] == [(cut.path / name).read_bytes() for name in names]
    assert all(source["path"].startswith("s3://corpus/data/") for source in there.summary["sources"])
    assert read_source_text(TokenDataset(there.path), 12) == TEXTS[2]

    bucket.pipe_file("corpus/empty.jsonl", b"")
    with pytest.raises(EmptyDatasetError, match="no record of 1 files gave a document"):
        ingest_files(["s3://corpus/empty.jsonl"], tmp_path / "empty")

    again = IngestConfig.model_validate(there.manifest.config)
    store = ArtifactStore(tmp_path / "store")
    before = INGEST.recipe(again, inputs={}, store=store)
    assert before.fingerprint == there.fingerprint
    bucket.pipe_file("corpus/data/a.jsonl", json_lines(TEXTS[:2]))
    assert INGEST.recipe(again, inputs={}, store=store).fingerprint != before.fingerprint


def test_the_pile_is_taken_by_name_and_compared_with_what_was_published(tmp_path: Path):
    for number, name in enumerate(PARTS["train"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        row = {"text": f"text {number}", "meta": {"pile_set_name": ("Pile-CC", "Books3")[number % 2]}}
        (tmp_path / name).write_bytes(json.dumps(row).encode() + b"\n")
    artifact = ingest_files([str(tmp_path)], tmp_path / "out", preset="pile")
    assert artifact.summary["documents"] == 30
    assert artifact.summary["published"]["Books3"]["documents"] == 15
    assert artifact.summary["published"]["Books3"]["published_percent"] == 12.07
    assert inspect_dataset(artifact.path)["published"][0]["subset"] == "Pile-CC"

    (tmp_path / PARTS["train"][7]).unlink()
    with pytest.raises(
        ConfigError, match=r"1 of the 30 files of the Pile's part train are missing: train/07\.jsonl\.zst"
    ):
        ingest_files([str(tmp_path)], tmp_path / "again", preset="pile")
