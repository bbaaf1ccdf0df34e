"""Learning rate, weight decay and batch size follow from the position in the run alone."""

import math
from itertools import pairwise

import pytest
from pydantic import ValidationError
from training_cases import tiny_config

from training.optimizer_config import OptimizerConfig
from training.schedules import Schedule, batch_rows, step_samples


def _rates(positions: tuple[int, ...], end: int = 110, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, **settings})
    return [Schedule(config, end).learning_rate(n) for n in positions]


def test_a_linear_schedule_falls_evenly() -> None:
    assert _rates((5, 10, 60, 85, 110, 200), schedule="linear") == pytest.approx([0.5, 1.0, 0.55, 0.325, 0.1, 0.1])


def test_the_inverse_square_root_halves_at_four_times_the_warm_up_and_stops_at_min_lr() -> None:
    assert _rates((10, 40, 90, 10_000), schedule="inverse_sqrt") == pytest.approx([1.0, 0.5, 1 / 3, 0.1])


def test_a_constant_schedule_stays() -> None:
    assert _rates((1, 10, 1000), schedule="constant") == [0.1, 1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "middle"),
    [
        ("linear", 0.55),
        ("cosine", 0.55),
        ("minus_sqrt", 0.1 + 0.9 * (1 - math.sqrt(0.5))),
        ("exponential", math.sqrt(0.1)),
    ],
)
def test_warm_up_stable_decay_stays_until_its_decay(shape: str, middle: float) -> None:
    rates = _rates((5, 10, 50, 90, 100, 110), schedule="wsd", wsd_decay_steps=20, wsd_decay=shape)

    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, middle, 0.1])


def test_weight_decay_goes_linearly_to_its_end() -> None:
    schedule = Schedule(OptimizerConfig(weight_decay=0.01, end_weight_decay=0.1), 100)

    assert [schedule.weight_decay(n) for n in (50, 51, 100, 150)] == pytest.approx([0.055, 0.0559, 0.1, 0.1])


def test_in_samples_the_position_is_what_the_batch_ends_at() -> None:
    config = tiny_config("gpt2", optimizer={"warmup_steps": 0, "warmup_samples": 16, "lr": 1.0, "min_lr": 0.5})
    schedule = config.schedule

    assert schedule.decay_end == 80
    assert schedule.learning_rate(schedule.position(1, 8)) == 0.5
    assert schedule.learning_rate(schedule.position(10, 80)) == 0.5


def test_a_run_of_many_sizes_has_the_sizes_of_megatron() -> None:
    """start + int(consumed / (samples / increments)) x increment, arguments.py and microbatches.py of Megatron-LM."""
    for consumed in range(0, 300, 7):
        expected = min(64, 16 + int(consumed / (256 / 6)) * 8) if consumed < 256 else 64
        assert batch_rows(consumed, 64, (16, 8, 256)) == expected


def test_steps_of_a_ramp_up_follow_each_other_without_gap() -> None:
    spans = [step_samples(n, 8, (2, 2, 40)) for n in range(1, 30)]

    assert spans[0] == range(2)
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert len(spans[-1]) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": {"schedule": "wsd"}}, "needs the length of its decay"),
        ({"optimizer": {"wsd_decay_steps": 3}}, "goes with schedule: wsd"),
        ({"optimizer": {"warmup_samples": 3}}, r"warmup_steps \(2\) counts steps, and other settings count samples"),
        ({"optimizer": {"nesterov": True}}, "nesterov goes with kind: sgd"),
        ({"rampup_batch_size": (3, 2, 10)}, r"\[3, 2, 10\] does not reach global_batch_size \(8\): 8 - 3"),
        ({"optimizer": {"lr": 1e-5}}, r"min_lr \(0.001\) is above lr"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_with_the_numbers(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_config("gpt2", **settings)


@pytest.mark.parametrize(
    ("layout", "rampup", "message"),
    [
        ((1, 2, 1), (2, 2, 10), r"the batch of rampup_batch_size \(2\) / \(2 x 1\) gives 1 micro-batches"),
        ((1, 1, 1), (1, 1, 10), r"the batch of rampup_batch_size \(1\) / \(micro_batch_size \(2\) x"),
    ],
)
def test_every_size_of_a_ramp_up_must_fill_the_layout(layout: tuple, rampup: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config("gpt2", layout, rampup_batch_size=rampup).check_batches_after(0)


def test_a_run_past_its_small_batches_may_go_on_with_more_ranks() -> None:
    config = tiny_config("gpt2", (1, 1, 4), rampup_batch_size=(4, 4, 40))

    with pytest.raises(ValueError, match=r"rampup_batch_size \(4\) / \(micro_batch_size \(2\) x"):
        config.check_batches_after(36)
    config.check_batches_after(40)
