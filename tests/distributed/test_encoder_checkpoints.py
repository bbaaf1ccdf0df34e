"""Checkpoints of encoders with decoders: parameters that several stages hold, also two stages of one rank."""

from pathlib import Path
from typing import Any

import pytest
from encoder_cases import SHORT, EncoderSource
from ranks import run_on_ranks
from training_cases import SEQ_LENGTH, new_trainer, relative_difference, tiny_config

from training.checkpoint import load_checkpoint, save_checkpoint
from training.step_folders import step_folder_name

MODEL = {**SHORT, "num_layers": 3, "decoder_layers": 3}


def _train(layout: tuple[int, int, int], virtual: int, root: Path, steps: int, start: int) -> list[tuple[float, float]]:
    more = {"virtual_pipeline": virtual}
    optimizer = {"ema_decay": 0.9}
    config = tiny_config(
        "t5", layout, train_steps=6, model=dict(MODEL), decoder_seq_length=16, layout_more=more, optimizer=optimizer
    )
    trainer = new_trainer(config)
    source = EncoderSource(config.model, SEQ_LENGTH, 16)
    if start:
        load_checkpoint(trainer, root / step_folder_name(start))
    found = [trainer.train_step(source) for _ in range(steps)]
    if not start:
        save_checkpoint(trainer, root, keep_last=1)
    return [(step.loss_nats, step.gradient_norm) for step in found]


def _run(layout: tuple[int, int, int], virtual: int, root: Path, *, steps: int, start: int = 0) -> Any:
    tp, pp, dp = layout
    return run_on_ranks(tp * pp * dp, _train, layout, virtual, root, steps, start)[0]


INTERLEAVED, TENSOR = ((1, 2, 1), 2), ((2, 1, 1), 1)


@pytest.mark.parametrize(("saved", "loaded"), [(INTERLEAVED, TENSOR), (TENSOR, INTERLEAVED)], ids=str)
def test_a_run_of_an_encoder_with_a_decoder_goes_on_at_another_layout(tmp_path: Path, saved: Any, loaded: Any) -> None:
    whole = _run((1, 1, 1), 1, tmp_path / "whole", steps=5)

    first = _run(*saved, tmp_path / "run", steps=2)
    rest = _run(*loaded, tmp_path / "run", steps=3, start=2)

    assert relative_difference([*first, *rest], whole) < 1e-12
