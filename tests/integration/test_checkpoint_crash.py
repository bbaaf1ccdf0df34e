"""A save that dies at any call that changes the disk leaves a whole checkpoint behind."""

from pathlib import Path

import pytest
import torch
from processes import kill_at, run_forked

from training.checkpoint import prune, write_checkpoint
from training.step_folders import CheckpointInfo, clear_unfinished, find_latest, list_checkpoints


def _save(root: Path, step: int, number: int, is_after: bool) -> None:
    torch.set_num_threads(1)
    if number:
        kill_at(number, is_after=is_after)
    info = CheckpointInfo(step, step * 8, 32, {}, {}, False, {"a": (2, 3)})
    write_checkpoint(root / f"step-{step:08d}", {"a": torch.full((2, 3), float(step))}, info)
    prune(root, 1)


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_a_save_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, step: int, is_after: bool
) -> None:
    """Step 1 is replaced by itself, step 2 makes step 1 superfluous."""
    survivors = set()
    for number in range(1, 60):
        root = tmp_path / str(number)
        root.mkdir()
        assert run_forked(_save, root, 1, 0, False) == 0
        code = run_forked(_save, root, step, number, is_after)
        clear_unfinished(root)
        latest, _ = find_latest(root, digests=True)
        assert latest is not None, number
        survivors.add(latest.step)
        assert not list(root.glob("*.tmp")) + list(root.glob("*.old"))
        if code == 0:
            break
    else:
        raise AssertionError("the save never ran to its end")
    assert survivors == {1, step}
    assert [item.step for item in list_checkpoints(root)] == [step]
