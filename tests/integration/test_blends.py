"""Blends by weight, epochs and tokens, over datasets or subsets; splits by position and by hash."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import texts
from ingest_cases import ingest_files
from megatron_cases import SMALL

from contracts.errors import ConfigError, InputError
from preprocessing.config import IndexConfig
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.gpt import GPTSamples
from preprocessing.samples.index import build_index
from preprocessing.samples.trace import trace_samples

SUBSETS = ("Github", "Books", "Wiki")


def corpus(path: Path, count: int, *, reverse: bool = False) -> Path:
    lines = [
        json.dumps({"text": text, "meta": {"pile_set_name": SUBSETS[n % 3]}}) + "\n"
        for n, text in enumerate(texts(count))
    ]
    path.write_text("".join(reversed(lines) if reverse else lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def _dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    folder = tmp_path_factory.mktemp("blend")
    return TokenDataset(ingest_files([str(corpus(folder / "a.jsonl", 240))], folder / "data", shard_tokens=9000).path)


def built(folder: Path, datasets: list[TokenDataset], **settings: Any) -> dict[str, Any]:
    return build_index(IndexConfig(seq_length=32, **settings), datasets, folder, note=lambda _: None)


def documents_read(folder: Path, dataset: TokenDataset, split: str) -> Counter[int]:
    samples = GPTSamples(folder, split, [dataset])
    return Counter(span.document for n in range(len(samples)) for span in samples.documents_of(n))


def test_subsets_of_one_dataset_are_blended_by_weight(tmp_path: Path, _dataset: TokenDataset):
    built(tmp_path, [_dataset], subsets=("Books", "Github"), weights=(3.0, 1.0), samples=400)
    found = [trace_samples(tmp_path, [n], datasets=[_dataset]) for n in range(400)]
    names = [{span.subset for span in spans} for spans in found]
    assert all(len(name) == 1 for name in names)
    assert Counter(name for item in names for name in item) == {"Books": 300, "Github": 100}


def test_epochs_read_each_subset_so_often(tmp_path: Path, _dataset: TokenDataset):
    summary = built(tmp_path, [_dataset], subsets=SUBSETS, epochs=(2.0, 1.0, 0.5))
    parts = summary["splits"]["train"]["datasets"]
    for number, epochs in enumerate((2.0, 1.0, 0.5)):
        part = parts[f"dataset{number}"]
        assert part["drawn"] == part["asked"] == round(epochs * part["samples_per_epoch"])
    assert summary["train_samples"] == sum(part["drawn"] for part in parts.values())


def test_tokens_are_read_of_each_dataset(tmp_path: Path, _dataset: TokenDataset):
    summary = built(tmp_path, [_dataset, _dataset], tokens=(6400, 32 * 10 + 31))
    parts = summary["splits"]["train"]["datasets"]
    assert [parts[name]["drawn"] for name in ("dataset0", "dataset1")] == [200, 10]


def test_a_dataset_of_no_epochs_is_left_out(tmp_path: Path, _dataset: TokenDataset):
    summary = built(tmp_path, [_dataset], subsets=SUBSETS, epochs=(1.0, 0.0, 1.0))
    assert list(summary["splits"]["train"]["datasets"]) == ["dataset0", "dataset2"]


def test_the_other_splits_of_a_counted_blend_are_read_once(tmp_path: Path, _dataset: TokenDataset):
    summary = built(tmp_path, [_dataset], subsets=("Books", "Wiki"), epochs=(3.0, 1.0), split="80,20,0")
    parts = summary["splits"]["valid"]["datasets"]
    assert all(part["drawn"] == part["samples_per_epoch"] for part in parts.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"subsets": ("Books", "Nothing")}, r"no subset 'Nothing'; it has Books, Github, Wiki"),
        ({"subsets": ("Books", "Books")}, "names a subset twice"),
        ({"epochs": (1.0, 2.0)}, "index.epochs has 2 epochs for 1 datasets"),
        ({"subsets": ("Books",), "tokens": (1, 2)}, "index.tokens has 2 tokens for 1 subsets"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, _dataset: TokenDataset, settings: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        built(tmp_path, [_dataset], **settings)


def test_weights_epochs_and_tokens_exclude_each_other():
    for settings in ({"weights": (1.0,), "epochs": (1.0,), "samples": 5}, {"epochs": (1.0,), "samples": 5}):
        with pytest.raises(ValueError, match=r"exclude each other|leave `samples` out"):
            IndexConfig(**settings)


def test_a_foreign_pair_has_no_subsets(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no documents\.parquet, so its documents have no subset"):
        built(tmp_path, [TokenDataset(SMALL / "datasets" / "a")], subsets=("Books",))


def test_by_hash_every_document_is_in_one_split(tmp_path: Path, _dataset: TokenDataset):
    built(tmp_path, [_dataset], split="70,20,10", split_by="hash")
    sides = [set(np.load(tmp_path / f"{name}_document_index.npy").tolist()) for name in ("train", "valid", "test")]
    assert sorted(number for side in sides for number in side) == list(range(240))
    assert [len(side) for side in sides] == pytest.approx([168, 48, 24], abs=20)


def test_by_hash_a_document_keeps_its_side_in_a_longer_dataset_of_another_order(tmp_path: Path, _dataset: TokenDataset):
    longer = ingest_files([str(corpus(tmp_path / "b.jsonl", 480, reverse=True))], tmp_path / "data")
    other = TokenDataset(longer.path)
    held = []
    for number, dataset in enumerate((_dataset, other)):
        built(tmp_path / f"i{number}", [dataset], split="70,30,0", split_by="hash")
        chosen = np.load(tmp_path / f"i{number}" / "valid_document_index.npy").tolist()
        held.append({dataset.document(n).tobytes() for n in chosen})
    assert held[0] < held[1]
    assert held[1] - held[0] <= {other.document(n).tobytes() for n in range(240)}


def test_by_hash_sequences_follow_their_document(tmp_path: Path):
    dataset = TokenDataset(SMALL / "datasets" / "b2")
    built(tmp_path, [dataset], split="50,50,0", split_by="hash")
    sides = [set(np.load(tmp_path / f"{name}_document_index.npy").tolist()) for name in ("train", "valid")]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 349
    bounds = dataset.shards[0].document_bounds
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert len({number in sides[0] for number in range(start, stop)}) <= 1


def test_a_subset_is_split_by_itself(tmp_path: Path, _dataset: TokenDataset):
    for by in ("position", "hash"):
        built(tmp_path / by, [_dataset], subsets=("Wiki",), split="60,40,0", split_by=by)
        read = {name: documents_read(tmp_path / by, _dataset, name) for name in ("train", "valid")}
        assert not read["train"].keys() & read["valid"].keys()
        assert {number % 3 for side in read.values() for number in side} == {2}


def test_an_empty_side_by_hash_says_so(tmp_path: Path):
    one = ingest_files([str(corpus(tmp_path / "a.jsonl", 1))], tmp_path / "data")
    with pytest.raises(InputError, match="holds no token"):
        built(tmp_path / "i", [TokenDataset(one.path)], split="0.0001,99.9999,0", split_by="hash", samples=3)


def test_samples_are_read_alike_one_by_one_and_in_batches(tmp_path: Path, _dataset: TokenDataset):
    assert len(_dataset.shards) > 2
    built(tmp_path, [_dataset], subsets=("Books", "Github"), weights=(1.0, 2.0), samples=300)
    samples = GPTSamples(tmp_path, "train", [_dataset])
    order = np.random.default_rng(0).permutation(300)
    batch = samples.__getitems__(order)
    assert batch.shape == (300, 33) and batch.dtype == np.int64
    for row, number in zip(batch, order.tolist(), strict=True):
        np.testing.assert_array_equal(row, samples[number])
        spans = samples.documents_of(number)
        parts = [_dataset.document(span.document)[span.offset : span.offset + span.length] for span in spans]
        np.testing.assert_array_equal(row, np.concatenate(parts))
    for wrong in (-1, 300):
        with pytest.raises(IndexError, match=f"sample {wrong} of 300"):
            samples.tokens([0, wrong])


def test_datasets_of_different_tokenizers_are_not_blended(tmp_path: Path, _dataset: TokenDataset):
    source = corpus(tmp_path / "a.jsonl", 20)
    other = ingest_files([str(source)], tmp_path / "other", tokenizer="byte258_bos")
    with pytest.raises(ConfigError, match="different tokenizers"):
        built(tmp_path / "i", [_dataset, TokenDataset(other.path)])


def test_a_changed_mixture_goes_on_in_every_dataset_where_it_stopped(tmp_path: Path, _dataset: TokenDataset):
    subsets = ("Books", "Github", "Wiki")
    phases = [{"samples": 60, "weights": [2, 1, 0]}, {"samples": 40, "weights": [0, 1, 3]}]
    built(tmp_path / "all", [_dataset], subsets=subsets, phases=phases)
    index = tmp_path / "all"

    chosen, inner = np.load(index / "train_dataset_index.npy"), np.load(index / "train_dataset_sample_index.npy")

    assert len(chosen) == 100 == len(GPTSamples(index, "train", [_dataset]))
    assert np.bincount(chosen[:60], minlength=3).tolist() == [40, 20, 0]
    assert np.bincount(chosen[60:], minlength=3).tolist() == [0, 10, 30]
    for part in range(3):  # nothing twice, nothing left out
        assert inner[chosen == part].tolist() == list(range(int((chosen == part).sum())))
    built(tmp_path / "first", [_dataset], subsets=subsets, weights=(2, 1, 0), samples=60)
    np.testing.assert_array_equal(
        GPTSamples(tmp_path / "first", "train", [_dataset]).tokens(range(60)),
        GPTSamples(index, "train", [_dataset]).tokens(range(60)),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phases": [{"samples": 5, "weights": [1, 2]}], "weights": (1, 2), "samples": 5}, "weights of their own"),
        ({"phases": [{"samples": 5, "weights": [0, 0]}]}, "not all 0"),
        ({"phases": [{"samples": 5, "weights": [1]}, {"samples": 5, "weights": [1, 2]}]}, "as many weights"),
        ({"phases": [{"samples": 5, "weights": [1]}], "samples": 6}, "not the sum"),
    ],
)
def test_unusable_phases_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        IndexConfig(**settings)


def test_phases_need_a_weight_for_each_dataset(tmp_path: Path, _dataset: TokenDataset):
    with pytest.raises(ConfigError, match="has 2 weights for 1"):
        built(tmp_path, [_dataset], phases=[{"samples": 5, "weights": [1, 2]}])
