"""Which checkpoint is the newest whole one, and what is said about the others."""

import json
import shutil
from pathlib import Path

import pytest

from contracts.digests import sha256_of
from contracts.errors import InputError
from training.step_folders import (
    CheckpointInfo,
    find_latest,
    list_checkpoints,
    read_info,
    resolve_step_folder,
    step_folder_name,
)

CASE = Path(__file__).parents[2] / "cases" / "TRN-31"


def _native(root: Path, step: int) -> Path:
    folder = root / step_folder_name(step)
    folder.mkdir(parents=True)
    data = folder / "__0_0.distcp"
    data.write_bytes(b"tensors" * 10)
    files = {data.name: {"bytes": data.stat().st_size, "sha256": sha256_of(data)}}
    info = CheckpointInfo(step, step * 8, 32, {}, {}, True, {"a.weight": (2, 3)}, files)
    (folder / "manifest.json").write_text(info.to_json())
    return folder


def test_trn_31_a_cut_off_megatron_checkpoint_is_passed_over_with_a_warning() -> None:
    latest, warnings = find_latest(CASE / "legacy")

    assert latest is not None
    assert latest.step == 200
    assert latest.path.name == "iter_0000200"
    assert "iter_0000300 (step 300) is passed over: mp_rank_00/model_optim_rng.pt is cut off" in warnings[0]
    assert warnings[1] == "latest_checkpointed_iteration.txt names 300; the newest whole checkpoint is 200"


def test_trn_31_a_distributed_checkpoint_without_metadata_is_passed_over_with_a_warning() -> None:
    latest, warnings = find_latest(CASE / "dcp")

    assert latest is not None
    assert latest.step == 200
    assert warnings == [
        "checkpoint step-300 (step 300) is passed over: it has no .metadata, so its save did not finish"
    ]


@pytest.mark.parametrize("tree", ["legacy", "dcp"])
def test_trn_31_listing_shows_300_as_incomplete(tree: str) -> None:
    listed = {item.step: item.problem for item in list_checkpoints(CASE / tree)}

    assert listed[200] is None
    assert listed[300] is not None


def test_trn_31_with_no_whole_checkpoint_nothing_starts_from_nothing(tmp_path: Path) -> None:
    shutil.copytree(CASE / "legacy", tmp_path / "tree")
    shutil.rmtree(tmp_path / "tree" / "iter_0000200")

    with pytest.raises(
        InputError, match=r"no checkpoint is whole \(iter_0000300: mp_rank_00/model_optim_rng.pt is cut off"
    ):
        find_latest(tmp_path / "tree")


def test_trn_31_the_unreadable_metadata_of_a_stand_in_is_refused_in_words() -> None:
    from training.safe_pickle import read_dcp_metadata

    with pytest.raises(InputError, match=r"step-200/\.metadata: not the metadata of a distributed checkpoint"):
        read_dcp_metadata(CASE / "dcp" / "step-200")


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert find_latest(tmp_path) == (None, [])
    with pytest.raises(InputError, match="holds no checkpoint"):
        resolve_step_folder(tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json, so its save did not finish"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not a checkpoint manifest"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"half"), "has 4 bytes, and 70 were written"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"x" * 70), "its sha256 differs"),
    ],
)
def test_a_damaged_native_checkpoint_is_passed_over_by_name(tmp_path: Path, damage: object, reason: str) -> None:
    _native(tmp_path, 100)
    damage(_native(tmp_path, 200))  # type: ignore[operator]

    latest, warnings = find_latest(tmp_path, digests=True)

    assert latest is not None
    assert latest.step == 100
    assert "step-00000200" in warnings[0]
    assert reason in warnings[0]


def test_unfinished_folders_do_not_count(tmp_path: Path) -> None:
    _native(tmp_path, 100)
    (tmp_path / "step-00000200.tmp").mkdir()

    assert [item.step for item in list_checkpoints(tmp_path)] == [100]
    assert resolve_step_folder(tmp_path) == tmp_path / "step-00000100"


def test_a_manifest_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = _native(tmp_path, 7)
    info = read_info(folder)

    assert (info.step, info.consumed_samples, info.consumed_tokens) == (7, 56, 1792)
    assert info.parameters == {"a.weight": (2, 3)}
    assert json.loads((folder / "manifest.json").read_text())["format"] == "shardline-checkpoint-1"


def test_retention_counts_steps_as_numbers_and_never_takes_the_last_whole_one(tmp_path: Path) -> None:
    from training.checkpoint import prune

    for step in (9, 10, 100):
        _native(tmp_path, step)
    prune(tmp_path, 2)
    assert [item.step for item in list_checkpoints(tmp_path)] == [100, 10]

    (tmp_path / step_folder_name(100) / "manifest.json").unlink()
    prune(tmp_path, 1)
    assert find_latest(tmp_path)[0] is not None

    shutil.rmtree(tmp_path / step_folder_name(10))
    prune(tmp_path, 1)
    assert [item.step for item in list_checkpoints(tmp_path)] == [100]


@pytest.mark.parametrize(
    "change",
    [
        {"files": [1]},
        {"files": {"../../secret": {"bytes": 1, "sha256": "0"}}},
        {"files": {"a": 5}},
        {"model": None},
        {"layout": []},
        {"step": "x"},
        {"seq_length": True},
        {"parameters": {"a": 5}},
    ],
)
def test_a_strangers_manifest_with_wrong_values_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = _native(tmp_path, 100) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(InputError, match="not a checkpoint manifest"):
        read_info(path.parent)
