"""Rows that grow on the way: the same steps at every layout, and after a resume in the middle of a phase."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_on_ranks
from training_cases import SEQ_LENGTH, PatternSource, new_trainer, relative_difference, tiny_config

from training.checkpoint import load_checkpoint, save_checkpoint
from training.config import PretrainConfig
from training.rows import CurriculumSamples

Curve = list[tuple[float, float]]
PHASES = [{"steps": 4, "seq_length": 8}, {"steps": 2, "seq_length": 16}, {}]


def _config(layout: tuple[int, int, int], **more: Any) -> PretrainConfig:
    return tiny_config("llama", layout, phases=PHASES, train_steps=8, **more)


def _steps(trainer: Any, steps: int) -> Curve:
    source = CurriculumSamples(PatternSource(), trainer.config.curriculum)  # type: ignore[arg-type]
    results = [trainer.train_step(source) for _ in range(steps)]
    return [(r.loss_nats, r.gradient_norm) for r in results]


def _train(config: PretrainConfig, root: Path) -> Curve:
    """Train 3 steps, save, train 5 more in a fresh trainer."""
    trainer = new_trainer(config)
    found = _steps(trainer, 3)
    folder = save_checkpoint(trainer, root, keep_last=1)
    again = new_trainer(config.model_copy(update={"seed": 99}))
    load_checkpoint(again, folder)
    return found + _steps(again, 5)


def _whole(config: PretrainConfig) -> Curve:
    return _steps(new_trainer(config), 8)


@pytest.fixture(scope="module")
def reference() -> Curve:
    return run_on_ranks(1, _whole, _config((1, 1, 1)))[0]


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)], ids=str)
def test_growing_rows_train_alike_at_every_layout_and_across_a_resume(
    layout: tuple[int, int, int], reference: Curve, tmp_path: Path
) -> None:
    found = run_on_ranks(int(np.prod(layout)), _train, _config(layout), tmp_path)[0]

    assert relative_difference(found, reference) < 1e-12


def test_rows_are_the_parts_of_samples_in_order() -> None:
    curriculum = _config((1, 1, 1)).curriculum
    source = CurriculumSamples(PatternSource(), curriculum)  # type: ignore[arg-type]

    steps = [source.tokens(range(step * 8, step * 8 + 8)) for step in range(4)]

    whole = PatternSource().tokens(range(8))
    assert SEQ_LENGTH == 32 and [rows.shape for rows in steps] == [(8, 9)] * 4
    for part, rows in enumerate(steps):
        np.testing.assert_array_equal(rows, whole[:, part * 8 : part * 8 + 9])
