import json
import posixpath
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_artifacts import metric_lines

from contracts.metrics import Replays, legal_key, legal_name, numbers, original_key, original_name, read_points


@given(st.text(alphabet=st.sampled_from("ab1,:/.~%-_ é@(=#") | st.characters(), max_size=30))
def test_any_key_becomes_legal_and_comes_back(key: str):
    legal = legal_key(key)

    assert re.fullmatch(r"[/\w.\- :]+", legal)
    assert posixpath.normpath(legal) == legal
    assert not legal.startswith(("/", ".."))
    assert original_key(legal) == key


@given(st.text(max_size=30))
def test_any_name_becomes_legal_and_comes_back(name: str):
    legal = legal_name(name)

    assert not set(legal) & set("/:.%\"'")
    assert original_name(legal) == name


@pytest.mark.parametrize(
    ("key", "legal"),
    [("acc,none", "acc:none"), ("train/loss_nats", "train/loss_nats"), ("f1 (%)", "f1 ::28:::25:::29:")],
)
def test_usual_keys_stay_readable(key: str, legal: str):
    assert legal_key(key) == legal


def test_a_model_name_with_a_dot_stays_readable():
    assert legal_name("gpt-1.3b") == "gpt-1,3b"


def test_every_number_but_step_and_time_is_a_training_metric(tmp_path: Path):
    line = {"step": 3, "time": 1.5, "loss_nats": 2, "note": "x", "is_last": True, "grad": float("nan")}
    (tmp_path / "m").write_text(json.dumps(line) + "\n")

    (point,), _ = read_points(tmp_path / "m")

    assert (point.step, point.time_ms) == (3, 1500)
    assert list(point.values) == ["train/loss_nats", "train/grad"]


def test_a_half_written_line_waits_and_damaged_ones_are_skipped(tmp_path: Path):
    path = tmp_path / "m"
    path.write_text(metric_lines(1) + 'garbage\n{"step": 2}\n[]\n' + metric_lines(1, first=2)[:-20])
    points, offset = read_points(path)
    assert [point.step for point in points] == [1]

    path.write_text(metric_lines(1) + 'garbage\n{"step": 2}\n[]\n' + metric_lines(1, first=2))
    points, _ = read_points(path, offset)

    assert [point.step for point in points] == [2]


def test_a_missing_file_has_no_points(tmp_path: Path):
    assert read_points(tmp_path / "none") == ([], 0)


def test_steps_that_a_resume_repeats_alike_are_dropped_and_others_kept(tmp_path: Path):
    (tmp_path / "m").write_text(metric_lines(5) + metric_lines(4, first=4).replace("4.95", "4.5"))
    points, _ = read_points(tmp_path / "m")
    replays = Replays()

    steps = [point.step for point in replays.fresh(points)]

    assert steps == [1, 2, 3, 4, 5, 5, 6, 7]
    assert replays.resumed_from == {5}


def test_numbers_of_a_nested_summary_are_joined_by_slashes():
    assert numbers({"a": 1, "b": {"c": 2.5, "d": "x"}, "e": True, "f": [1]}) == {"a": 1.0, "b/c": 2.5}
