"""Saving behind training, and what a disk that refuses does to a run."""

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_forked
from ranks import run_on_ranks
from training_cases import PatternSource, curve, new_trainer, tiny_config

from contracts.errors import ShardlineError
from training.checkpoint import load_checkpoint, save_checkpoint
from training.config import PretrainConfig
from training.mesh import init_single_rank
from training.saver import Saver
from training.saving import Save
from training.step_folders import clear_unfinished, find_latest, list_checkpoints

QUICK = {"save_retry_s": 0.0}


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _save_both_ways(config: PretrainConfig, root: Path) -> None:
    trainer = new_trainer(config)
    curve(trainer, 3)
    save_checkpoint(trainer, root / "at once", keep_last=1)
    saver = Saver(trainer, root / "behind")
    saver.save()
    curve(trainer, 2)  # changes every tensor before the save ends
    saver.wait()


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_a_save_behind_training_holds_the_state_at_its_step(layout: tuple[int, int, int], tmp_path: Path) -> None:
    config = tiny_config("llama", layout, async_save=True, optimizer={"ema_decay": 0.9})

    run_on_ranks(config.layout.world_size, _save_both_ways, config, tmp_path)

    at_once = _files(tmp_path / "at once" / "step-00000003")
    assert _files(tmp_path / "behind" / "step-00000003") == at_once
    assert find_latest(tmp_path / "behind", digests=True)[1] == []


def _save_every_step(config: PretrainConfig, root: Path) -> None:
    trainer = new_trainer(config)
    saver = Saver(trainer, root)
    for _ in range(8):
        curve(trainer, 1)
        saver.look()
        saver.save()
    saver.save(is_required=True)
    again = new_trainer(config)
    load_checkpoint(again, root / "step-00000008")
    assert curve(again, 2) == curve(trainer, 2)


def test_saves_at_every_step_follow_each_other(tmp_path: Path) -> None:
    config = tiny_config("gpt2", (1, 1, 2), async_save=True, keep_last=3)

    run_on_ranks(2, _save_every_step, config, tmp_path)

    assert [item.step for item in list_checkpoints(tmp_path, digests=True) if item.problem is None] == [8, 7, 6]
    assert not list(tmp_path.glob("*.tmp"))


def _fail(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    write, left = Save.write, [times]

    def refuse(path: Any, mode: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing(save: Save) -> None:
        if left[0] > 0:
            left[0] -= 1
            save._writer.fs.create_stream = refuse  # type: ignore[method-assign]
        write(save)

    monkeypatch.setattr(Save, "write", failing)


def _save_on_a_bad_disk(
    config: PretrainConfig, root: Path, failures: int, is_required: bool
) -> tuple[list[int], int, str]:
    """Steps of the checkpoints that came to be, saves given up, and the error, where the disk of rank 1 fails."""
    trainer = new_trainer(config)
    saver, message = Saver(trainer, root), ""
    curve(trainer, 1)
    saver.save()
    saver.wait()
    curve(trainer, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if trainer.mesh.rank("dp") == 1:
            _fail(monkeypatch, failures)
        try:
            saver.save(is_required=is_required)
            curve(trainer, 1)
            saver.look()
            saver.wait()
        except ShardlineError as error:
            message = str(error)
    return sorted(item.step for item in list_checkpoints(root)), saver.failed_saves, message


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "behind"])
def test_a_disk_that_recovers_costs_nothing(is_async: bool, tmp_path: Path) -> None:
    config = tiny_config("gpt2", (1, 1, 2), async_save=is_async, save_retries=2, **QUICK)

    found = run_on_ranks(2, _save_on_a_bad_disk, config, tmp_path, 2, False)

    assert found == [([1, 2], 0, "")] * 2


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "behind"])
def test_a_disk_that_stays_bad_costs_one_checkpoint(is_async: bool, tmp_path: Path) -> None:
    config = tiny_config("gpt2", (1, 1, 2), async_save=is_async, save_retries=1, **QUICK)

    found = run_on_ranks(2, _save_on_a_bad_disk, config, tmp_path, 2, False)

    assert found == [([1], 1, "")] * 2
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("policy", "is_required"), [("stop", False), ("continue", True)])
def test_a_checkpoint_that_must_be_is_an_error_on_every_rank(policy: str, is_required: bool, tmp_path: Path) -> None:
    config = tiny_config("gpt2", (1, 1, 2), async_save=True, save_retries=0, on_save_error=policy)

    found = run_on_ranks(2, _save_on_a_bad_disk, config, tmp_path, 9, is_required)

    assert [(steps, failed) for steps, failed, _ in found] == [([1], 1)] * 2
    assert len({message for _, _, message in found}) == 1
    assert f"Step 2: the checkpoint could not be written under {tmp_path} (rank 1: OSError: " in found[0][2]
    assert "No space left on device" in found[0][2]


def _die_while_saving(root: Path) -> None:
    torch.set_num_threads(1)
    init_single_rank()
    trainer = new_trainer(tiny_config("gpt2", async_save=True))
    saver = Saver(trainer, root)
    curve(trainer, 1)
    saver.save()
    saver.wait()
    reached, write = threading.Event(), Save.write

    def slow(save: Save) -> None:
        write(save)
        reached.set()
        threading.Event().wait()

    Save.write = slow  # type: ignore[method-assign]
    trainer.train_step(PatternSource())
    saver.save()
    reached.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_killed_while_it_saves_behind_training_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    code = run_forked(_die_while_saving, tmp_path)

    assert code == -signal.SIGKILL
    assert (tmp_path / "step-00000002.tmp" / "__0_0.distcp").is_file()
    clear_unfinished(tmp_path)
    latest, warnings = find_latest(tmp_path, digests=True)
    assert latest is not None
    assert (latest.step, warnings) == (1, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
