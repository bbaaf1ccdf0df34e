"""One model at every layout: same losses, same gradient norms, same weights, in float64."""

from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor
from training_cases import PatternSource, curve, new_trainer, relative_difference, tiny_config

from training.checkpoint import state_tensors
from training.config import PretrainConfig
from training.pipeline import OwnPipeline

LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
Curve = list[tuple[float, float]]


def _train(config: PretrainConfig) -> tuple[Curve, dict[str, Tensor]]:
    trainer = new_trainer(config)
    found = curve(trainer, config.train_steps)
    tensors = state_tensors(trainer.parameters, trainer.mesh)
    return found, {name: tensor.full_tensor() for name, tensor in tensors.items()}


def _run(config: PretrainConfig) -> tuple[Curve, dict[str, Tensor]]:
    """Train and gather the weights of all stages."""
    results = run_on_ranks(config.layout.world_size, _train, config)
    weights = {name: tensor for _, part in results for name, tensor in part.items()}
    assert all(found == results[0][0] for found, _ in results), "ranks report different numbers"
    return results[0][0], weights


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[Curve, dict[str, Tensor]]]:
    return {family: _run(tiny_config(family)) for family in ("gpt2", "llama")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_ten_steps_are_the_same_at_every_layout(
    family: str, layout: tuple[int, int, int], references: dict[str, tuple[Curve, dict[str, Tensor]]]
) -> None:
    reference_curve, reference_weights = references[family]

    found, weights = _run(tiny_config(family, layout))

    assert len(found) == 10
    assert relative_difference(found, reference_curve) < 1e-12
    assert weights.keys() == reference_weights.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, reference_weights[name], rtol=0, atol=1e-10), name


def test_the_model_learns_in_these_ten_steps(references: dict[str, tuple[Curve, dict[str, Tensor]]]) -> None:
    for found, _ in references.values():
        assert found[-1][0] < found[0][0] - 1.0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 1, 1), {"layout_more": {"sequence_parallel": False}}),
        ((2, 2, 1), {"layout_more": {"sequence_parallel": False}}),
        ((1, 1, 1), {"recompute": "full"}),
        ((2, 1, 1), {"recompute": "full"}),
        ((1, 2, 1), {"recompute": "full"}),
        ((1, 1, 1), {"recompute": "selective"}),
        ((2, 1, 1), {"recompute": "selective"}),
        ((2, 1, 1), {"recompute": "selective", "layout_more": {"sequence_parallel": False}}),
        ((1, 2, 1), {"recompute": "selective"}),
        ((1, 2, 1), {"recompute": "full", "recompute_layers": [1]}),
        ((1, 1, 2), {"layout_more": {"shard": "none"}}),
        ((1, 1, 2), {"layout_more": {"shard": "gradients"}}),
        ((1, 1, 2), {"layout_more": {"shard": "parameters"}}),
        ((1, 1, 2), {"layout_more": {"shard": "parameters"}, "recompute": "full"}),
        ((2, 1, 1), {"micro_batch_size": 4}),
    ],
    ids=str,
)
def test_execution_choices_do_not_change_the_run(
    family: str,
    layout: tuple[int, int, int],
    changes: dict[str, object],
    references: dict[str, tuple[Curve, dict[str, Tensor]]],
) -> None:
    found, _ = _run(tiny_config(family, layout, **changes))

    assert relative_difference(found, references[family][0]) < 1e-12


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_tying_the_embeddings_is_exact_under_pipelining(layout: tuple[int, int, int], tied: bool) -> None:
    model = {"tied_embeddings": tied, "num_layers": 3}
    reference, _ = _run(tiny_config("gpt2", train_steps=4, model=model))

    found, _ = _run(tiny_config("gpt2", layout, train_steps=4, model=model))

    assert relative_difference(found, reference) < 1e-12


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 1, 1), {}),
        ((2, 1, 1), {"layout_more": {"sequence_parallel": False}}),
        ((1, 2, 2), {"micro_batch_size": 1}),
        ((1, 1, 1), {"recompute": "full"}),
    ],
    ids=str,
)
def test_dropout_drops_the_same_elements_at_every_layout(
    layout: tuple[int, int, int], changes: dict[str, object]
) -> None:
    model = {"dropout": 0.2}
    reference, _ = _run(tiny_config("gpt2", train_steps=4, model=model))
    without, _ = _run(tiny_config("gpt2", train_steps=4))

    found, _ = _run(tiny_config("gpt2", layout, train_steps=4, model=model, **changes))

    assert relative_difference(found, reference) < 1e-12
    assert relative_difference(found, without) > 1e-4


def _train_with_own_pipeline(config: PretrainConfig) -> Curve:
    trainer = new_trainer(config)
    trainer.engine = OwnPipeline(trainer.stages[0], trainer.mesh, config)
    return curve(trainer, config.train_steps)


@pytest.mark.parametrize("layout", [(1, 2, 2), (1, 4, 1)], ids=str)
def test_the_schedule_of_torch_equals_our_own_one_forward_one_backward(layout: tuple[int, int, int]) -> None:
    config = tiny_config("gpt2", layout, train_steps=3, micro_batch_size=1, model={"num_layers": 5})

    ours = run_on_ranks(config.layout.world_size, _train_with_own_pipeline, config)[0]

    assert relative_difference(_run(config)[0], ours) < 1e-14


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_lower_precision_stays_near_float64(
    layout: tuple[int, int, int],
    precision: str,
    tolerance: float,
    references: dict[str, tuple[Curve, dict[str, Tensor]]],
) -> None:
    found, weights = _run(tiny_config("gpt2", layout, precision=precision))

    assert relative_difference(found, references["gpt2"][0]) < tolerance
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_rows_of_a_step_do_not_depend_on_data_parallelism(tmp_path: Path) -> None:
    from training.data import step_sample_ids

    one = step_sample_ids(16, 8, dp_rank=0, dp_size=1)
    two = [step_sample_ids(16, 8, dp_rank=rank, dp_size=2) for rank in (0, 1)]

    assert [*two[0], *two[1]] == list(one) == list(range(16, 24))
    assert PatternSource().tokens(one).shape == (8, 33)
