"""The bytes of a checkpoint are its state's alone."""

from pathlib import Path

import torch

from training.checkpoint import write_checkpoint
from training.step_folders import CheckpointInfo


def _info() -> CheckpointInfo:
    return CheckpointInfo(1, 8, 4, {}, {}, False, {"weight": (2, 3)})


def test_one_state_saved_in_two_places_gives_the_same_files_without_the_name_of_the_place(tmp_path: Path) -> None:
    for place in ("first", "second"):
        write_checkpoint(tmp_path / place / "step-00000001", {"weight": torch.arange(6.0).reshape(2, 3)}, _info())

    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / place / "step-00000001").iterdir()}
        for place in ("first", "second")
    )
    assert first == second
    assert not [name for name, data in first.items() if str(tmp_path).encode() in data]
