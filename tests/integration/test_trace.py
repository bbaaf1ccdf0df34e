"""From a sample of training back to the text it was made of."""

from pathlib import Path

import numpy as np
import pytest
from corpora import texts, write_corpus
from ingest_cases import CASES, ingest_files

from contracts.artifact import Artifact
from contracts.errors import InputError
from contracts.store import ArtifactStore
from preprocessing.config import IndexConfig, IngestConfig
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.ingestion.ingest import INGEST
from preprocessing.samples.gpt import GPTSamples
from preprocessing.samples.index import INDEX
from preprocessing.samples.trace import read_source_text, trace_samples


@pytest.fixture
def _blend(tmp_path: Path) -> tuple[Artifact, list[Path]]:
    """An index over a blend of two datasets of several shards, from plain and gzip sources."""
    sources = [write_corpus(tmp_path / name, texts(200, seed=n)) for n, name in enumerate(("a.jsonl", "b.jsonl.gz"))]
    datasets = [
        ingest_files([str(source)], tmp_path / f"data{n}", shard_tokens=6000) for n, source in enumerate(sources)
    ]
    index = INDEX.run(
        IndexConfig(seq_length=48, samples=500, weights=(1, 3), split="90,10,0", valid_samples=10),
        inputs={f"dataset{n}": dataset for n, dataset in enumerate(datasets)},
        store=ArtifactStore(tmp_path / "store"),
    )
    return index, sources


def test_a_hundred_random_samples_lead_back_to_their_source_text(_blend: tuple[Artifact, list[Path]]):
    index, sources = _blend
    samples = GPTSamples(index.path, "train")
    numbers = np.random.default_rng(7).choice(len(samples), 100, replace=False).tolist()

    spans = trace_samples(index.path, numbers)

    rows = samples.tokens(numbers)
    rebuilt: dict[int, list[int]] = {number: [] for number in numbers}
    for span in spans:
        dataset = samples.datasets[span.dataset]
        source_text = read_source_text(dataset, span.document)
        assert Path(span.path) == sources[span.dataset]
        ids = [*dataset.tokenizer.encode(source_text), dataset.eod_id]
        assert len(ids) == span.document_tokens
        part = ids[span.first_token : span.first_token + span.num_tokens]
        rebuilt[span.sample] += part
        assert span.text == dataset.tokenizer.decode(part)
    assert [rebuilt[number] for number in numbers] == rows.tolist()


def test_neighbouring_samples_share_one_token(tmp_path: Path):
    source = write_corpus(tmp_path / "a.jsonl", texts(60))
    dataset = ingest_files([str(source)], tmp_path / "data")
    inputs, store = {"dataset0": dataset}, ArtifactStore(tmp_path / "store")
    index = INDEX.run(IndexConfig(seq_length=48), inputs=inputs, store=store)
    order = np.argsort(np.load(index.path / "train_shuffle_index.npy"))

    rows = GPTSamples(index.path, "train").tokens(order)

    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])


def test_a_changed_source_file_is_not_taken_for_the_original(_blend: tuple[Artifact, list[Path]]):
    index, sources = _blend
    samples = GPTSamples(index.path, "train")
    sources[0].write_text(sources[0].read_text(encoding="utf-8").replace("#0", "#9"), encoding="utf-8")

    with pytest.raises(InputError, match=r"a\.jsonl, line 1: is not the text that was ingested"):
        read_source_text(samples.datasets[0], 0)


def test_an_index_refuses_another_dataset(_blend: tuple[Artifact, list[Path]]):
    index, _ = _blend
    datasets = GPTSamples(index.path, "train").datasets

    with pytest.raises(InputError, match=r"is not dataset 0 of the index"):
        GPTSamples(index.path, "train", [datasets[1].path, datasets[0].path])


def test_an_index_in_a_moved_store_finds_its_datasets(tmp_path: Path):
    (tmp_path / "store").mkdir()
    source = write_corpus(tmp_path / "store" / "a.jsonl", texts(100))
    store = ArtifactStore(tmp_path / "store")
    config = IngestConfig(sources=(str(source),), tokenizer=str(CASES / "_tokenizers" / "byte257"))
    dataset = INGEST.run(config, store=store)
    index = INDEX.run(IndexConfig(seq_length=32), inputs={"dataset0": dataset}, store=store)
    before = GPTSamples(index.path).tokens(range(10))
    (tmp_path / "store").rename(tmp_path / "moved")

    after = GPTSamples(tmp_path / "moved" / "index" / index.path.name).tokens(range(10))

    np.testing.assert_array_equal(before, after)
    moved = TokenDataset(tmp_path / "moved" / "dataset" / dataset.path.name)
    assert read_source_text(moved, 7) == texts(100)[7]


def test_an_index_outside_the_store_finds_datasets_inside_it(tmp_path: Path):
    source = write_corpus(tmp_path / "a.jsonl", texts(30))
    root = tmp_path / "store"
    config = IngestConfig(sources=(str(source),), tokenizer=str(CASES / "_tokenizers" / "byte257"))
    dataset = INGEST.run(config, store=ArtifactStore(root))
    outside = ArtifactStore(root, output=tmp_path / "elsewhere" / "deep" / "index")
    index = INDEX.run(IndexConfig(seq_length=32), inputs={"dataset0": dataset}, store=outside)

    assert GPTSamples(index.path).tokens([0]).shape == (1, 33)
