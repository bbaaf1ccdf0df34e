"""The checkpoint boundary: a rank's part of a parameter seen as a piece of the whole tensor.

The only use of `DTensor` views and of torch's private `_StridedShard`. Two ranks cut the same
dimension when a row-cut matrix is also sharded over dp: tp cuts first, dp cuts each part again.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from training.gradients import LocalParameter
from training.mesh import Mesh
from training.parameters import Shape


def as_dtensors(local: Tensor, parameter: LocalParameter, mesh: Mesh) -> dict[str, Tensor]:
    """View this rank's part of a parameter, or of its moments, as pieces of the stored tensors.

    Args:
        local: Of the shape of `parameter.value`; the views share its memory.

    Returns:
        Stored name to DTensor over the axes (dp, tp): one, or one for each fused block.
    """
    spec = parameter.spec
    dp_dim = _dp_dim(parameter)
    stored = spec.stored()
    parts = local.chunk(len(stored), dim=0) if len(stored) > 1 else (local,)
    placements = _placements(dp_dim, spec.tp_dim, mesh.size("tp"))
    axes = mesh.device_mesh["dp", "tp"]
    return {
        name: DTensor.from_local(
            part, axes, placements, run_check=False, shape=torch.Size(shape), stride=_strides(shape)
        )
        for (name, shape), part in zip(stored, parts, strict=True)
    }


def _dp_dim(parameter: LocalParameter) -> int | None:
    sharded = parameter.sharded
    if not isinstance(sharded, DTensor):
        return None
    # With `shard: none` the axes are (dp: copies, cp: parts), and cp has one rank.
    placement = sharded.placements[0]
    return placement.dim if isinstance(placement, Shard) else None


def _placements(dp_dim: int | None, tp_dim: int | None, tp_size: int) -> list[Placement]:
    tp: Placement = Replicate() if tp_dim is None else Shard(tp_dim)
    if dp_dim is None:
        return [Replicate(), tp]
    if dp_dim == tp_dim and tp_size > 1:
        return [_StridedShard(dp_dim, split_factor=tp_size), tp]
    return [Shard(dp_dim), tp]


def _strides(shape: Shape) -> tuple[int, ...]:
    strides, total = [], 1
    for size in reversed(shape):
        strides.append(total)
        total *= size
    return tuple(reversed(strides))
