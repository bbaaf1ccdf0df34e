"""The layers against transformers' models from the same weights: logits and the gradient of every parameter."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference_models import (
    FAMILIES,
    gradients_of,
    put_weights,
    random_weights,
    transformers_gradients,
    transformers_model,
)
from torch import Tensor
from training_cases import PatternSource, new_trainer, tiny_config

from training.mesh import init_single_rank
from training.model_config import ModelConfig
from training.scoring import Scorer

pytest.importorskip("transformers", reason="the reference models are in the dev extra")


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    init_single_rank()
    yield
    dist.destroy_process_group()


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(PatternSource().tokens(range(4)))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    inputs, labels = _batch()
    config = tiny_config(family, precision="float32", global_batch_size=4, model={"dropout": 0.0, **changes})
    weights = random_weights(config.model)
    trainer = new_trainer(config)
    put_weights(trainer, weights)
    ours = Scorer(trainer.stage, trainer.mesh).logits(inputs)
    our_gradients = gradients_of(trainer, inputs, labels)

    reference = transformers_model(config.model, weights, tmp_path)
    has_experts = config.model.moe is not None
    out = reference(inputs, **({"output_router_logits": True} if has_experts else {}))
    loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    if has_experts:
        loss = loss + _balance(out.router_logits, config.model, len(inputs))
    loss.backward()
    theirs = transformers_gradients(reference, config.model)

    torch.testing.assert_close(ours, out.logits, rtol=0, atol=1e-5)
    assert our_gradients.keys() == theirs.keys()
    for key, gradient in our_gradients.items():
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-4, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")


def _balance(router_logits: tuple[Tensor, ...], model: ModelConfig, rows: int) -> Tensor:
    """The balance loss of transformers for each layer and row on its own, averaged."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    moe = model.moe
    assert moe is not None and len(router_logits) == sum(model.has_experts(n) for n in range(model.num_layers))
    losses = [
        load_balancing_loss_func((row,), moe.num_experts, moe.top_k)
        for layer in router_logits
        for row in layer.view(rows, -1, moe.num_experts)
    ]
    return moe.aux_loss_coef * torch.stack(losses).mean()
