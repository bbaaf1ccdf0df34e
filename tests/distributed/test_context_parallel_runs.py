"""What surrounds the training of shared sequences: checkpoints at other layouts, held-out losses, scores, reshape."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conversion_cases import convert
from ranks import run_on_ranks
from torch import Tensor
from training_cases import PatternSource, curve, new_trainer, relative_difference, tiny_config

from training.checkpoint import load_checkpoint, load_model, save_checkpoint
from training.config import PretrainConfig
from training.mesh import build_mesh
from training.scoring import Scorer
from training.validation import validation_loss

Layout = tuple[int, int, int, int]  # tensor, pipeline, data, context
SHARED: Layout = (1, 1, 2, 2)
MOE = {"num_experts": 4, "top_k": 2, "aux_loss_coef": 0.05, "ffn_hidden_size": 16}


def _config(layout: Layout, **more: Any) -> PretrainConfig:
    degrees = {"context_parallel": layout[3], **more}
    model = {"hidden_size": 32, "num_query_groups": 2, "moe": MOE}
    optimizer = {"kind": "muon", "ema_decay": 0.9}
    return tiny_config("mixtral", layout[:3], model=model, optimizer=optimizer, layout_more=degrees, valid_batches=2)


def _begin(config: PretrainConfig, root: Path) -> tuple[Any, float]:
    trainer = new_trainer(config)
    curve(trainer, 2)
    held_out = validation_loss(trainer, PatternSource(), 16)
    save_checkpoint(trainer, root, keep_last=1)
    return curve(trainer, 2), held_out


def _go_on(config: PretrainConfig, folder: Path) -> Any:
    trainer = new_trainer(config)
    load_checkpoint(trainer, folder)
    return curve(trainer, 2)


def _score(config: PretrainConfig, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    mesh = build_mesh(config.layout)
    scorer = Scorer(load_model(folder, mesh, precision="float64"), mesh, dtype=torch.float64)
    tokens = torch.from_numpy(PatternSource().tokens(range(3)))
    return *scorer.log_probs(tokens[:, :-1], tokens[:, 1:]), scorer.logits(tokens[:, :-1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("runs")
    configs = {"one": _config((1, 1, 1, 1)), "shared": _config(SHARED, shard_ranks=2)}
    found = {name: run_on_ranks(c.layout.world_size, _begin, c, root / name)[0] for name, c in configs.items()}
    return {name: (*found[name], root / name / "step-00000002") for name in configs}


def test_held_out_losses_and_steps_are_those_of_one_process(runs: dict[str, Any]) -> None:
    losses, held_out, _ = runs["shared"]
    expected, expected_held_out, _ = runs["one"]

    assert relative_difference(losses, expected) < 1e-12
    assert held_out == pytest.approx(expected_held_out, rel=1e-12)


def test_a_run_goes_on_with_other_sharing(runs: dict[str, Any]) -> None:
    expected, _, shared = runs["shared"]
    _, _, one = runs["one"]

    same = run_on_ranks(4, _go_on, _config(SHARED, shard_ranks=2), shared)[0]
    assert same == expected
    for config, folder in (
        (_config((1, 1, 1, 1)), shared),
        (_config((2, 1, 1, 2)), shared),
        (_config((1, 2, 1, 2), shard="none"), one),
    ):
        found = run_on_ranks(config.layout.world_size, _go_on, config, folder)[0]
        assert relative_difference(found, expected) < 1e-12


def test_a_reshaped_checkpoint_goes_on(runs: dict[str, Any], tmp_path: Path) -> None:
    expected, _, shared = runs["shared"]

    cut = convert(shared, tmp_path / "cut", tensor_parallel=2).path / "step-00000002"

    assert relative_difference(run_on_ranks(2, _go_on, _config((2, 1, 1, 1)), cut)[0], expected) < 1e-12


@pytest.mark.parametrize("layout", [(1, 1, 1, 2), (2, 2, 1, 2)], ids=str)
def test_scores_are_of_whole_rows_on_every_rank(runs: dict[str, Any], layout: Layout) -> None:
    folder = runs["shared"][2]
    expected = run_on_ranks(1, _score, _config((1, 1, 1, 1)), folder)[0]

    for found in run_on_ranks(layout[0] * layout[1] * layout[3], _score, _config(layout), folder):
        assert torch.equal(found[1], expected[1])
        for one, other in zip(found[::2], expected[::2], strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
