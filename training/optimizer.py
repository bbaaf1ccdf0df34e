"""Optimizers over the local parts of sharded parameters: AdamW, SGD, Muon, and the moving average of the weights.

DTensor dispatch in the optimizer costs several times the update itself, so all of them work on plain
tensors that share memory with the shards. State is made at once, so that a checkpoint can be read into it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from training.gradients import LocalParameter
from training.mesh import Mesh
from training.muon import Muon
from training.optimizer_config import OptimizerConfig
from training.optimizer_state import EMA, is_orthogonalized
from training.parameters import MOMENTS


class Updater(Protocol):
    """Updates some of a rank's parameters."""

    def step(self, gradients: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        """Update with one gradient for each parameter; `weight_decay` is for those that decay."""
        ...

    def states(self, index: int) -> dict[str, Tensor]:
        """State of parameter `index` of this updater, each tensor of its local shape."""
        ...


class LocalOptimizer:
    """The optimizer of one rank: each parameter has one updater, and all of them may have a moving average."""

    def __init__(self, parameters: list[LocalParameter], config: OptimizerConfig, mesh: Mesh | None = None) -> None:
        """Make the optimizer.

        Args:
            parameters: Of this rank.
            config: Its settings.
            mesh: The layout; Muon needs it, for it sees whole matrices.
        """
        self.parameters = parameters
        self.values = [torch.nn.Parameter(p.value, requires_grad=False) for p in parameters]
        self.ema_decay = config.ema_decay
        self.averages = [v.detach().clone() for v in self.values] if config.ema_decay is not None else []
        self._places: dict[int, tuple[Updater, int]] = {}
        self._updaters: list[tuple[Updater, list[int]]] = []
        self._adam: AdamW | None = None
        everything = list(range(len(parameters)))
        if config.kind == "muon":
            if mesh is None:
                raise ValueError("muon needs the mesh")
            matrices = [n for n in everything if _is_matrix(parameters[n])]
            self._add(Muon([parameters[n] for n in matrices], config, mesh), matrices)
            everything = [n for n in everything if n not in set(matrices)]
        values, decays = [self.values[n] for n in everything], [parameters[n].spec.has_decay for n in everything]
        if config.kind == "sgd":
            self._add(SGD(values, decays, config), everything)
        else:
            self._adam = AdamW(values, decays, config)
            self._add(self._adam, everything)

    def _add(self, updater: Updater, indices: list[int]) -> None:
        self._updaters.append((updater, indices))
        self._places.update({index: (updater, place) for place, index in enumerate(indices)})

    @torch.no_grad()
    def step(self, gradients: list[Tensor], lr: float, weight_decay: float) -> None:
        """Update the parameters with this step's gradients, one for each parameter."""
        for updater, indices in self._updaters:
            updater.step([gradients[n] for n in indices], lr, weight_decay)
        if self.ema_decay is not None and self.averages:
            torch._foreach_lerp_(self.averages, [v.detach() for v in self.values], 1.0 - self.ema_decay)

    @torch.no_grad()
    def restart_averages(self) -> None:
        """Let the moving averages begin with the parameters as they are now."""
        for average, value in zip(self.averages, self.values, strict=True) if self.averages else ():
            average.copy_(value)

    def moments(self, index: int) -> dict[str, Tensor]:
        """Everything kept for parameter `index`, by its name in a checkpoint, each of its local shape."""
        updater, place = self._places[index]
        return updater.states(place) | ({EMA: self.averages[index]} if self.averages else {})

    def set_step(self, step: int) -> None:
        """Say how many updates the moments have seen; decides Adam's bias correction."""
        if self._adam is not None:
            self._adam.set_step(step)


def _is_matrix(parameter: LocalParameter) -> bool:
    return all(is_orthogonalized(name, shape) for name, shape in parameter.spec.stored())


class AdamW:
    """`torch.optim.AdamW`, fused."""

    def __init__(self, values: list[torch.nn.Parameter], decays: list[bool], config: OptimizerConfig) -> None:
        self.values = values
        groups = []
        for decay in (True, False):
            members = [v for v, d in zip(values, decays, strict=True) if d == decay and v.numel()]
            if members:
                groups.append({"params": members, "weight_decay": 0.0, "decays": decay})
        if not groups:
            groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.0, "decays": False}]
        self.adamw = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        for value in values:
            state = {name: torch.zeros_like(value) for name in MOMENTS}
            self.adamw.state[value] = {"step": torch.zeros((), dtype=torch.float32, device=value.device), **state}

    def step(self, gradients: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient if value.numel() else None
        for group in self.adamw.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self.adamw.step()
        for value in self.values:
            value.grad = None

    def states(self, index: int) -> dict[str, Tensor]:
        state = self.adamw.state[self.values[index]]
        return {name: state[name] for name in MOMENTS}

    def set_step(self, step: int) -> None:
        for value in self.values:
            self.adamw.state[value]["step"].fill_(float(step))


class SGD:
    """Stochastic gradient descent with momentum and decoupled weight decay (arXiv:1711.05101, algorithm 1)."""

    def __init__(self, values: list[torch.nn.Parameter], decays: list[bool], config: OptimizerConfig) -> None:
        self.values = [v.detach() for v in values]
        self.decaying = [v for v, decay in zip(self.values, decays, strict=True) if decay]
        self.momentum, self.nesterov = config.momentum, config.nesterov
        self.buffers = [torch.zeros_like(v) for v in self.values]

    def step(self, gradients: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        if not self.values:
            return
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, list(gradients))
        if weight_decay and self.decaying:
            torch._foreach_mul_(self.decaying, 1.0 - lr * weight_decay)
        if self.nesterov:
            updates = torch._foreach_add(list(gradients), self.buffers, alpha=self.momentum)
            torch._foreach_add_(self.values, list(updates), alpha=-lr)
        else:
            torch._foreach_add_(self.values, self.buffers, alpha=-lr)

    def states(self, index: int) -> dict[str, Tensor]:
        return {"momentum": self.buffers[index]}
