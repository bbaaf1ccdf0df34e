"""Experts dealt over ranks: losses, norms and gradients of one process; checkpoints go on at any other dealing."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_parity import Found, assert_equal, joined
from ranks import run_on_ranks
from reference_models import gradients_of, put_weights, random_weights
from training_cases import PatternSource, curve, new_trainer, relative_difference, tiny_config
from whole_checkpoint import whole_tensors

from training.checkpoint import load_checkpoint, save_checkpoint
from training.config import PretrainConfig
from training.estimate import estimate

MOE = {"num_experts": 4, "top_k": 2, "aux_loss_coef": 0.05, "z_loss_coef": 0.03}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "capacity": ("mixtral", {"num_query_groups": 2, "tied_embeddings": True, "moe": {**MOE, "capacity_factor": 1.0}}),
    "shared": ("qwen2", {"dropout": 0.1, "moe": {**MOE, "num_experts": 8, "shared_ffn_hidden_size": 16}}),
    "plain": ("gpt2", {"linear_bias": False, "moe": {"num_experts": 4, "top_k": 1, "ffn_hidden_size": 16}}),
}
Layout = tuple[int, int, int, int, int]  # tensor, pipeline, data, context, expert


def _config(name: str, layout: Layout, changes: dict[str, Any]) -> PretrainConfig:
    family, model = CASES[name]
    degrees = {"context_parallel": layout[3], "expert_parallel": layout[4], **changes.get("layout_more", {})}
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in changes.items()}
    return tiny_config(family, layout[:3], train_steps=4, model=dict(model), **{**copied, "layout_more": degrees})


def _train_all(layout: Layout, changes: dict[str, Any]) -> Found:
    found = {}
    for name in CASES:
        config = _config(name, layout, changes)
        trainer = new_trainer(config)
        put_weights(trainer, random_weights(config.model, torch.float64))
        rows = config.global_batch_size // layout[2]
        first = trainer.mesh.rank("dp") * rows
        tokens = torch.from_numpy(PatternSource().tokens(range(first, first + rows)))
        gradients = gradients_of(trainer, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        found[name] = (curve(trainer, 2), gradients)
    return found


def _run(layout: Layout, **changes: Any) -> Found:
    tp, pp, dp, cp, _ = layout
    parts: list[Found] = run_on_ranks(tp * pp * dp * cp, _train_all, layout, changes, timeout_s=300)
    return joined(parts)


@cache
def _reference() -> Found:
    return _run((1, 1, 1, 1, 1))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 2, 1, 2), {}),
        ((1, 1, 4, 1, 4), {}),
        ((1, 1, 4, 1, 2), {"layout_more": {"shard": "none"}, "micro_batch_size": 1, "recompute": "full"}),
        ((2, 1, 2, 1, 2), {"recompute": "selective"}),
        ((1, 2, 2, 1, 2), {}),
        ((1, 1, 1, 2, 2), {"layout_more": {"shard": "parameters"}}),
        ((2, 1, 1, 2, 2), {"layout_more": {"sequence_parallel": False, "shard": "gradients"}}),
        ((2, 2, 2, 1, 2), {"recompute": "full"}),
        ((1, 2, 2, 2, 2), {"layout_more": {"shard_ranks": 2}}),
        ((1, 1, 4, 1, 2), {"layout_more": {"shard_ranks": 2, "shard": "parameters"}}),
    ],
    ids=str,
)
def test_dealt_experts_learn_what_those_of_one_process_learn(layout: Layout, changes: dict[str, Any]) -> None:
    assert_equal(_run(layout, **changes), _reference())


MUON: dict[str, Any] = {"optimizer": {"kind": "muon", "ema_decay": 0.9}}


def _save_after_two(config: PretrainConfig, root: Path) -> Any:
    trainer = new_trainer(config)
    curve(trainer, 2)
    save_checkpoint(trainer, root, keep_last=1)
    return curve(trainer, 2)


def _go_on(config: PretrainConfig, folder: Path) -> Any:
    trainer = new_trainer(config)
    load_checkpoint(trainer, folder)
    return curve(trainer, 2)


def test_checkpoints_go_on_at_any_dealing_and_hold_the_same_tensors(tmp_path: Path) -> None:
    layouts: tuple[Layout, ...] = ((1, 1, 1, 1, 1), (1, 1, 4, 1, 2), (2, 1, 2, 1, 2))
    configs = {layout: _config("capacity", layout, MUON) for layout in layouts}
    root = tmp_path / "one"
    expected = run_on_ranks(1, _save_after_two, configs[layouts[0]], root)[0]
    reference = whole_tensors(root / "step-00000002")

    for layout in layouts[1:]:
        dealt = tmp_path / str(layout)
        found = run_on_ranks(4, _save_after_two, configs[layout], dealt)[0]
        assert relative_difference(found, expected) < 1e-12
        tensors = whole_tensors(dealt / "step-00000002")
        assert tensors.keys() == reference.keys()
        for name, tensor in tensors.items():
            assert torch.allclose(tensor, reference[name], rtol=1e-10, atol=1e-10), (layout, name)
        again = run_on_ranks(4, _go_on, configs[layout], dealt / "step-00000002")[0]
        assert again == found

    crossed = run_on_ranks(4, _go_on, configs[layouts[1]], tmp_path / str(layouts[2]) / "step-00000002")[0]
    assert relative_difference(crossed, expected) < 1e-12
    alone = run_on_ranks(1, _go_on, configs[layouts[0]], tmp_path / str(layouts[1]) / "step-00000002")[0]
    assert relative_difference(alone, expected) < 1e-12


def _kept(configs: list[PretrainConfig]) -> list[int]:
    return [sum(p.value.numel() for p in new_trainer(config).parameters) for config in configs]


def test_the_estimate_knows_what_a_rank_keeps() -> None:
    layouts: tuple[Layout, ...] = ((1, 1, 4, 1, 4), (2, 1, 2, 1, 2), (1, 1, 4, 1, 2), (1, 2, 1, 2, 2))
    configs = [_config("shared", layout, {}) for layout in layouts]
    configs.append(_config("shared", layouts[2], {"layout_more": {"shard_ranks": 2}}))
    configs.append(_config("shared", layouts[2], {"layout_more": {"shard": "none"}}))

    found = [max(counts) for counts in zip(*run_on_ranks(4, _kept, configs), strict=True)]

    for config, most in zip(configs, found, strict=True):
        needs = estimate(config)
        assert needs.optimizer_bytes // 16 == pytest.approx(most, rel=0.01), config.layout  # two float64 moments
