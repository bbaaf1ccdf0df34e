"""Optimizers, z-loss, ignored labels, ramp-up: one run at every layout, in float64, and the same after a resume."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor
from training_cases import SEQ_LENGTH, PatternSource, new_trainer, relative_difference, tiny_config

from contracts.errors import InputError
from training.checkpoint import load_checkpoint, save_checkpoint, state_tensors
from training.config import IGNORE_INDEX, PretrainConfig

Layout = tuple[int, int, int]
Curve = list[tuple[float, float]]
Found = tuple[Curve, dict[str, Tensor]]

SGD = {"kind": "sgd", "lr": 0.5, "nesterov": True, "schedule": "linear"}
MUON = {"kind": "muon", "lr": 0.02, "schedule": "wsd", "wsd_decay_steps": 3}
AVERAGED = {"ema_decay": 0.8, "end_weight_decay": 0.5, "schedule": "inverse_sqrt"}
RAMP = {"rampup_batch_size": (4, 4, 12), "global_batch_size": 12, "optimizer": {"decay_samples": 60, "warmup_steps": 0}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("gpt2", {"optimizer": SGD}),
    "muon, gpt2": ("gpt2", {"optimizer": MUON}),
    "muon, llama, average": ("llama", {"optimizer": {**MUON, "ema_decay": 0.9}}),
    "average, z-loss, decay": ("gpt2", {"optimizer": AVERAGED, "z_loss": 0.01}),
    "ramp-up by samples": ("gpt2", {**RAMP, "micro_batch_size": 1}),
}
IGNORING = {"average, z-loss, decay"}
MORE = {"shard: none": {"layout_more": {"shard": "none"}}, "recompute": {"recompute": "full"}, "plain": {}}
STEPS = 6


class IgnoringSource(PatternSource):
    """Rows of which only a beginning counts, of another length in each."""

    def rows(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        tokens = self.tokens(sample_ids)
        labels = tokens[:, 1:].copy()
        for row, number in enumerate(sample_ids):
            labels[row, 2 + int(number) * 7 % SEQ_LENGTH :] = IGNORE_INDEX
        return {"inputs": tokens[:, :-1], "labels": labels}


def _config(name: str, layout: Layout, more: str = "plain") -> PretrainConfig:
    family, changes = CASES[name]
    changes = {key: dict(value) if isinstance(value, dict) else value for key, value in changes.items()}
    # 6 rows in an MLP that two data-parallel ranks share, so that parts of matrices are uneven and some are empty.
    model = {"num_layers": 2, "ffn_hidden_size": 36, "vocab_multiple": 4}
    return tiny_config(family, layout, train_steps=STEPS, model=model, **changes, **MORE[more])


def _train(names: list[str], layout: Layout, more: str) -> dict[str, Found]:
    found = {}
    for name in names:
        trainer = new_trainer(_config(name, layout, more))
        source = IgnoringSource() if name in IGNORING else PatternSource()
        results = [trainer.train_step(source) for _ in range(STEPS)]
        tensors = state_tensors(trainer.parameters, trainer.mesh, trainer.optimizer)
        found[name] = (
            [(r.loss_nats, r.gradient_norm) for r in results],
            {key: tensor.full_tensor() for key, tensor in tensors.items()},  # type: ignore[attr-defined]
        )
    return found


def _run(layout: Layout, more: str = "plain", names: list[str] | None = None) -> dict[str, Found]:
    names = names or list(CASES)
    results = run_on_ranks(layout[0] * layout[1] * layout[2], _train, names, layout, more)
    merged = {}
    for name in names:
        assert all(result[name][0] == results[0][name][0] for result in results), "ranks report different numbers"
        merged[name] = (results[0][name][0], {k: t for result in results for k, t in result[name][1].items()})
    return merged


@pytest.fixture(scope="module")
def references() -> dict[str, Found]:
    return _run((1, 1, 1))


def _assert_equal(found: dict[str, Found], references: dict[str, Found]) -> None:
    for name, (curve, tensors) in found.items():
        reference_curve, reference_tensors = references[name]
        assert relative_difference(curve, reference_curve) < 1e-12, name
        assert tensors.keys() == reference_tensors.keys()
        for key, tensor in tensors.items():
            assert torch.allclose(tensor, reference_tensors[key], rtol=0, atol=1e-10), (name, key)


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (1, 2, 2)], ids=str)
def test_every_optimizer_makes_the_same_updates_at_every_layout(layout: Layout, references: dict[str, Found]) -> None:
    _assert_equal(_run(layout), references)


@pytest.mark.parametrize(("layout", "more"), [((1, 1, 2), "shard: none"), ((2, 1, 2), "recompute")], ids=str)
def test_copies_and_recomputation_change_no_update(layout: Layout, more: str, references: dict[str, Found]) -> None:
    names = ["muon, llama, average", "average, z-loss, decay"]

    _assert_equal(_run(layout, more, names), references)


def test_every_case_learns_and_the_average_stays_behind_the_weights(references: dict[str, Found]) -> None:
    for name, (curve, tensors) in references.items():
        assert curve[-1][0] < curve[0][0] - 0.3, name
        for key in [key for key in tensors if key.endswith(".ema")]:
            weight = tensors[key.removeprefix("optim.").removesuffix(".ema")]
            assert not torch.equal(tensors[key], weight)
            assert (tensors[key] - weight).abs().max() < 0.2


def _resume(names: list[str], layout: Layout, root: Path) -> list[str]:
    different = []
    for name in names:
        config = _config(name, layout)
        whole, resumed = new_trainer(config), new_trainer(config.model_copy(update={"seed": 99}))
        source = IgnoringSource() if name in IGNORING else PatternSource()
        for _ in range(2):
            whole.train_step(source)
        folder = save_checkpoint(whole, root / name.replace(" ", "-"), keep_last=1)
        load_checkpoint(resumed, folder)
        for _ in range(3):
            a, b = whole.train_step(source), resumed.train_step(source)
            if (a.loss_nats, a.gradient_norm, a.learning_rate, a.batch_samples, a.consumed_samples) != (
                b.loss_nats,
                b.gradient_norm,
                b.learning_rate,
                b.batch_samples,
                b.consumed_samples,
            ):
                different.append(name)
        ours, theirs = (state_tensors(t.parameters, t.mesh, t.optimizer) for t in (whole, resumed))
        if not all(torch.equal(ours[k].to_local(), theirs[k].to_local()) for k in ours):  # type: ignore[attr-defined]
            different.append(f"{name}: state")
    return different


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_resuming_in_the_middle_of_schedule_and_ramp_up_is_bit_equal(layout: Layout, tmp_path: Path) -> None:
    assert run_on_ranks(layout[0] * layout[1] * layout[2], _resume, list(CASES), layout, tmp_path)[0] == []


def test_batches_grow_as_the_ramp_up_says_and_miss_no_sample() -> None:
    config = tiny_config("gpt2", rampup_batch_size=(2, 2, 40), global_batch_size=8, micro_batch_size=1, train_steps=20)
    sizes, consumed = [], 0
    for _ in range(config.train_steps):
        sizes.append(config.batch_rows(consumed))
        consumed += sizes[-1]

    assert sizes == [2] * 7 + [4] * 4 + [6] * 2 + [8] * 7
    assert consumed == config.train_samples
    assert [config.samples_after(n) for n in range(21)] == list(np.cumsum([0, *sizes]))


def _second_phase(config: PretrainConfig, root: Path) -> tuple[float, float, str]:
    trainer = new_trainer(config)
    for _ in range(2):
        trainer.train_step(PatternSource())
    folder = save_checkpoint(trainer, root, keep_last=1)
    optimizer = config.optimizer.model_copy(update={"lr": 6e-5, "min_lr": 0.0, "schedule": "constant"})
    again = new_trainer(config.model_copy(update={"optimizer": optimizer}))
    load_checkpoint(again, folder)
    before = again.parameters[0].value.clone()
    result = again.train_step(PatternSource())
    other = new_trainer(config.model_copy(update={"optimizer": optimizer.model_copy(update={"kind": "muon"})}))
    try:
        load_checkpoint(other, folder)
    except InputError as error:
        return result.learning_rate, float((again.parameters[0].value - before).abs().max()), str(error)
    return result.learning_rate, 0.0, "loaded"


def test_a_second_phase_uses_its_own_learning_rate_and_another_optimizer_is_refused(tmp_path: Path) -> None:
    """The rate comes from the settings and not from the checkpoint, in what is logged and in what is done."""
    rate, change, message = run_on_ranks(1, _second_phase, tiny_config("gpt2"), tmp_path)[0]

    assert rate == 6e-5
    assert change < 2e-4
    assert "optimizer.kind is adamw there and muon in the settings" in message
