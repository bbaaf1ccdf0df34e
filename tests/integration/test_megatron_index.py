"""Sample indices and blends equal those of Megatron-LM, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_cases import SMALL, assert_same_array, case_ids, cases, roots

from contracts.store import ArtifactStore
from preprocessing.config import IndexConfig
from preprocessing.dataset.indexed_dataset import IndexedDataset
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples import kernels
from preprocessing.samples.gpt import GPTSamples
from preprocessing.samples.index import INDEX, build_index
from preprocessing.samples.sample_index import build_sample_index
from preprocessing.samples.splits import SPLITS, parse_split, split_range

INDICES = ("document_index", "sample_index", "shuffle_index")


@pytest.fixture(params=["numpy", "numba"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COMPILE_ABOVE", 0 if request.param == "numba" else 10**12)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize(("root", "case"), cases("gpt"), ids=case_ids("gpt"))
def test_sample_indices_are_megatrons(root: Path, case: dict[str, Any]):
    dataset = IndexedDataset(root / "datasets" / case["dataset"])
    for name, bounds, num_samples in zip(SPLITS, parse_split(case["split"]), case["sizes"], strict=True):
        if bounds is None:
            continue
        built = build_sample_index(
            dataset.lengths,
            split_range(bounds, len(dataset)),
            seq_length=case["sequence_length"],
            num_samples=num_samples,
            seed=case["random_seed"],
            extra_tokens=int(case["add_extra_token_to_sequence"]),
            keeps_partial=name == "valid" and not case["drop_last_partial_validation_sequence"],
        )
        for kind in INDICES:
            wanted = np.load(root / "gpt" / case["name"] / f"{name}_{kind}.npy")
            found = getattr(built, kind)
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("root", roots(), ids=lambda root: "small" if root == SMALL else "all")
def test_blend_helpers_are_megatrons(root: Path):
    files = sorted((root / "blend").glob("*.npz"))
    assert files
    for file in files:
        wanted = np.load(file)
        if "weights" in wanted:
            found = kernels.blend(wanted["weights"], int(wanted["size"]))
        else:
            found = kernels.blend_exhaustively(wanted["sizes"])
        np.testing.assert_array_equal(found[0], wanted["dataset_index"])
        np.testing.assert_array_equal(found[1], wanted["dataset_sample_index"])


def _settings(case: dict[str, Any], root: Path) -> IndexConfig:
    names = case.get("datasets") or [case["dataset"]]
    train, valid, test = case["sizes"]
    return IndexConfig(
        datasets=tuple(str(root / "datasets" / name) for name in names),
        weights=case.get("weights"),
        seq_length=case["sequence_length"],
        samples=train,
        valid_samples=valid,
        test_samples=test,
        seed=case["random_seed"],
        split=case["split"],
    )


WHOLE = [item for item in cases("blend_full") if item[1]["split"]]
WHOLE_IDS = [f"{case['name']}{'' if root == SMALL else '-all'}" for root, case in WHOLE]


@pytest.mark.parametrize(("root", "case"), WHOLE, ids=WHOLE_IDS)
def test_a_blend_of_datasets_is_megatrons(tmp_path: Path, root: Path, case: dict[str, Any]):
    settings = _settings(case, root)
    datasets = [TokenDataset(path) for path in settings.datasets]

    build_index(settings, datasets, tmp_path, note=lambda _: None)

    for split, part in case["splits"].items():
        if part is None:
            assert not list(tmp_path.glob(f"{split}_*"))
            continue
        folder = root / "blend_full" / case["name"]
        for number in range(len(datasets)):
            for kind in INDICES:
                found = tmp_path / f"dataset{number}" / f"{split}_{kind}.npy"
                assert_same_array(found, folder / f"{split}_part{number}_{kind}.npy")
        wanted = np.load(folder / f"{split}_blend.npz")
        np.testing.assert_array_equal(np.load(tmp_path / f"{split}_dataset_index.npy"), wanted["dataset_index"])
        np.testing.assert_array_equal(
            np.load(tmp_path / f"{split}_dataset_sample_index.npy"), wanted["dataset_sample_index"]
        )
        rows = GPTSamples(tmp_path, split, datasets).tokens(range(len(wanted["tokens"])))
        np.testing.assert_array_equal(rows[:, :-1], wanted["tokens"])
        np.testing.assert_array_equal(rows[:, 1:], wanted["labels"])


PLAIN = [
    item
    for item in cases("gpt")
    if item[1]["add_extra_token_to_sequence"] and item[1]["drop_last_partial_validation_sequence"]
]
PLAIN_IDS = [f"{case['name']}{'' if root == SMALL else '-all'}" for root, case in PLAIN]


@pytest.mark.parametrize(("root", "case"), PLAIN, ids=PLAIN_IDS)
def test_the_index_stage_reads_the_tokens_that_megatron_reads(tmp_path: Path, root: Path, case: dict[str, Any]):
    artifact = INDEX.run(_settings(case, root), store=ArtifactStore(tmp_path / "store", output=tmp_path / "index"))

    for split in case["splits"]:
        items = root / "gpt" / case["name"] / f"{split}_items.npz"
        if not items.is_file():
            continue
        wanted = np.load(items)
        rows = GPTSamples(artifact.path, split).tokens(wanted["sample_ids"])
        np.testing.assert_array_equal(rows[:, :-1], wanted["tokens"])
        np.testing.assert_array_equal(rows[:, 1:], wanted["labels"])


@pytest.mark.parametrize("name", ["a", "b", "b2", "merged"])
def test_a_foreign_dataset_is_read_as_megatron_reads_it(name: str):
    dataset = IndexedDataset(SMALL / "datasets" / name)
    wanted = np.load(SMALL / "datasets" / f"{name}_read.npz")

    np.testing.assert_array_equal(dataset.lengths, wanted["sequence_lengths"])
    np.testing.assert_array_equal(dataset.pointers, wanted["sequence_pointers"])
    np.testing.assert_array_equal(dataset.document_bounds, wanted["document_indices"])
    whole = [dataset.sequence(int(number)) for number in wanted["whole_ids"]]
    np.testing.assert_array_equal(np.concatenate(whole), wanted["whole_tokens"])
    parts = [dataset.sequence(*map(int, row)) for row in wanted["part_args"]]
    np.testing.assert_array_equal(np.concatenate(parts), wanted["part_tokens"])
    assert not list(dataset.problems())
