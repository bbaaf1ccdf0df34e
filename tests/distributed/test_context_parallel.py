"""Sequences that ranks share: losses, gradient norms and gradients of every family are those of one process.

One launch trains all cases of a layout, since launches cost more than tiny models.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from encoder_cases import ENCODERS, SHORT, EncoderSource
from layout_parity import Found, assert_equal, joined
from ranks import run_on_ranks
from reference_models import batch_gradients, put_weights, random_weights
from torch import Tensor
from training_cases import SEQ_LENGTH, PatternSource, new_trainer, relative_difference, tiny_config

from training.config import IGNORE_INDEX, PretrainConfig
from training.data import Source, count_loss_tokens, read_batch, step_sample_ids, weigh_pairs

MOE = {"num_experts": 6, "top_k": 2, "aux_loss_coef": 0.05, "z_loss_coef": 0.03, "capacity_factor": 1.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 with dropout": ("gpt2", {"dropout": 0.2}),
    "llama": ("llama", {"qk_norm": True}),
    "mistral": ("mistral", {"sliding_window": 5, "num_query_groups": 2}),
    "neox": ("neox", {"rotary_percent": 0.5, "dropout": 0.1}),
    "experts": ("mixtral", {"num_query_groups": 2, "tied_embeddings": True, "moe": MOE}),
    "bert with pairs": ("bert", {**ENCODERS["bert"][1], "dropout": 0.2}),
    "roberta": ("roberta", {"dropout": 0.1}),
    "t5": ("t5", {**SHORT, "head_dim": 16, "dropout": 0.2}),
    "four layers": ("mixtral", {"num_layers": 4, "dropout": 0.1, "sliding_window": 9, "moe": MOE}),
}
TWO_LAYERS = tuple(name for name in CASES if name != "four layers")
UNLIKE = ("gpt2 with dropout", "mistral", "experts", "bert with pairs", "t5")
DECODER_LENGTH = 16
Layout = tuple[int, int, int, int]  # tensor, pipeline, data, context


class DocumentSource:
    """Rows of several documents: positions begin anew, no token sees another document, some labels do not count."""

    def rows(self, sample_ids: Any) -> dict[str, Any]:
        tokens = PatternSource().tokens(sample_ids)
        documents = np.stack(
            [np.sort(np.random.default_rng(int(n) + 99).integers(0, 4, SEQ_LENGTH)) for n in sample_ids]
        )
        is_first = np.diff(documents, axis=1, prepend=-1) != 0
        starts = np.maximum.accumulate(np.where(is_first, np.arange(SEQ_LENGTH), 0), axis=1)
        labels = np.where(np.roll(is_first, -1, axis=1), IGNORE_INDEX, tokens[:, 1:])
        context = {"documents": documents, "positions": np.arange(SEQ_LENGTH) - starts}
        return {"inputs": tokens[:, :-1], "labels": labels, **context}


def _config(name: str, layout: Layout, changes: dict[str, Any]) -> PretrainConfig:
    family, model = CASES[name]
    more = {"context_parallel": layout[3], **changes.get("layout_more", {})}
    decoder = {"decoder_seq_length": DECODER_LENGTH} if family == "t5" else {}
    return tiny_config(family, layout[:3], train_steps=4, model=model, **{**decoder, **changes, "layout_more": more})


def _sources(config: PretrainConfig) -> tuple[Source, Source]:
    if config.model.causal:
        return PatternSource(), DocumentSource()
    source = EncoderSource(config.model, SEQ_LENGTH, DECODER_LENGTH)
    return source, source


def _train_all(layout: Layout, names: tuple[str, ...], changes: dict[str, Any]) -> Found:
    found = {}
    for name in names:
        config = _config(name, layout, changes)
        trainer = new_trainer(config)
        put_weights(trainer, random_weights(config.model, torch.float64))
        sources = _sources(config)
        mesh, rows = trainer.mesh, config.global_batch_size
        ids = step_sample_ids(0, rows, dp_rank=mesh.rank("dp"), dp_size=mesh.size("dp"))
        batch = read_batch(sources[0], ids, mesh.device)
        num_tokens = count_loss_tokens(batch, mesh)
        gradients = batch_gradients(trainer, weigh_pairs(batch, num_tokens, rows), num_tokens)
        trainer.auxiliary.take()
        results = [trainer.train_step(sources[1])]
        found[name] = ([(r.loss_nats, r.gradient_norm, 1.0 + r.auxiliary_loss_nats) for r in results], gradients)
    return found


def _run(layout: Layout, names: tuple[str, ...] = TWO_LAYERS, **changes: Any) -> Found:
    tp, pp, dp, cp = layout
    parts: list[Found] = run_on_ranks(tp * pp * dp * cp, _train_all, layout, names, changes, timeout_s=300)
    return joined(parts)


@cache
def _reference() -> Found:
    return _run((1, 1, 1, 1), tuple(CASES))


def _assert_equal(found: Found) -> None:
    assert_equal(found, _reference())


@pytest.mark.parametrize(
    "layout",
    [(1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2)],
    ids=str,
)
def test_every_family_is_the_same_where_ranks_share_sequences(layout: Layout) -> None:
    is_whole = layout in ((1, 1, 1, 2), (2, 2, 1, 2))
    _assert_equal(_run(layout, TWO_LAYERS if is_whole else UNLIKE))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 1, 2), {"recompute": "full", "layout_more": {"shard": "parameters"}}),
        ((2, 1, 1, 2), {"recompute": "selective", "layout_more": {"sequence_parallel": False, "shard": "gradients"}}),
        ((1, 1, 2, 2), {"recompute": "selective", "layout_more": {"shard": "none"}, "micro_batch_size": 1}),
        ((1, 1, 2, 2), {"layout_more": {"shard": "parameters", "shard_ranks": 2}}),
    ],
    ids=str,
)
def test_execution_choices_change_nothing(layout: Layout, changes: dict[str, Any]) -> None:
    _assert_equal(_run(layout, ("gpt2 with dropout", "experts", "bert with pairs", "t5"), **changes))


def test_more_ranks_and_interleaved_stages_change_nothing() -> None:
    _assert_equal(_run((1, 1, 1, 4), ("llama", "experts")))
    interleaved = {"recompute": "full", "layout_more": {"virtual_pipeline": 2}}
    _assert_equal(_run((1, 2, 1, 2), ("four layers",), **interleaved))


def test_backward_in_two_halves_changes_nothing() -> None:
    """Experts are dealt as well, so that two exchanges of a layer are in either half."""
    for schedule in ("zero_bubble", "zbv"):
        more = {"schedule": schedule, "expert_parallel": 2}
        _assert_equal(_run((1, 2, 1, 2), ("four layers",), layout_more=more))
    _assert_equal(_run((1, 2, 1, 2), ("four layers",), layout_more={"schedule": "zbv"}))


def _kept_bytes(config: PretrainConfig) -> int:
    """Memory of what a forward pass keeps for backward, without parameters."""
    trainer = new_trainer(config)
    batch = read_batch(PatternSource(), step_sample_ids(0, 2, dp_rank=0, dp_size=1), trainer.mesh.device)
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.stages[0](batch.inputs, want="hidden")
    weights = {p.untyped_storage().data_ptr() for p in trainer.stages[0].parameters()}
    return sum(size for place, size in held.items() if place not in weights)


def test_a_rank_keeps_its_share_of_the_activations() -> None:
    whole = run_on_ranks(1, _kept_bytes, _config("llama", (1, 1, 1, 1), {}))[0]

    for kept in run_on_ranks(4, _kept_bytes, _config("llama", (1, 1, 1, 4), {})):
        assert kept == pytest.approx(whole / 4, rel=0.05)


def _lower_precision(configs: list[PretrainConfig]) -> list[Any]:
    return [[new_trainer(config).train_step(DocumentSource()).loss_nats] for config in configs]


def test_lower_precision_stays_near() -> None:
    exact = run_on_ranks(1, _lower_precision, [_config("experts", (1, 1, 1, 1), {})])[0][0]
    lower = {"float32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
    configs = [_config("experts", (2, 1, 1, 2), {"precision": precision}) for precision in lower]

    for found, tolerance in zip(run_on_ranks(4, _lower_precision, configs)[0], lower.values(), strict=True):
        assert relative_difference(found, exact) < tolerance
