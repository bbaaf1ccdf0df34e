"""The checkpoint boundary: a rank's part of a parameter seen as a piece of the whole tensor.

The only use of `DTensor` views and of torch's private `_StridedShard`. Two ranks cut the same
dimension when a row-cut matrix is also sharded over data ranks: tp cuts first, they cut each part again.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
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
        Stored name to DTensor over the axes (parts, tp) or (copies, parts, tp): one, or one for each fused block.
    """
    spec = parameter.spec
    stored = spec.stored()
    parts = local.chunk(len(stored), dim=0) if len(stored) > 1 else (local,)
    placements = [*_data_placements(parameter, mesh.size("tp")), _tensor_placement(spec.tp_dim)]
    axes = _axes(parameter, mesh)
    return {
        name: DTensor.from_local(
            part, axes, placements, run_check=False, shape=torch.Size(shape), stride=_strides(shape)
        )
        for (name, shape), part in zip(stored, parts, strict=True)
    }


def is_dealt_expert(parameter: LocalParameter, mesh: Mesh) -> bool:
    """Say whether a parameter is of experts that only some data ranks hold."""
    return mesh.expert_parallel.size > 1 and _sharded(parameter).device_mesh == mesh.expert_axes.shard


def _axes(parameter: LocalParameter, mesh: Mesh) -> DeviceMesh:
    return (mesh.expert_axes if is_dealt_expert(parameter, mesh) else mesh.data_axes).stored


def _sharded(parameter: LocalParameter) -> DTensor:
    if not isinstance(parameter.sharded, DTensor):
        raise TypeError(f"{parameter.path} is not sharded yet")
    return parameter.sharded


def _data_placements(parameter: LocalParameter, tp_size: int) -> list[Placement]:
    is_cut = parameter.spec.tp_dim is not None and tp_size > 1
    return [
        _StridedShard(placement.dim, split_factor=tp_size)
        if isinstance(placement, Shard) and is_cut and placement.dim == parameter.spec.tp_dim
        else placement
        for placement in _sharded(parameter).placements
    ]


def _tensor_placement(tp_dim: int | None) -> Placement:
    return Replicate() if tp_dim is None else Shard(tp_dim)


def _strides(shape: Shape) -> tuple[int, ...]:
    strides, total = [], 1
    for size in reversed(shape):
        strides.append(total)
        total *= size
    return tuple(reversed(strides))
