"""Fingerprints of default settings, so that a refactor does not fork every artifact."""

from pathlib import Path
from typing import Any

import pytest

from contracts.configuration import Settings
from contracts.stage import Stage
from contracts.store import ArtifactStore
from conversion.config import ReshapeConfig
from conversion.stage import EXPORT, RESHAPE
from evaluation.config import EvaluateConfig, ReportConfig
from evaluation.stage import EVALUATE, REPORT

# Changed on purpose only, by hand, when a stage gives another result and its version is raised.
GOLDEN: list[tuple[Stage[Any], Settings, str]] = [
    (RESHAPE, ReshapeConfig(), "47c4d6ceaf4be40b850e999996997ec4"),
    (RESHAPE, ReshapeConfig(tensor_parallel=2), "a4eb0b9ea669618c4f26252682a45e1e"),
    (EXPORT, ReshapeConfig(to="huggingface"), "031cbf22e0f21b873272b8708ce35714"),
    (EVALUATE, EvaluateConfig(), "9fb95dbb64460c60b1b738a4cc68c856"),
    (REPORT, ReportConfig(), "99d6d144c7381f7e2c3da6d67c5a2a26"),
]


@pytest.mark.parametrize(("stage", "settings", "fingerprint"), GOLDEN)
def test_default_settings_keep_their_fingerprint(
    tmp_path: Path, stage: Stage[Any], settings: Settings, fingerprint: str
) -> None:
    recipe = stage.recipe(settings, inputs={"checkpoint": "0" * 32}, store=ArtifactStore(tmp_path))

    assert recipe.fingerprint == fingerprint


def test_what_only_changes_the_speed_keeps_the_fingerprint(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    slow = EVALUATE.recipe(EvaluateConfig(), inputs={}, store=store)
    fast = EVALUATE.recipe(EvaluateConfig(batch_tokens=1, data_parallel=4, threads_per_rank=2), inputs={}, store=store)

    assert fast.fingerprint == slow.fingerprint
