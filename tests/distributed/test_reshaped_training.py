"""Training goes on from a reshaped checkpoint as if it had never been cut otherwise."""

import pytest
from conversion_cases import convert
from ranks import run_on_ranks
from training_cases import curve, new_trainer, relative_difference, tiny_config

from training.checkpoint import load_checkpoint, save_checkpoint


def _start(config, root):
    trainer = new_trainer(config)
    curve(trainer, 3)
    save_checkpoint(trainer, root, keep_last=1)
    return curve(trainer, 3)


def _go_on(config, folder):
    trainer = new_trainer(config)
    load_checkpoint(trainer, folder)
    assert (trainer.step, trainer.consumed_samples) == (3, 24)
    return curve(trainer, 3)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_losses_after_a_reshape_are_those_of_the_uninterrupted_run(tmp_path, family):
    uninterrupted = run_on_ranks(2, _start, tiny_config(family, (2, 1, 1)), tmp_path / "run")[0]

    cut = convert(tmp_path / "run", tmp_path / "cut", pipeline_parallel=2).path / "step-00000003"
    again = convert(cut, tmp_path / "again", tensor_parallel=2, data_parallel=2).path / "step-00000003"
    back = convert(again, tmp_path / "back", tensor_parallel=2).path / "step-00000003"

    after_cut = run_on_ranks(2, _go_on, tiny_config(family, (1, 2, 1)), cut)[0]
    after_again = run_on_ranks(4, _go_on, tiny_config(family, (2, 1, 2)), again)[0]
    after_back = run_on_ranks(2, _go_on, tiny_config(family, (2, 1, 1)), back)[0]
    for losses in (after_cut, after_again):
        assert relative_difference(losses, uninterrupted) < 1e-12
    assert after_back == uninterrupted


@pytest.mark.parametrize("kind", ["muon", "sgd"])
def test_every_optimizer_and_the_moving_average_survive_a_reshape(tmp_path, kind):
    changes = {"optimizer": {"kind": kind, "ema_decay": 0.9}, "rampup_batch_size": (4, 4, 12), "micro_batch_size": 1}
    uninterrupted = run_on_ranks(2, _start, tiny_config("llama", (2, 1, 1), **changes), tmp_path / "run")[0]

    cut = convert(tmp_path / "run", tmp_path / "cut", pipeline_parallel=2).path / "step-00000003"
    back = convert(cut, tmp_path / "back", tensor_parallel=2, data_parallel=2).path / "step-00000003"

    for layout, folder in (((1, 2, 1), cut), ((2, 1, 2), back)):
        config = tiny_config("llama", layout, **changes)
        found = run_on_ranks(config.layout.world_size, _resume, config, folder)[0]
        assert relative_difference(found, uninterrupted) < 1e-12


def _resume(config, folder):
    trainer = new_trainer(config)
    load_checkpoint(trainer, folder)
    assert (trainer.step, trainer.consumed_samples) == (3, 4 + 4 + 4)
    return curve(trainer, 3)
