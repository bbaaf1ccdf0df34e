"""Phases of a run: which sample, and which part of it, each row is."""

from collections import Counter
from typing import Any

import pytest

from training.config import PretrainConfig


def _config(phases: list[dict[str, Any]], **changes: Any) -> PretrainConfig:
    settings = {"seq_length": 512, "train_steps": 20, "global_batch_size": 8, "micro_batch_size": 2, **changes}
    return PretrainConfig.model_validate({"phases": phases, **settings})


def test_every_part_of_every_sample_is_read_once() -> None:
    config = _config([{"steps": 8, "seq_length": 128}, {"steps": 4, "seq_length": 256}, {}])
    curriculum = config.curriculum

    places = [curriculum.place(row) for row in range(config.train_samples)]

    assert curriculum.num_samples == 8 * 2 + 8 * 2 + 8 * 8
    read = Counter((sample, part) for sample, part in places)
    assert set(read.values()) == {1}
    parts = Counter(sample for sample, _ in places)
    assert [parts[sample] for sample in range(curriculum.num_samples)] == [4] * 16 + [2] * 16 + [1] * 64
    for first in range(0, config.train_samples, 8):  # the rows of a batch are of different samples
        assert len({sample for sample, _ in places[first : first + 8]}) == 8


def test_tokens_are_counted_by_the_length_of_each_row() -> None:
    config = _config([{"steps": 8, "seq_length": 128}, {}])

    counted = [config.curriculum.tokens_after(rows) for rows in (0, 8, 64, 72, 160)]

    assert counted == [0, 8 * 128, 64 * 128, 64 * 128 + 8 * 512, 64 * 128 + 96 * 512]


def test_a_run_without_phases_reads_sample_by_sample() -> None:
    config = _config([])

    assert [config.curriculum.place(row) for row in (0, 5, 159)] == [(0, 0), (5, 0), (159, 0)]
    assert config.curriculum.mixtures == []


def test_phases_of_mixtures_follow_a_growing_batch() -> None:
    phases = [{"steps": 5, "dataset_weights": [1, 2]}, {"dataset_weights": [3, 1]}]
    config = _config(phases, rampup_batch_size=(4, 4, 12), micro_batch_size=1)

    assert config.curriculum.mixtures == [(4 * 3 + 8 * 2, (1, 2)), (8 * 15, (3, 1))]


@pytest.mark.parametrize(
    ("phases", "changes", "message"),
    [
        ([{"seq_length": 100}], {}, "Nearest: 64 or 128"),
        ([{"steps": 7, "seq_length": 128}, {}], {}, "Use 4 or 8 steps"),
        ([{"steps": 2, "seq_length": 128}, {}], {}, "Use 4 steps"),
        ([{"seq_length": 1024}], {}, "no whole part"),
        ([{}, {"steps": 5}], {}, "has no `steps`"),
        ([{"steps": 15}, {"steps": 6}], {}, "have 21 steps, and train_steps is 20"),
        ([{"steps": 15}, {"steps": 4}], {}, "have 19 steps, and train_steps is 20"),
        ([{"steps": 20}, {}], {}, "have 20 steps"),
        ([{"steps": 4, "dataset_weights": [1, 2]}, {}], {}, "phase 2 of phases has no dataset_weights"),
        ([{"seq_length": 256}], {"rampup_batch_size": (4, 4, 8)}, "must keep its rows"),
        ([{"seq_length": 1}], {"layout": {"tensor_parallel": 2}, "train_steps": 512}, "leaves a remainder"),
    ],
)
def test_phases_that_do_not_fit_are_refused(
    phases: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _config(phases, **changes)
