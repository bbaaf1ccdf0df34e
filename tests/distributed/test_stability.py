"""fp16's loss scale, and steps with wrong numbers: stop, skip, roll back; all of it resumed bit-equal."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from ranks import run_on_ranks
from torch import Tensor
from training_cases import PatternSource, curve, new_trainer, relative_difference, tiny_config

from contracts.errors import ShardlineError
from training.checkpoint import load_checkpoint, roll_back, save_checkpoint
from training.config import PretrainConfig
from training.metrics import METRICS, read
from training.rank import Job, run
from training.step_folders import read_info
from training.trainer import Trainer

Layout = tuple[int, int, int]


class BadEngine:
    """Spoils the gradients of some passes on one rank, as a broken device would."""

    def __init__(self, trainer: Trainer, spoiled: dict[int, float]) -> None:
        self.trainer, self.engine, self.spoiled = trainer, trainer.engine, spoiled

    def run(self, *arguments: Any, **named: Any) -> Tensor:
        loss = self.engine.run(*arguments, **named)
        factor = self.spoiled.get(self.trainer.step + 1)
        if factor is not None:
            for parameter in self.trainer.parameters:
                if parameter.sharded.grad is not None and (torch.distributed.get_rank() == 0 or factor != np.inf):
                    parameter.sharded.grad.mul_(factor)
        return loss


def _spoiled(config: PretrainConfig, spoiled: dict[int, float]) -> Trainer:
    trainer = new_trainer(config)
    trainer.engine = BadEngine(trainer, spoiled)
    return trainer


def _weights(trainer: Trainer) -> list[Tensor]:
    return [p.value.clone() for p in trainer.parameters]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _half_precision(config: PretrainConfig, root: Path) -> dict[str, Any]:
    whole = new_trainer(config)
    before = _weights(whole)
    results = [whole.train_step(PatternSource()) for _ in range(3)]
    kept = _same(before, _weights(whole))
    save_checkpoint(whole, root, keep_last=1)
    results += [whole.train_step(PatternSource()) for _ in range(9)]
    resumed = new_trainer(config.model_copy(update={"seed": 9}))
    load_checkpoint(resumed, root / "step-00000003")
    again = [resumed.train_step(PatternSource()) for _ in range(9)]
    key, repeated = (
        [(r.loss_nats, str(r.gradient_norm), r.loss_scale, r.outcome) for r in part] for part in (results, again)
    )
    return {
        "equal": repeated == key[3:],
        "same weights": _same(_weights(whole), _weights(resumed)),
        "kept": kept,
        "results": key,
        "counts": (whole.step, whole.updates, whole.skipped_steps, whole.consumed_samples),
        "extra": dict(read_info(root / "step-00000003").extra),
    }


# The first overflow that is borne, then a scale that halves until gradients fit, then growth after 3 updates.
_SCALE = {"initial": 2.0**20, "window": 3, "hysteresis": 2}


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_the_loss_scale_falls_and_rises_and_a_resumed_run_has_it(layout: Layout, tmp_path: Path) -> None:
    config = tiny_config("gpt2", layout, precision="fp16", loss_scale={**_SCALE, "initial": 2.0**28}, train_steps=20)

    found = run_on_ranks(config.layout.world_size, _half_precision, config, tmp_path)[0]

    assert found["equal"]
    assert found["same weights"]
    assert found["kept"], "a step that overflowed changed the weights"
    assert [r[3] for r in found["results"][:3]] == ["skipped"] * 3
    assert [r[2] for r in found["results"][:4]] == [2.0**28, 2.0**28, 2.0**27, 2.0**26]
    assert found["extra"]["trainer"]["updates"] == 0
    step, updates, skipped, consumed = found["counts"]
    assert (step, updates + skipped, consumed) == (12, 12, 12 * 8)
    assert updates >= 2


def _curve_and_scales(config: PretrainConfig) -> tuple[list[tuple[float, float]], list[float | None]]:
    trainer = new_trainer(config)
    results = [trainer.train_step(PatternSource()) for _ in range(10)]
    return [(r.loss_nats, r.gradient_norm) for r in results], [r.loss_scale for r in results]


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_fp16_stays_near_float64_and_its_scale_grows(layout: Layout) -> None:
    exact = run_on_ranks(1, _curve_and_scales, tiny_config("gpt2"))[0][0]
    config = tiny_config("gpt2", layout, precision="fp16", loss_scale={**_SCALE, "initial": 1024.0})

    found, scales = run_on_ranks(config.layout.world_size, _curve_and_scales, config)[0]

    assert relative_difference(found, exact) < 2e-2
    assert scales == [1024.0] * 3 + [2048.0] * 3 + [4096.0] * 3 + [8192.0]


def _policies(config: PretrainConfig, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    source = PatternSource()
    stopping = _spoiled(config, {3: np.inf})
    curve(stopping, 2)
    try:
        stopping.train_step(source)
    except ShardlineError as error:
        found["stop"] = str(error)
    stability = config.stability.model_copy(update={"on_nonfinite": "skip", "max_in_a_row": 2})
    skipping = _spoiled(
        config.model_copy(update={"stability": stability}), {3: np.inf, 6: np.inf, 7: np.inf, 8: np.inf}
    )
    curve(skipping, 2)
    before = _weights(skipping)
    result = skipping.train_step(source)
    found["skip"] = (result.outcome, _same(before, _weights(skipping)), skipping.updates, skipping.consumed_samples)
    curve(skipping, 2)
    folder = save_checkpoint(skipping, root / "skip", keep_last=1)
    resumed = _spoiled(config.model_copy(update={"seed": 1, "stability": stability}), {6: np.inf})
    load_checkpoint(resumed, folder)
    found["counts"] = (resumed.step, resumed.updates, resumed.skipped_steps)
    found["second skips"] = [skipping.train_step(source).outcome for _ in range(2)]
    try:
        skipping.train_step(source)
    except ShardlineError as error:
        found["in a row"] = str(error)
    return found | _rolled_back(config, root)


def _rolled_back(config: PretrainConfig, root: Path) -> dict[str, Any]:
    stability = config.stability.model_copy(update={"on_nonfinite": "roll_back"})
    config = config.model_copy(update={"stability": stability})
    trainer, source = _spoiled(config, {5: np.inf}), PatternSource()
    curve(trainer, 2)
    save_checkpoint(trainer, root / "back", keep_last=1)
    saved = _weights(trainer)
    curve(trainer, 2)
    outcome = trainer.train_step(source).outcome
    name = roll_back(trainer, root / "back")
    found: dict[str, Any] = {"back": (outcome, name, _same(saved, _weights(trainer)))}
    found["position"] = (trainer.step, trainer.updates, trainer.consumed_samples, trainer.roll_backs)
    folder = save_checkpoint(trainer, root / "back", keep_last=1)
    resumed = new_trainer(config.model_copy(update={"seed": 1}))
    load_checkpoint(resumed, folder)
    found["resumed"] = curve(resumed, 3) == curve(trainer, 3) and _same(_weights(resumed), _weights(trainer))
    return found


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_a_step_that_is_not_finite_stops_is_skipped_or_rolled_back(layout: Layout, tmp_path: Path) -> None:
    config = tiny_config("gpt2", layout, train_steps=20)

    results = run_on_ranks(config.layout.world_size, _policies, config, tmp_path)

    for found in results:
        assert "Step 3: the loss is" in found["stop"]
        assert "(not finite on rank 0: embedding.word.weight" in found["stop"]
        assert found["skip"] == ("skipped", True, 2, 24)
        assert found["counts"] == (5, 4, 1)
        assert found["second skips"] == ["skipped", "skipped"]
        assert "2 steps in a row made no update before it" in found["in a row"]
        assert found["back"] == ("roll_back", "step-00000002", True)
        assert found["position"] == (5, 2, 40, 1)
        assert found["resumed"]


def _spike(config: PretrainConfig, root: Path) -> dict[str, Any]:
    trainer = _spoiled(config, {12: 1000.0, 15: 1000.0})
    results = [trainer.train_step(PatternSource()) for _ in range(13)]
    save_checkpoint(trainer, root, keep_last=1)
    resumed = _spoiled(config, {15: 1000.0})
    load_checkpoint(resumed, root / "step-00000013")
    after = [[t.train_step(PatternSource()) for _ in range(3)] for t in (trainer, resumed)]
    keys = [[(r.loss_nats, r.gradient_norm, r.outcome, r.reason) for r in part] for part in after]
    return {"outcomes": [r.outcome for r in results], "reason": results[11].reason, "keys": keys}


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1)], ids=str)
def test_a_spike_of_the_gradient_is_skipped_with_its_numbers_and_resumed(layout: Layout, tmp_path: Path) -> None:
    stability = {"on_spike": "skip", "spike_window": 16, "spike_sigma": 8.0}
    config = tiny_config("gpt2", layout, train_steps=20, stability=stability)

    found = run_on_ranks(config.layout.world_size, _spike, config, tmp_path)[0]

    assert found["outcomes"] == ["updated"] * 11 + ["skipped", "updated"]
    assert "the gradient norm" in found["reason"]
    assert "is more than 8 deviations" in found["reason"]
    assert found["keys"][0] == found["keys"][1]
    assert found["keys"][0][1][2] == "skipped"


def _recorded_run(config: PretrainConfig, root: Path) -> list[dict[str, Any]]:
    trainer = _spoiled(config, {3: np.inf, 6: np.inf})
    job = Job(config.model_dump(mode="json"), str(root), "", None, None, str(root / "stop"), {})
    run(trainer, job, PatternSource(), {})
    return list(read(root / METRICS)) if torch.distributed.get_rank() == 0 else []


def test_what_was_done_stands_in_the_metrics(tmp_path: Path) -> None:
    stability = {"on_nonfinite": "roll_back"}
    config = tiny_config("gpt2", (1, 1, 2), train_steps=8, stability=stability, checkpoint_interval=4)

    lines = run_on_ranks(2, _recorded_run, config, tmp_path)[0]

    assert [line["step"] for line in lines] == list(range(1, 9))
    third, sixth = lines[2], lines[5]
    assert (third["event"], third["skipped_steps"]) == ("roll_back", 1)
    assert "gradient_norm" not in third
    assert third["reason"].endswith("the weights are those of step-00000000 again")
    assert sixth["reason"].endswith("the weights are those of step-00000004 again")
    assert (lines[-1]["roll_backs"], lines[-1]["tokens"]) == (2, 8 * 8 * 32)
    assert {"data_wait_s", "compute_s", "reduce_s", "update_s"} <= lines[0].keys()


def test_a_loss_scale_that_starts_below_its_smallest_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"smallest \(4.0\) is above initial \(2.0\)"):
        tiny_config("gpt2", loss_scale={"initial": 2.0, "smallest": 4.0})
