"""Recorded loss curves: the layers, initial weights, data order, optimizer and schedule have not changed.

A change of these numbers forks every run: bump the stage's version with it. Recorded by
`PYTHONPATH=tests/support python tests/golden/test_training_curves.py`.
"""

import json
from pathlib import Path

import pytest
from ranks import run_on_ranks
from training_cases import curve, new_trainer, tiny_config

from training.config import PretrainConfig

RECORDED = Path(__file__).with_name("training_curves.json")
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, dropout": ("gpt2", {"model": {"dropout": 0.1}}),
    "gpt2, untied": ("gpt2", {"model": {"tied_embeddings": False}}),
    "llama": ("llama", {}),
}
TOLERANCE = 1e-9  # float64; other processors add in another order


def _curve(config: PretrainConfig) -> list[tuple[float, float]]:
    return curve(new_trainer(config), config.train_steps)


def _measured(name: str) -> list[tuple[float, float]]:
    family, changes = CASES[name]
    found: list[tuple[float, float]] = run_on_ranks(1, _curve, tiny_config(family, **changes))[0]
    return found


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_give_the_recorded_losses_and_gradient_norms(name: str) -> None:
    recorded = json.loads(RECORDED.read_text())[name]

    for found, expected in zip(_measured(name), recorded, strict=True):
        assert found == pytest.approx(tuple(expected), rel=TOLERANCE)


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({name: _measured(name) for name in CASES}, indent=1) + "\n")
