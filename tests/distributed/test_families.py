"""Every family at every layout in float64: losses, gradient norms and the gradient of every parameter.

One launch trains all families of a layout, since launches cost more than tiny models.
"""

from functools import cache
from typing import Any

import pytest
import torch
from layout_parity import Found, assert_equal, joined
from ranks import run_on_ranks
from reference_models import FAMILIES, gradients_of, put_weights, random_weights
from training_cases import PatternSource, curve, new_trainer, relative_difference, tiny_config

from training.config import PretrainConfig

ALL = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2))
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "post-norm": ("gpt2", {"norm_position": "post"}),
    "one norm for both": ("neox", {"shared_norm": True, "num_query_groups": 2, "dropout": 0.2}),
    "scaled embedding": ("llama", {"embedding_scale": 4.0, "qk_norm": True, "linear_bias": False}),
    "experts with all losses": (
        "mixtral",
        {
            "tied_embeddings": True,
            "moe": {"num_experts": 6, "top_k": 2, "aux_loss_coef": 0.05, "z_loss_coef": 0.03, "capacity_factor": 1.0},
        },
    ),
    "plain experts": ("gpt2", {"linear_bias": False, "moe": {"num_experts": 4, "ffn_hidden_size": 16}}),
}
CASES = {**FAMILIES, **MORE}
UNLIKE = ("llama yarn", "mistral", "qwen3", "neox", "post-norm", "one norm for both", "experts with all losses")


def _config(name: str, layout: tuple[int, int, int], changes: dict[str, Any]) -> PretrainConfig:
    family, model = CASES[name]
    return tiny_config(family, layout, train_steps=3, model=model, **changes)


def _train_all(layout: tuple[int, int, int], names: tuple[str, ...], changes: dict[str, Any]) -> Found:
    found = {}
    for name in names:
        config = _config(name, layout, {key: dict(v) if isinstance(v, dict) else v for key, v in changes.items()})
        trainer = new_trainer(config)
        put_weights(trainer, random_weights(config.model, torch.float64))
        rows = config.global_batch_size // layout[2]
        first = trainer.mesh.rank("dp") * rows
        tokens = torch.from_numpy(PatternSource().tokens(range(first, first + rows)))
        gradients = gradients_of(trainer, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        found[name] = (curve(trainer, 2), gradients)
    return found


def _run(layout: tuple[int, int, int], names: tuple[str, ...] = tuple(CASES), **changes: Any) -> Found:
    tp, pp, dp = layout
    parts: list[Found] = run_on_ranks(tp * pp * dp, _train_all, layout, names, changes, timeout_s=300)
    return joined(parts)


@cache
def _reference() -> Found:
    return _run((1, 1, 1))


def _assert_equal(found: Found) -> None:
    assert_equal(found, _reference())


@pytest.mark.parametrize("layout", ALL[1:], ids=str)
def test_every_family_has_the_same_losses_and_gradients_at_every_layout(layout: tuple[int, int, int]) -> None:
    _assert_equal(_run(layout))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 1), {"recompute": "full"}),
        ((2, 1, 1), {"recompute": "full", "layout_more": {"sequence_parallel": False}}),
        ((1, 2, 1), {"recompute": "full"}),
        ((2, 1, 1), {"recompute": "selective"}),
        ((1, 2, 1), {"recompute": "selective"}),
        ((1, 1, 2), {"layout_more": {"shard": "parameters"}, "micro_batch_size": 4}),
        ((2, 1, 2), {"layout_more": {"shard": "none", "sequence_parallel": False}, "micro_batch_size": 1}),
    ],
    ids=str,
)
def test_execution_choices_change_nothing_of_a_family(layout: tuple[int, int, int], changes: dict[str, Any]) -> None:
    _assert_equal(_run(layout, UNLIKE, **changes))


EXPERTS = {"moe": {**MORE["experts with all losses"][1]["moe"], "shared_ffn_hidden_size": 16}}


def _train_experts(layout: tuple[int, int, int], variants: tuple[dict[str, Any], ...]) -> list[Any]:
    configs = [tiny_config("mixtral", layout, model=EXPERTS, **variant) for variant in variants]
    return [curve(new_trainer(config), 3) for config in configs]


def test_experts_learn_the_same_under_every_optimizer_and_nearly_so_in_every_precision() -> None:
    muon: dict[str, Any] = {"optimizer": {"kind": "muon"}}
    exact = run_on_ranks(1, _train_experts, (1, 1, 1), (muon, {}))[0]
    lower = tuple({"precision": precision} for precision in ("float32", "bf16", "fp16"))

    at_two = run_on_ranks(4, _train_experts, (2, 1, 2), (muon, *lower))[0]

    assert relative_difference(at_two[0], exact[0]) < 1e-12
    for found, tolerance in zip(at_two[1:], (1e-5, 2e-2, 2e-2), strict=True):
        assert relative_difference(found, exact[1]) < tolerance
