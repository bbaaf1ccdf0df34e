"""What happens to gradients between backward and the optimizer: the sums that are still due, norm, clipping."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.mesh import Mesh
from training.model import TransformerStage
from training.parameters import ParamSpec
from training.pipeline_split import rank_of_stage
from training.sharding import is_first_copy, local_tensor


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of one of this rank's stages.

    Args:
        path: Attribute path in the stage's module.
        spec: What it is in the whole model.
        sharded: The parameter as `fully_shard` made it.
        value: This rank's part, sharing memory; the optimizer works on it.
        is_tied_copy: A later stage's copy of a parameter that several stages hold (training/tied.py).
    """

    path: str
    spec: ParamSpec
    sharded: Tensor
    value: Tensor
    is_tied_copy: bool


def local_parameters(stages: Sequence[TransformerStage]) -> list[LocalParameter]:
    """List the parameters of a rank's sharded stages in a fixed order."""
    found = []
    for stage in stages:
        for path, parameter in stage.named_parameters():
            spec = stage.param_specs[path]
            is_copy = stage.place not in stage.shared.get(spec.canonical_name, (stage.place,))[:1]
            found.append(LocalParameter(path, spec, parameter, local_tensor(parameter.detach()), is_copy))
    return found


class GradientFinisher:
    """Finishes the gradients of a step; every rank calls it with its own stages.

    Args:
        parameters: `local_parameters` of this rank's stages.
        mesh: The layout.
        shared: Parameters that several stages hold, and which (`shared_parameters`).
    """

    def __init__(self, parameters: list[LocalParameter], mesh: Mesh, *, shared: Mapping[str, tuple[int, ...]]) -> None:
        self.parameters = parameters
        self.mesh = mesh
        self.copies = [
            _Copies([n for n, p in enumerate(parameters) if p.spec.canonical_name == name], _group_of(stages, mesh))
            for name, stages in shared.items()
        ]

    def finish(self) -> list[Tensor]:
        """Do the sums that are still due and return each parameter's local gradient."""
        gradients = [_gradient(p) for p in self.parameters]
        for copies in self.copies:
            copies.sum(gradients)
        if self.mesh.tensor_parallel.size > 1:
            self._sum_partial([g for p, g in zip(self.parameters, gradients, strict=True) if p.spec.sp_partial])
        return gradients

    def _sum_partial(self, gradients: list[Tensor]) -> None:
        gradients = [g for g in gradients if g.numel()]
        if not gradients:
            return
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=self.mesh.group("tp"))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def agree(
        self,
        gradients: list[Tensor],
        loss_sum: Tensor,
        *,
        auxiliary_sum: Tensor | None = None,
        wants_to_stop: bool = False,
    ) -> tuple[float, float, float, bool]:
        """Norm of the whole model's gradient, losses over all ranks, and whether any rank wants to stop.

        Every parameter counts once, however many ranks hold it.

        Args:
            gradients: From `finish`.
            loss_sum: This rank's share of the loss; zero on all stages but the last.
            auxiliary_sum: This rank's share of the losses that layers add (`AuxiliaryLosses.take`).
            wants_to_stop: This rank was asked to save and end; all must do so after the same step.

        Returns:
            The norm, the loss sum, the auxiliary sum, and whether to stop.
        """
        is_first_tp = self.mesh.rank("tp") == 0
        counted = [
            gradient
            for p, gradient in zip(self.parameters, gradients, strict=True)
            if not p.is_tied_copy
            and (p.spec.tp_dim is not None or is_first_tp)
            and is_first_copy(p.sharded)
            and gradient.numel()
        ]
        sums = torch.zeros(4, dtype=torch.float64, device=self.mesh.device)
        if counted:
            norms = torch.stack(torch._foreach_norm(counted))
            sums[0] = norms.double().square().sum()
        if self.mesh.is_last_stage and is_first_tp:
            sums[1] = loss_sum.double()
        if auxiliary_sum is not None:
            sums[2] = auxiliary_sum.double()
        sums[3] = float(wants_to_stop)
        dist.all_reduce(sums)
        squared, loss, auxiliary, stops = sums.tolist()
        return squared**0.5, loss, auxiliary, stops > 0


def clip(gradients: list[Tensor], norm: float, limit: float, *, loss_scale: float = 1.0) -> None:
    """Scale gradients in place so that their global norm is at most `limit`; 0 does not clip.

    The factor is limit / (norm + 1e-6), at most 1, as in `torch.nn.utils.clip_grad_norm_`.

    Args:
        norm: Of the gradients without the loss scale.
        loss_scale: What the gradients still carry; it is taken out in the same pass.
    """
    factor = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
    if factor / loss_scale != 1.0:
        torch._foreach_mul_(gradients, factor / loss_scale)


def non_finite(parameters: list[LocalParameter], gradients: list[Tensor], loss_share: Tensor) -> str:
    """Name the ranks and their first parameters whose gradient is not finite; every rank calls it.

    Returns:
        A clause for a message; empty where everything is finite.
    """
    mine = [] if bool(torch.isfinite(loss_share)) else ["loss"]
    for p, gradient in zip(parameters, gradients, strict=True):
        if not bool(torch.isfinite(gradient).all()):
            mine.append(p.spec.canonical_name)
            break
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    found = [f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(every) if names]
    return f" (not finite on {'; '.join(found[:3])}{'; ...' if len(found) > 3 else ''})" if found else ""


def _gradient(parameter: LocalParameter) -> Tensor:
    gradient = parameter.sharded.grad
    if gradient is None:
        parameter.sharded.grad = gradient = torch.zeros_like(parameter.sharded)
    return local_tensor(gradient)


@dataclass(frozen=True)
class _Copies:
    """Copies of one parameter on this rank and on others.

    Args:
        places: Which of this rank's parameters they are; none where it has no copy.
        group: This rank's peers that have one; None where all copies are on one rank.
    """

    places: list[int]
    group: dist.ProcessGroup | None

    def sum(self, gradients: list[Tensor]) -> None:
        """Give every copy the sum of all copies' gradients."""
        if not self.places:
            return
        first, *others = self.places
        for place in others:
            gradients[first] += gradients[place]
        if self.group is not None:
            dist.all_reduce(gradients[first], group=self.group)
        for place in others:
            gradients[place].copy_(gradients[first])


def _group_of(stages: tuple[int, ...], mesh: Mesh) -> dist.ProcessGroup | None:
    """Group of this rank's peers that have one of the stages; every rank takes part in making all of them."""
    places = sorted({rank_of_stage(mesh.layout, stage) for stage in stages})
    if len(places) == 1:
        return None
    mine = None
    for ranks in zip(*(mesh.device_mesh.mesh[place].flatten().tolist() for place in places), strict=True):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine = group
    return mine
