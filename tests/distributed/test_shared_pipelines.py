"""Stages of a pipeline whose gradients or parameters are shared by data ranks are exact, with experts too."""

from typing import Any

import pytest
from ranks import run_on_ranks
from training_cases import curve, new_trainer, relative_difference, tiny_config

from training.config import PretrainConfig

MOE = {"num_experts": 4, "top_k": 2, "aux_loss_coef": 0.05}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"num_layers": 4, "dropout": 0.1}),
    "experts": ("mixtral", {"num_layers": 4, "tied_embeddings": True, "moe": MOE}),
}


def _configs(layout: tuple[int, int, int], names: tuple[str, ...] = tuple(MODELS), **more: Any) -> list[PretrainConfig]:
    return [
        tiny_config(
            MODELS[name][0],
            layout,
            train_steps=3,
            micro_batch_size=1,
            recompute="full",
            model=dict(MODELS[name][1]),
            layout_more=dict(more),
        )
        for name in names
    ]


def _train(configs: list[PretrainConfig]) -> list[Any]:
    return [curve(new_trainer(config), 3) for config in configs]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return dict(zip(MODELS, run_on_ranks(1, _train, _configs((1, 1, 1)))[0], strict=True))


@pytest.mark.parametrize(
    ("layout", "names", "more"),
    [
        ((1, 2, 2), tuple(MODELS), {}),
        ((2, 2, 2), tuple(MODELS), {"sequence_parallel": False}),
        ((1, 2, 2), tuple(MODELS), {"virtual_pipeline": 2}),
        ((1, 2, 2), ("experts",), {"context_parallel": 2, "expert_parallel": 2, "shard_ranks": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_a_pipeline_shares_what_it_is_told_to(
    layout: tuple[int, int, int], names: tuple[str, ...], more: dict[str, Any], shard: str, expected: dict[str, Any]
) -> None:
    configs = _configs(layout, names, shard=shard, **more)

    found = run_on_ranks(configs[0].layout.world_size, _train, configs)

    assert all(one == found[0] for one in found)
    for name, losses in zip(names, found[0], strict=True):
        assert relative_difference(losses, expected[name]) < 1e-12, name


def _gradients_between(config: PretrainConfig) -> tuple[int, int]:
    """Most parameters with a whole gradient at the end of a backward pass, and parameters, of this rank's stage."""
    from torch.distributed.fsdp import fully_shard

    trainer = new_trainer(config)
    stage = trainer.stages[0]
    state = fully_shard.state(stage)  # type: ignore[attr-defined]
    groups = [group for part in state._state_ctx.all_states for group in part._fsdp_param_groups]
    wholes = []

    def look(*_: Any) -> None:
        held = [p for group in groups for p in group.fsdp_params if p.unsharded_accumulated_grad is not None]
        wholes.append(len(held))

    backward = trainer.engine.schedule._stage.backward_maybe_with_nosync  # type: ignore[attr-defined]

    def watched(*arguments: Any, **more: Any) -> Any:
        result = backward(*arguments, **more)
        look()
        return result

    trainer.engine.schedule._stage.backward_maybe_with_nosync = watched  # type: ignore[attr-defined]
    curve(trainer, 1)
    return max(wholes), sum(len(group.fsdp_params) for group in groups)


def test_no_whole_gradient_is_kept_between_micro_batches() -> None:
    for shard, keeps in (("optimizer", True), ("gradients", False)):
        (config,) = _configs((1, 2, 2), ("gpt2",), shard=shard)
        for most, parameters in run_on_ranks(4, _gradients_between, config):
            assert most == (parameters if keeps else 0)
