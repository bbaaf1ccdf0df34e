"""Uneven and interleaved pipelines in float64: gradients, losses, validation, scores and checkpoints of one process.

One launch goes through many cases, since launches cost more than tiny models.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from reference_models import gradients_of
from torch import Tensor
from training_cases import PatternSource, curve, new_trainer, relative_difference, tiny_config

from conversion.rank_shards import shards_by_rank
from training.checkpoint import load_checkpoint, load_model, save_checkpoint
from training.config import PretrainConfig
from training.safe_pickle import read_dcp_metadata
from training.scoring import Scorer
from training.validation import validation_loss

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("gpt2", {"tied_embeddings": True}),
    "untied with dropout": ("llama", {"tied_embeddings": False, "dropout": 0.1}),
    "experts": (
        "mixtral",
        {"tied_embeddings": True, "moe": {"num_experts": 4, "top_k": 2, "aux_loss_coef": 0.05, "z_loss_coef": 0.03}},
    ),
    "post-norm": ("gpt2", {"norm_position": "post"}),
}
Case = tuple[str, dict[str, Any]]
Found = tuple[list[tuple[float, float]], dict[str, Tensor], float, Tensor]


def _config(name: str, layout: tuple[int, int, int], changes: dict[str, Any]) -> PretrainConfig:
    family, model = MODELS[name]
    settings = {"micro_batch_size": 1, "z_loss": 1e-3, "valid_batches": 1, "train_steps": 3, **changes}
    settings["layout_more"] = dict(changes.get("layout_more", {}))
    return tiny_config(family, layout, model={"num_layers": 8, **model}, **settings)


def _measure(config: PretrainConfig, root: Path) -> Found:
    """Gradients of the first batch; the curve of three steps, the last after a checkpoint; validation; logits."""
    trainer = new_trainer(config)
    rows = config.global_batch_size // config.layout.data_parallel
    first = trainer.mesh.rank("dp") * rows
    tokens = torch.from_numpy(PatternSource().tokens(range(first, first + rows)))
    gradients = gradients_of(trainer, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    losses = curve(trainer, 2)
    row = torch.from_numpy(PatternSource().tokens(np.arange(2)))[:, :-1]
    valid = validation_loss(trainer, PatternSource(), config.global_batch_size)
    folder = save_checkpoint(trainer, root, keep_last=1)
    again = new_trainer(config.model_copy(update={"seed": 99}))
    load_checkpoint(again, folder)
    third, expected = curve(again, 1), curve(trainer, 1)
    if config.model.dropout == 0:  # dropout follows from the seed
        assert third == expected
    logits = Scorer(load_model(folder, trainer.mesh, precision="float64"), trainer.mesh, dtype=torch.float64).logits(
        row
    )
    return [*losses, *expected], gradients, valid, logits


def _measure_all(layout: tuple[int, int, int], cases: list[Case], root: Path) -> list[Found]:
    found = []
    for number, (name, changes) in enumerate(cases):
        found.append(_measure(_config(name, layout, changes), root / str(number)))
    return found


@cache
def _reference(name: str, root: Path) -> Found:
    return run_on_ranks(1, _measure_all, (1, 1, 1), [(name, {})], root / name)[0][0]


def _assert_exact(layout: tuple[int, int, int], cases: list[Case], root: Path, reference_root: Path) -> None:
    tp, pp, dp = layout
    ranks = run_on_ranks(tp * pp * dp, _measure_all, layout, cases, root, timeout_s=300)
    for number, (name, changes) in enumerate(cases):
        losses, gradients, valid, logits = _reference(name, reference_root)
        label = f"{name} {changes}"
        for found in (rank[number] for rank in ranks):
            assert relative_difference(found[0], losses) < 1e-12, label
            assert found[2] == pytest.approx(valid, rel=1e-12), label
            assert torch.allclose(found[3], logits, rtol=0, atol=1e-10), label
        whole = {key: gradient for rank in ranks for key, gradient in rank[number][1].items()}
        assert whole.keys() == gradients.keys(), label
        for key, gradient in whole.items():
            assert torch.allclose(gradient, gradients[key], rtol=0, atol=1e-10), f"{label}: {key}"
        _assert_pieces_where_reshape_puts_them(_config(name, layout, changes), root / str(number))


def _assert_pieces_where_reshape_puts_them(config: PretrainConfig, root: Path) -> None:
    stored = read_dcp_metadata(root / "step-00000002").storage_data
    found = {(index.fqn, tuple(index.offset or ())): info.relative_path for index, info in stored.items()}
    expected = {
        (shard.name, tuple(start for start, _ in shard.box)): f"__{rank}_0.distcp"
        for rank, shards in enumerate(shards_by_rank(config.model, config.layout, has_optimizer=True))
        for shard in shards
    }
    assert found == expected


@pytest.fixture(scope="module")
def reference_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-process")


def _split(split: object, **more: Any) -> dict[str, Any]:
    return {"layout_more": {"pipeline_split": split}, **more}


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (
            (1, 2, 1),
            [
                ("tied", _split([7, 1])),
                ("tied", _split([8, 0])),
                ("tied", _split([0, 8])),
                ("untied with dropout", _split("balanced", recompute="full")),
                ("post-norm", _split([8, 0], recompute="selective")),
            ],
        ),
        ((1, 4, 1), [("tied", _split([1, 3, 4, 0])), ("experts", _split([0, 5, 2, 1]))]),
        ((2, 2, 2), [("tied", _split([5, 3])), ("untied with dropout", _split([2, 6]))]),
    ],
    ids=str,
)
def test_an_uneven_pipeline_equals_one_process(
    layout: tuple[int, int, int], cases: list[Case], tmp_path: Path, reference_root: Path
) -> None:
    _assert_exact(layout, cases, tmp_path, reference_root)


def _interleaved(virtual: int, **more: Any) -> dict[str, Any]:
    return {"layout_more": {"virtual_pipeline": virtual, **more.pop("layout_more", {})}, **more}


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (
            (1, 2, 1),
            [
                ("tied", _interleaved(2)),
                ("tied", _interleaved(4, layout_more={"pipeline_split": [0, 1, 2, 1, 1, 1, 2, 0]})),
                ("untied with dropout", _interleaved(3, layout_more={"pipeline_split": "balanced"}, recompute="full")),
                ("experts", _interleaved(2, recompute="selective")),
                ("post-norm", _interleaved(2, micro_batch_size=4)),
            ],
        ),
        (
            (1, 4, 1),
            [
                ("tied", _interleaved(2)),
                ("untied with dropout", _interleaved(2)),
                ("experts", _interleaved(2, recompute="full")),
                ("post-norm", _interleaved(2, micro_batch_size=2)),
            ],
        ),
        (
            (2, 2, 2),
            [
                ("tied", _interleaved(2)),
                ("untied with dropout", _interleaved(3, recompute="selective")),
                ("experts", _interleaved(4, layout_more={"shard": "none"})),
            ],
        ),
        (
            (2, 4, 1),
            [("tied", _interleaved(2, layout_more={"sequence_parallel": False})), ("experts", _interleaved(2))],
        ),
        ((1, 4, 2), [("tied", _interleaved(2)), ("untied with dropout", _interleaved(2, recompute="full"))]),
    ],
    ids=str,
)
def test_an_interleaved_pipeline_equals_one_process(
    layout: tuple[int, int, int], cases: list[Case], tmp_path: Path, reference_root: Path
) -> None:
    _assert_exact(layout, cases, tmp_path, reference_root)


def _growing_curve(config: PretrainConfig) -> list[tuple[float, float]]:
    return curve(new_trainer(config), config.train_steps)


def test_batches_that_grow_and_muon_are_exact_on_an_interleaved_pipeline() -> None:
    changes = {"rampup_batch_size": (4, 4, 8), "optimizer": {"kind": "muon"}, "train_steps": 4}
    reference = run_on_ranks(1, _growing_curve, _config("tied", (1, 1, 1), changes))

    found = run_on_ranks(4, _growing_curve, _config("tied", (1, 2, 2), {**changes, **_interleaved(2)}))

    assert all(relative_difference(losses, reference[0]) < 1e-11 for losses in found)


def _scheduled(schedule: str, **more: Any) -> dict[str, Any]:
    return {"layout_more": {"schedule": schedule, **more.pop("layout_more", {})}, **more}


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (
            (1, 2, 1),
            [
                ("tied", _scheduled("zero_bubble")),
                ("tied", _scheduled("zbv")),
                ("tied", _scheduled("zbv", layout_more={"pipeline_split": [0, 4, 4, 0]}, micro_batch_size=4)),
                ("untied with dropout", _scheduled("zero_bubble", layout_more={"virtual_pipeline": 2})),
                ("untied with dropout", _scheduled("zbv", recompute="full")),
                ("experts", _scheduled("zero_bubble", recompute="full")),
                ("experts", _scheduled("zbv")),
                ("post-norm", _scheduled("zbv", layout_more={"pipeline_split": "balanced"})),
            ],
        ),
        (
            (1, 4, 1),
            [
                ("tied", _scheduled("zero_bubble", micro_batch_size=2)),
                ("tied", _scheduled("zbv", micro_batch_size=2)),
                ("experts", _scheduled("zero_bubble", layout_more={"virtual_pipeline": 2})),
                ("untied with dropout", _scheduled("zbv")),
            ],
        ),
        (
            (2, 2, 2),
            [
                ("tied", _scheduled("zero_bubble")),
                ("tied", _scheduled("zbv", layout_more={"shard": "none"})),
                ("untied with dropout", _scheduled("zbv", recompute="full")),
                ("experts", _scheduled("zbv", layout_more={"sequence_parallel": False})),
                ("experts", _scheduled("zero_bubble", layout_more={"virtual_pipeline": 2})),
            ],
        ),
    ],
    ids=str,
)
def test_backward_in_two_halves_equals_one_process(
    layout: tuple[int, int, int], cases: list[Case], tmp_path: Path, reference_root: Path
) -> None:
    _assert_exact(layout, cases, tmp_path, reference_root)
