"""Copies that several ranks hold stay equal bit for bit, and resuming is exact also with dropout and bf16."""

from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor
from training_cases import curve, new_trainer, tiny_config
from whole_checkpoint import whole_tensors

from training.checkpoint import load_checkpoint, save_checkpoint
from training.config import PretrainConfig


def _copies(config: PretrainConfig) -> dict[str, Tensor]:
    """This rank's parts after training, under its place in the mesh where the part is cut."""
    trainer = new_trainer(config)
    curve(trainer, 5)
    mesh, found = trainer.mesh, {}
    for p in trainer.parameters:
        cut = (mesh.rank("dp"), mesh.rank("tp") if p.spec.tp_dim is not None else None)
        found[f"{p.spec.canonical_name} {cut}"] = p.value.clone()
    return found


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 2), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_copy_of_a_parameter_is_bit_equal_after_training(layout: tuple[int, int, int], precision: str) -> None:
    """Norms over tensor-parallel ranks under sequence parallelism; the tied table on the first and last stage."""
    results = run_on_ranks(layout[0] * layout[1] * layout[2], _copies, tiny_config("gpt2", layout, precision=precision))

    seen: dict[str, Tensor] = {}
    compared = 0
    for result in results:
        for name, value in result.items():
            if name in seen:
                compared += 1
                assert torch.equal(value, seen[name]), name
            seen[name] = value
    assert compared > 0


def _in_two_parts(config: PretrainConfig, root: Path) -> bool:
    whole = new_trainer(config)
    expected = curve(whole, 2)
    save_checkpoint(whole, root, keep_last=1)
    expected += curve(whole, 4)
    resumed = new_trainer(config)
    load_checkpoint(resumed, root / "step-00000002")
    found = curve(resumed, 4)
    moments = all(
        torch.equal(a, b)
        for n in range(len(whole.parameters))
        for a, b in zip(whole.optimizer.moments(n).values(), resumed.optimizer.moments(n).values(), strict=True)
    )
    return found == expected[2:] and moments


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1)], ids=str)
def test_resuming_with_dropout_gives_the_same_numbers_and_moments(
    layout: tuple[int, int, int], precision: str, tmp_path: Path
) -> None:
    config = tiny_config("gpt2", layout, precision=precision, micro_batch_size=1, model={"dropout": 0.1})

    assert all(run_on_ranks(config.layout.world_size, _in_two_parts, config, tmp_path))


def _save_at_zero(config: PretrainConfig, root: Path) -> list[tuple[float, float]]:
    trainer = new_trainer(config)
    save_checkpoint(trainer, root, keep_last=1)
    again = new_trainer(config.model_copy(update={"seed": 99}))
    load_checkpoint(again, root / "step-00000000")
    assert curve(again, 2) == curve(trainer, 2)
    return curve(trainer, 1)


def test_a_checkpoint_before_the_first_update_has_moments_of_zero_and_can_be_read(tmp_path: Path) -> None:
    run_on_ranks(1, _save_at_zero, tiny_config("llama"), tmp_path)

    tensors = whole_tensors(tmp_path / "step-00000000")
    assert not any(t.any() for name, t in tensors.items() if name.startswith("optim."))
