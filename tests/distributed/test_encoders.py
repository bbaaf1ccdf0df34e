"""Encoders, and encoders with decoders, at every layout in float64: losses, gradient norms and every gradient.

One launch trains all models of a layout, since launches cost more than tiny models.
"""

from functools import cache
from typing import Any

import pytest
import torch
from encoder_cases import ENCODERS, SHORT, EncoderSource
from layout_parity import Found, assert_equal, joined
from ranks import run_on_ranks
from reference_models import batch_gradients, put_weights, random_weights
from training_cases import SEQ_LENGTH, new_trainer, relative_difference, tiny_config

from training.config import PretrainConfig
from training.data import count_loss_tokens, read_batch, step_sample_ids, weigh_pairs
from training.validation import validation_losses

DECODER_LENGTH = 16
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ENCODERS["bert"],
    "bert untied": ("bert", {"tied_embeddings": False, "dropout": 0.2, "num_layers": 3}),
    "megatron bert": ENCODERS["megatron bert"],
    "roberta": ("roberta", {"dropout": 0.1}),
    "t5": ("t5", {**SHORT, "head_dim": 16, "dropout": 0.2}),
    "t5 v1.1": ("t5", {**SHORT, "activation": "geglu_tanh", "tied_embeddings": False, "decoder_layers": 3}),
    "t5 grouped": ("t5", {**SHORT, "num_query_groups": 2, "linear_bias": True, "qkv_bias": True, "num_layers": 1}),
}
UNLIKE = ("bert untied", "megatron bert", "t5", "t5 v1.1")
ALL = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2))


def _config(name: str, layout: tuple[int, int, int], changes: dict[str, Any]) -> PretrainConfig:
    family, model = CASES[name]
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in changes.items()}
    decoder = {"decoder_seq_length": DECODER_LENGTH} if family == "t5" else {}
    return tiny_config(family, layout, train_steps=3, model=dict(model), **decoder, **copied)


def _train_all(layout: tuple[int, int, int], names: tuple[str, ...], changes: dict[str, Any]) -> Found:
    found: Found = {}
    for name in names:
        config = _config(name, layout, changes)
        trainer = new_trainer(config)
        put_weights(trainer, random_weights(config.model, torch.float64))
        source, rows, mesh = (
            EncoderSource(config.model, SEQ_LENGTH, DECODER_LENGTH),
            config.global_batch_size,
            trainer.mesh,
        )
        ids = step_sample_ids(0, rows, dp_rank=mesh.rank("dp"), dp_size=mesh.size("dp"))
        batch = read_batch(source, ids, mesh.device)
        num_tokens = count_loss_tokens(batch, mesh)
        gradients = batch_gradients(trainer, weigh_pairs(batch, num_tokens, rows), num_tokens)
        trainer.auxiliary.take()
        steps = [trainer.train_step(source) for _ in range(2)]
        losses = [(s.loss_nats, s.gradient_norm, 1.0 + s.auxiliary_loss_nats) for s in steps]
        valid = validation_losses(trainer, {"": (source, 13)})
        right = valid.get("valid_pair_accuracy", 0.0) * 13
        assert abs(right - round(right)) < 1e-9, "each of the 13 rows counts once"
        losses.append((valid["valid_loss_nats"], valid.get("valid_pair_loss_nats", 1.0), 1.0 + right))
        found[name] = (losses, gradients)
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
def test_every_encoder_has_the_same_losses_and_gradients_at_every_layout(layout: tuple[int, int, int]) -> None:
    _assert_equal(_run(layout))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 1), {"recompute": "full"}),
        ((2, 1, 1), {"recompute": "full", "layout_more": {"sequence_parallel": False}}),
        ((2, 2, 1), {"recompute": "selective", "layout_more": {"sequence_parallel": False}}),
        ((1, 2, 1), {"recompute": "full", "layout_more": {"pipeline_split": "balanced"}}),
        ((2, 1, 1), {"recompute": "selective"}),
        ((1, 1, 2), {"layout_more": {"shard": "parameters"}, "micro_batch_size": 4}),
        ((2, 1, 2), {"layout_more": {"shard": "none"}, "micro_batch_size": 1}),
    ],
    ids=str,
)
def test_execution_choices_change_nothing_of_an_encoder(layout: tuple[int, int, int], changes: dict[str, Any]) -> None:
    _assert_equal(_run(layout, UNLIKE, **changes))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 2, 1), {"layout_more": {"schedule": "zero_bubble"}, "recompute": "full"}),
        ((1, 2, 2), {"layout_more": {"schedule": "zero_bubble"}, "micro_batch_size": 1}),
    ],
    ids=str,
)
def test_backward_in_two_halves_changes_nothing_of_an_encoder(
    layout: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    _assert_equal(_run(layout, ("bert untied", "megatron bert"), **changes))


def test_interleaved_stages_change_nothing_of_an_encoder() -> None:
    """Stages of one stack lie on both ranks, two on each."""
    names = ("t5 v1.1",)
    found = _run((1, 2, 1), names, layout_more={"virtual_pipeline": 2})

    _assert_equal(found)


def _train_variants(layout: tuple[int, int, int], variants: tuple[tuple[str, dict[str, Any]], ...]) -> list[Any]:
    found = []
    for name, changes in variants:
        config = _config(name, layout, changes)
        trainer, source = new_trainer(config), EncoderSource(config.model, SEQ_LENGTH, DECODER_LENGTH)
        steps = [trainer.train_step(source) for _ in range(3)]
        found.append([(s.loss_nats, s.gradient_norm) for s in steps])
    return found


def test_encoders_learn_the_same_under_every_optimizer_and_nearly_so_in_every_precision() -> None:
    names = ("bert", "t5", "t5 v1.1")
    muon = tuple((name, {"optimizer": {"kind": "muon"}}) for name in names)
    exact = run_on_ranks(1, _train_variants, (1, 1, 1), (*muon, *((name, {}) for name in names)))[0]
    lower = tuple((name, {"precision": precision}) for precision in ("float32", "bf16", "fp16") for name in names)

    found = run_on_ranks(4, _train_variants, (2, 1, 2), (*muon, *lower))[0]

    for ours, expected in zip(found[:3], exact[:3], strict=True):
        assert relative_difference(ours, expected) < 1e-12
    for (name, changes), losses, expected in zip(lower, found[3:], exact[3:] * 3, strict=True):
        tolerance = 1e-5 if changes["precision"] == "float32" else 4e-2
        assert relative_difference(losses, expected) < tolerance, (name, changes)
