"""AdamW over the local parts of sharded parameters, and the learning-rate schedule."""

import math

import torch
from torch import Tensor

from training.config import OptimizerConfig
from training.gradients import LocalParameter
from training.parameters import MOMENTS


class LocalAdamW:
    """Steps `torch.optim.AdamW` on plain tensors that share memory with the shards.

    DTensor dispatch in the optimizer costs several times the update itself, and the update is
    element-wise, so no rank needs to know of the others. State is made at once, so that a
    checkpoint can be read into it.
    """

    def __init__(self, parameters: list[LocalParameter], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = parameters
        self.values = [torch.nn.Parameter(p.value, requires_grad=False) for p in parameters]
        groups = []
        for decay in (True, False):
            members = [
                v for v, p in zip(self.values, parameters, strict=True) if p.spec.has_decay == decay and v.numel()
            ]
            if members:
                groups.append({"params": members, "weight_decay": config.weight_decay if decay else 0.0})
        if not groups:
            groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        for value in self.values:
            state = {name: torch.zeros_like(value) for name in MOMENTS}
            self.adamw.state[value] = {"step": torch.zeros((), dtype=torch.float32, device=value.device), **state}

    def step(self, gradients: list[Tensor], lr: float) -> None:
        """Update the parameters with this step's gradients, one for each parameter."""
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient if value.numel() else None
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for value in self.values:
            value.grad = None

    def moments(self, index: int) -> dict[str, Tensor]:
        """First and second moment of parameter `index`, each of its local shape."""
        state = self.adamw.state[self.values[index]]
        return {name: state[name] for name in MOMENTS}

    def set_step(self, step: int) -> None:
        """Say how many updates the moments have seen; decides Adam's bias correction."""
        for value in self.values:
            self.adamw.state[value]["step"].fill_(float(step))


def learning_rate(step: int, config: OptimizerConfig, train_steps: int) -> float:
    """Learning rate of update number `step` (from 1): linear warm-up to lr, then a cosine down to min_lr."""
    decay_steps = config.decay_steps or train_steps
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if step >= decay_steps:
        return config.min_lr
    progress = (step - config.warmup_steps) / (decay_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
