"""A layer of experts against the same sums written out token by token."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from training.backend_choice import make_backend
from training.config import LayoutConfig
from training.experts import AuxiliaryLosses, Experts
from training.mesh import build_mesh, init_single_rank
from training.model_config import ModelConfig

LENGTH, ROWS, HIDDEN = 12, 3, 16


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    init_single_rank()
    yield
    dist.destroy_process_group()


def _layer(**moe: Any) -> tuple[Experts, AuxiliaryLosses]:
    model = ModelConfig.model_validate(
        {
            "family": "mixtral",
            "num_layers": 1,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 8,
            "moe": {"num_experts": 5, "aux_loss_coef": 0.0, **moe},
        }
    )
    auxiliary, tp = AuxiliaryLosses(), build_mesh(LayoutConfig()).tensor_parallel
    layer = Experts(make_backend(model, tp), model, tp, "layers.0", has_norm=False, auxiliary=auxiliary).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return layer, auxiliary


def _input() -> Tensor:
    x = torch.randn(LENGTH, ROWS, HIDDEN, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return x.requires_grad_()


def _token_by_token(layer: Experts, x: Tensor, capacity: float) -> Tensor:
    moe = layer.moe
    gate_up = layer.experts.gate_up.weight.view(moe.num_experts, -1, HIDDEN)
    down = layer.experts.down.weight.view(moe.num_experts, HIDDEN, -1)
    rows = []
    for row in x.unbind(1):
        taken, outs = [0] * moe.num_experts, []
        for token in row:
            probs = (layer.router.weight @ token).softmax(0)
            chosen = probs.topk(moe.top_k).indices.tolist()
            out = torch.zeros_like(token)
            for expert in chosen:
                taken[expert] += 1
                if taken[expert] <= capacity:
                    gate, up = (gate_up[expert] @ token).chunk(2)
                    made = down[expert] @ (torch.nn.functional.silu(gate) * up)
                    out = out + made * probs[expert] / probs[chosen].sum()
            outs.append(out)
        rows.append(torch.stack(outs))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
def test_each_token_meets_its_experts_and_those_beyond_capacity_pass_it_by(factor: float | None) -> None:
    layer, _ = _layer(capacity_factor=factor)
    x, same = _input(), _input()
    capacity = math.inf if factor is None else math.ceil(LENGTH * 2 / 5 * factor)

    out, expected = layer(x), _token_by_token(layer, same, capacity)

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    ours = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad(expected.square().sum(), [same, *layer.parameters()])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-8)


def test_a_row_that_fills_an_expert_does_not_change_what_other_rows_or_earlier_tokens_get() -> None:
    layer, _ = _layer(capacity_factor=0.5)
    x = _input().detach()
    crowded = x.clone()
    crowded[6:, 1] = x[0, 1]

    before, after = layer(x), layer(crowded)

    torch.testing.assert_close(after[:, ::2], before[:, ::2])
    torch.testing.assert_close(after[:6], before[:6])


def test_the_losses_join_the_objective_in_backward_by_the_factor_of_the_engine() -> None:
    layer, auxiliary = _layer(aux_loss_coef=0.3, z_loss_coef=0.2)
    x = _input()
    auxiliary.factor = 1 / 7
    found = torch.autograd.grad(layer(x), layer.router.weight, torch.zeros(LENGTH, ROWS, HIDDEN).double())[0]

    logits = x @ layer.router.weight.t()
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs).scatter_(2, probs.topk(2).indices, 1.0)
    balance = 5 * (chosen.mean(0) * probs.mean(0)).sum(-1)  # of each row
    loss = 0.3 * balance.sum() * LENGTH + 0.2 * logits.logsumexp(-1).square().sum()
    expected = torch.autograd.grad(loss / 7, layer.router.weight)[0]

    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    total = auxiliary.take()
    assert total is not None and auxiliary.total is None
    torch.testing.assert_close(total, loss.detach())


def test_even_routing_has_the_least_balance_loss_which_is_top_k() -> None:
    layer, auxiliary = _layer(num_experts=4, top_k=1, aux_loss_coef=1.0)
    layer.router.weight.data = torch.eye(4, HIDDEN, dtype=torch.float64) * 50
    x = torch.zeros(LENGTH, 1, HIDDEN, dtype=torch.float64)
    x[torch.arange(LENGTH), 0, torch.arange(LENGTH) % 4] = 1.0

    layer(x.requires_grad_()).sum().backward()

    assert auxiliary.take().item() == pytest.approx(LENGTH * 1.0)  # type: ignore[union-attr]
