"""Each optimizer against torch's own, on plain tensors."""

import pytest
import torch
from torch import Tensor

from training.config import PretrainConfig
from training.estimate import estimate
from training.gradients import LocalParameter
from training.muon import Muon, newton_schulz
from training.optimizer import LocalOptimizer
from training.optimizer_config import OptimizerConfig
from training.parameters import ParamSpec

SHAPES = {"layers.0.attn.qkv.weight": (24, 8), "layers.0.mlp.down.weight": (8, 20), "layers.0.attn.norm.weight": (8,)}


def _parameters(dtype: torch.dtype = torch.float64) -> list[LocalParameter]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=generator, dtype=dtype)
        found.append(LocalParameter(name, ParamSpec(name, None, shape), value, value, False))
    return found


def _gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES.values()]


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_torch(nesterov: bool) -> None:
    ours = _parameters()
    theirs = [torch.nn.Parameter(p.value.clone()) for p in ours]
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, nesterov=nesterov)
    optimizer = LocalOptimizer(ours, OptimizerConfig(kind="sgd", momentum=0.9, nesterov=nesterov))

    for step in range(4):
        optimizer.step(_gradients(step), 0.1, 0.0)
        for value, gradient in zip(theirs, _gradients(step), strict=True):
            value.grad = gradient
        reference.step()

    for p, value in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.value, value.detach(), rtol=1e-13, atol=1e-14)


def test_weight_decay_of_sgd_is_decoupled_and_spares_norms() -> None:
    parameters = _parameters()
    before = [p.value.clone() for p in parameters]
    zero = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES.values()]

    LocalOptimizer(parameters, OptimizerConfig(kind="sgd")).step(zero, 0.5, 0.2)

    torch.testing.assert_close(parameters[0].value, before[0] * 0.9)
    assert torch.equal(parameters[2].value, before[2])


@pytest.fixture
def muon(monkeypatch: pytest.MonkeyPatch) -> Muon:
    class OneRank:
        tensor_parallel = expert_parallel = type("One", (), {"rank": 0, "size": 1})
        device_mesh = type("Mesh", (), {"mesh": torch.zeros(1, 1, 1, 1, dtype=torch.int64)})

    config = OptimizerConfig(kind="muon", muon_scale="match_rms_adamw")
    return Muon(_parameters(torch.float32)[:2], config, OneRank())  # type: ignore[arg-type]


def test_muon_equals_torch_with_its_bfloat16_iterations(muon: Muon, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [torch.nn.Parameter(v.clone()) for v in muon.values]
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    monkeypatch.setattr(muon, "_orthogonalized", lambda m: newton_schulz(m.bfloat16(), 5).to(m.dtype))

    for step in range(4):
        gradients = _gradients(step, torch.float32)[:2]
        muon.step(gradients, 0.02, 0.1)
        for value, gradient in zip(theirs, gradients, strict=True):
            value.grad = gradient
        reference.step()

    for ours, value in zip(muon.values, theirs, strict=True):
        torch.testing.assert_close(ours, value.detach(), rtol=2e-2, atol=2e-3)


def test_an_update_of_muon_has_singular_values_around_one() -> None:
    for shape in ((24, 8), (8, 20), (3, 8, 20)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        values = torch.linalg.svdvals(newton_schulz(matrix, 5))
        assert values.min() > 0.6
        assert values.max() < 1.3
    stacked = torch.randn(2, 6, 9, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(stacked, 5)[1], newton_schulz(stacked[1], 5))


def test_the_estimate_knows_what_each_optimizer_keeps() -> None:
    model = {"vocab_size": 128, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    found = {}
    for kind, average in (("adamw", None), ("sgd", None), ("muon", None), ("adamw", 0.9)):
        optimizer = {"kind": kind, "ema_decay": average}
        found[kind, average] = estimate(PretrainConfig.model_validate({"model": model, "optimizer": optimizer}))
    whole = 4 * found["adamw", None].parameters

    assert found["adamw", None].optimizer_bytes == 2 * whole
    assert found["adamw", 0.9].optimizer_bytes == 3 * whole
    assert found["sgd", None].optimizer_bytes == whole
    assert whole < found["muon", None].optimizer_bytes < 2 * whole
    assert found["sgd", None].checkpoint_bytes == 2 * whole
