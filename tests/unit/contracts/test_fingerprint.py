import json
from pathlib import Path

import pytest
from small_artifacts import SAMPLE, OptimizerSettings, SampleSettings

from contracts.configuration import identity
from contracts.fingerprint import Recipe, canonical_json
from contracts.store import ArtifactStore

RECORDED = Path(__file__).parents[2] / "golden" / "fingerprints.json"
RE_RECORD = "python tests/golden/record_fingerprints.py"


@pytest.mark.parametrize("case", json.loads(RECORDED.read_text()), ids=lambda case: case["name"])
def test_a_recipe_keeps_the_fingerprint_that_was_recorded(case: dict):
    found = Recipe(**case["recipe"]).fingerprint

    assert found == case["fingerprint"], f"Every id in every store would change. If meant, run {RE_RECORD}"


def test_a_setting_that_cannot_change_the_result_stays_out(tmp_path: Path):
    store = ArtifactStore(tmp_path)

    one, many = (SAMPLE.recipe(SampleSettings(num_workers=n), inputs={}, store=store) for n in (1, 64))

    assert one.fingerprint == many.fingerprint


def test_a_setting_of_a_later_release_stays_out_while_it_has_its_default():
    assert "dropout" not in identity(SampleSettings())
    assert identity(SampleSettings(dropout=0.1))["dropout"] == 0.1


def test_a_setting_that_decides_the_result_changes_the_fingerprint(tmp_path: Path):
    store = ArtifactStore(tmp_path)
    changed = SampleSettings(optimizer=OptimizerSettings(lr=1e-3))

    assert (
        SAMPLE.recipe(SampleSettings(), inputs={}, store=store).fingerprint
        != SAMPLE.recipe(changed, inputs={}, store=store).fingerprint
    )


def test_whole_numbers_mean_the_same_with_and_without_a_point():
    assert canonical_json({"clip": 1.0, "zero": -0.0}) == canonical_json({"zero": 0, "clip": 1})


def test_true_is_not_one():
    assert canonical_json({"a": True}) != canonical_json({"a": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1: 2}, b"x"])
def test_what_has_no_canonical_form_is_refused_with_its_place(value: object):
    with pytest.raises(ValueError, match=r"\$\.outer\[0\]"):
        canonical_json({"outer": [value]})
