"""The cases ING-27, ING-29, ING-30: splits, data shorter than a sequence, extreme blends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_cases import CASES, case_path, expected, ingest_files
from pydantic import ValidationError

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError
from contracts.store import ArtifactStore
from preprocessing.config import IndexConfig
from preprocessing.samples.gpt import GPTSamples
from preprocessing.samples.index import INDEX


def index_of(datasets: list[Artifact], output: Path, **settings: Any) -> Artifact:
    inputs = {f"dataset{number}": dataset for number, dataset in enumerate(datasets)}
    store = ArtifactStore(output.parent / "store", output=output)
    return INDEX.run(IndexConfig(**settings), inputs=inputs, store=store)


GOOD_SPLITS = {
    "99,1,0": (99, 1, 0),
    "969, 30, 1": (97, 3, 0),
    "0.98,0.02,0": (98, 2, 0),
    "100,0,0": (100, 0, 0),
    "1": (100, 0, 0),
    "50,50": (50, 50, 0),
}


@pytest.mark.parametrize("split", (CASES / "ING-27" / "splits.txt").read_text(encoding="utf-8").split("\n")[:15])
def test_ing_27_each_split_string_gives_its_documents_or_an_error_that_quotes_it(tmp_path: Path, split: str):
    if split not in GOOD_SPLITS:
        with pytest.raises(ValidationError, match="split") as caught:
            IndexConfig(split=split, seq_length=4)
        assert repr(split) in str(caught.value)
        return
    dataset = ingest_files(case_path("ING-27", "hundred_docs.jsonl"), tmp_path / "data")
    artifact = index_of([dataset], tmp_path / "index", split=split, seq_length=4)

    documents = []
    for name in ("train", "valid", "test"):
        file = artifact.path / f"{name}_document_index.npy"
        documents.append(len(np.unique(np.load(file))) if file.exists() else 0)
    assert tuple(documents) == GOOD_SPLITS[split]


def test_ing_27_a_split_with_a_weight_but_no_document_is_said(tmp_path: Path):
    dataset = ingest_files(case_path("ING-27", "hundred_docs.jsonl"), tmp_path / "data")

    artifact = index_of([dataset], tmp_path / "index", split="969, 30, 1", seq_length=4)
    (warning,) = artifact.summary["warnings"]
    assert warning.startswith("test of")
    assert "holds no token" in warning

    with pytest.raises(InputError, match=r"test of .* holds no token"):
        index_of([dataset], tmp_path / "asked", split="969, 30, 1", seq_length=4, test_samples=1)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("name", ["t12", "t64", "t65", "t130"])
def test_ing_29_short_data_repeat_with_a_warning_that_has_the_numbers(tmp_path: Path, name: str):
    wanted = expected("ING-29")[name]
    dataset = ingest_files(case_path("ING-29", f"{name}.jsonl"), tmp_path / "data")
    assert dataset.summary["tokens"] == wanted["tokens"]

    artifact = index_of([dataset], tmp_path / "index", seq_length=64, samples=5)

    numbers = artifact.summary["splits"]["train"]
    assert numbers["epochs"] == wanted["epochs_for_5_samples"]
    assert numbers["samples"] == wanted["samples_then"]
    (warning,) = artifact.summary["warnings"]
    assert f"{wanted['tokens']} tokens give {wanted['samples_one_epoch']} samples of 64" in warning
    assert f"{wanted['epochs_for_5_samples']} epochs" in warning
    rows = GPTSamples(artifact.path, "train", [dataset.path]).tokens(range(wanted["samples_then"]))
    assert rows.shape == (wanted["samples_then"], 65)
    assert rows.max() <= 256


@pytest.mark.parametrize("name", ["t12", "t64"])
def test_ing_29_one_epoch_without_a_sample_is_refused(tmp_path: Path, name: str):
    dataset = ingest_files(case_path("ING-29", f"{name}.jsonl"), tmp_path / "data")

    with pytest.raises(InputError, match=rf"{name[1:]} tokens give 0 samples of 64"):
        index_of([dataset], tmp_path / "index", seq_length=64)
    assert not (tmp_path / "index").exists()


BLENDS = [
    ((0.999, 0.001), (999, 1)),
    ((0.001, 0.999), (1, 999)),
    ((1, 0), (1000, 0)),
    ((0, 1), (0, 1000)),
    ((3, 1), (750, 250)),
    ((1e-09, 1), (1, 999)),
    ((0.5, 0.5), (500, 500)),
]


@pytest.mark.parametrize(("weights", "wanted"), BLENDS, ids=[str(weights) for weights, _ in BLENDS])
def test_ing_30_extreme_weights_draw_their_share(tmp_path: Path, weights: tuple[float, ...], wanted: tuple[int, ...]):
    datasets = [ingest_files(case_path("ING-30", f"{name}.jsonl"), tmp_path / name) for name in ("a", "b")]

    artifact = index_of(datasets, tmp_path / "index", seq_length=64, samples=1000, weights=weights)

    samples = GPTSamples(artifact.path, "train", [dataset.path for dataset in datasets])
    drawn = np.bincount(np.load(artifact.path / "train_dataset_index.npy"), minlength=2)
    np.testing.assert_allclose(drawn, wanted, atol=1)
    assert samples.tokens(range(len(samples))).shape == (len(samples), 65)


@pytest.mark.parametrize("weights", [(-1, 1), (0, 0), (float("nan"), 1)])
def test_ing_30_impossible_weights_are_refused(weights: tuple[float, ...]):
    with pytest.raises(ValidationError, match="weights"):
        IndexConfig(seq_length=64, samples=10, weights=weights)


def test_weights_must_be_one_for_each_dataset(tmp_path: Path):
    dataset = ingest_files(case_path("ING-30", "a.jsonl"), tmp_path / "a")

    with pytest.raises(ConfigError, match="2 weights for 1 datasets"):
        index_of([dataset], tmp_path / "index", seq_length=64, samples=10, weights=(1, 1))
