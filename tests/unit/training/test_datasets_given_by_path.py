"""Datasets that a run is given by path: what of them is identity, and that there are not two answers."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.fingerprint import Recipe
from contracts.store import ArtifactStore, Workspace
from evaluation.config import EvaluateConfig
from evaluation.stage import EVALUATE
from preprocessing.config import IndexConfig
from preprocessing.dataset.indexed_dataset import PairWriter
from preprocessing.dataset.token_dataset import TokenDataset, pair_files
from preprocessing.stages import INDEX
from training.config import PretrainConfig
from training.stage import PRETRAIN


def write_pair(prefix: Path, tokens: list[int]) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = PairWriter(prefix, np.dtype("<u2"))
    writer.append(np.array(tokens), np.array([len(tokens)]))
    writer.finish()
    return prefix


def make_dataset(store: ArtifactStore) -> Artifact:
    def work(workspace: Workspace) -> dict[str, int]:
        write_pair(workspace.path / "shard", [1, 2, 3])
        return {"tokens": 3}

    return store.make("dataset", "tiny", Recipe("ingest", 1), work)


def test_the_files_of_a_prefix_of_a_folder_and_of_an_artifact(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "pairs" / "b.v2", [1])
    write_pair(tmp_path / "pairs" / "a", [2])

    assert list(pair_files(prefix)) == [".bin", ".idx"]
    assert pair_files(f"{prefix}.bin") == pair_files(prefix)
    assert list(pair_files(tmp_path / "pairs")) == ["/a.bin", "/a.idx", "/b.v2.bin", "/b.v2.idx"]
    assert all(file.is_file() for file in pair_files(tmp_path / "pairs").values())
    assert TokenDataset(tmp_path / "pairs").num_tokens == 2
    assert pair_files(make_dataset(ArtifactStore(tmp_path / "store")).path) == {}


def test_a_folder_of_pairs_is_digested_by_every_stage(tmp_path: Path) -> None:
    folder = tmp_path / "pairs"
    write_pair(folder / "a", [1, 2])
    write_pair(folder / "b", [3])
    store = ArtifactStore(tmp_path / "store")

    pretrain = PRETRAIN.recipe(PretrainConfig(datasets=(str(folder),)), inputs={}, store=store)
    evaluate = EVALUATE.recipe(EvaluateConfig(data=str(folder)), inputs={}, store=store)
    index = INDEX.recipe(IndexConfig(datasets=(str(folder),)), inputs={}, store=store)

    assert sorted(pretrain.raw) == [f"dataset0/{name}" for name in ("a.bin", "a.idx", "b.bin", "b.idx")]
    assert sorted(evaluate.raw) == [f"data/{name}" for name in ("a.bin", "a.idx", "b.bin", "b.idx")]
    assert sorted(index.raw) == ["dataset0/a.idx", "dataset0/b.idx"]


def test_a_rebuilt_dataset_of_the_same_bytes_does_not_fork_a_run(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")

    def recipes() -> tuple[Recipe, Recipe]:
        path = str(make_dataset(store).path)
        return (
            PRETRAIN.recipe(PretrainConfig(datasets=(path,)), inputs={}, store=store),
            EVALUATE.recipe(EvaluateConfig(data=path), inputs={}, store=store),
        )

    first = make_dataset(store)
    before, manifest = recipes(), (first.path / "manifest.json").read_bytes()
    shutil.rmtree(first.path)
    time.sleep(0.01)

    assert recipes() == before
    assert (first.path / "manifest.json").read_bytes() != manifest


def test_artifacts_and_paths_at_once_are_refused(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    dataset = make_dataset(store)
    settings = PretrainConfig(datasets=(str(dataset.path),))

    with pytest.raises(ConfigError, match=r"both dataset artifacts and pretrain\.datasets are given\. Keep one\."):
        PRETRAIN.run(settings, inputs={"dataset0": dataset}, store=store)
    with pytest.raises(ConfigError, match=r"both a checkpoint artifact and evaluate\.checkpoint are given"):
        EVALUATE.run(EvaluateConfig(checkpoint=str(write_step(tmp_path))), inputs={"checkpoint": dataset}, store=store)


def write_step(folder: Path) -> Path:
    """A native step folder; its content does not matter."""
    from models import tiny_model, write_model

    return write_model(folder / "model", tiny_model(num_layers=1))
