"""Recorded fingerprints of training runs: a refactor of the settings must not fork every run's id."""

import pytest

from contracts.configuration import identity
from contracts.fingerprint import Recipe
from training.config import PretrainConfig
from training.stage import PRETRAIN

CASES: dict[str, tuple[dict[str, object], str]] = {
    "defaults": (
        {},
        "d32e6bfa24e14c9f50596a4fe89dea13",
    ),
    "llama": (
        {"model": {"family": "llama", "hidden_size": 512, "num_query_groups": 2}, "seq_length": 1024},
        "fc18358875a34859ee49629b6094253f",
    ),
    "cut": (
        {"layout": {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2}},
        "c0583f1d804a6ca60c184f25814a08b7",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_keeps_its_fingerprint(name: str) -> None:
    changes, recorded = CASES[name]
    settings = PretrainConfig.model_validate(changes)

    recipe = Recipe(PRETRAIN.name, PRETRAIN.version, identity(settings), {"dataset0": "0" * 32})

    assert recipe.fingerprint == recorded
