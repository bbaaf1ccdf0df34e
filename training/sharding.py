"""Sharding over the data ranks (data_parallel x context_parallel) with `fully_shard`, always, also at one rank.

So one path gives float32 (or float64) masters under any compute precision. The ranks are copies x parts:
one copy with as many parts as ranks, or as many copies as ranks (`shard: none`), or between the two.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from training.config import Precision
from training.expert_matrices import ExpertMatrices
from training.mesh import Mesh
from training.model import TransformerStage, compute_dtype, master_dtype


def shard_stage(stage: TransformerStage, mesh: Mesh, *, precision: Precision) -> TransformerStage:
    """Wrap each block and the stage itself in place; parameters become DTensors over the data ranks.

    Gradients are summed over them (not averaged): the loss carries the division by the token count.
    """
    shard = mesh.layout.shard
    by_columns = _fused_matrices(stage)
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(precision) if compute_dtype(precision) != master_dtype(precision) else None,
        reduce_dtype=master_dtype(precision),
        cast_forward_inputs=False,
    )
    settings: dict[str, Any] = {
        "mesh": mesh.data_axes.shard,
        "mp_policy": policy,
        "reshard_after_forward": shard == "parameters",
        # Blocks of rows are fused in these matrices; cutting rows would mix the blocks.
        "shard_placement_fn": lambda parameter: Shard(1) if parameter in by_columns else Shard(0),
    }
    for block in stage.layers.values():
        for module in block.modules() if mesh.layout.expert_parallel > 1 else ():
            if isinstance(module, ExpertMatrices):
                # Other ranks of the expert-parallel group hold other experts: only peers of this rank share these.
                fully_shard(module, **{**settings, "mesh": mesh.expert_axes.shard})
        fully_shard(block, **settings)
    fully_shard(stage, **settings)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # gloo has no PREMUL_SUM, which a divide factor alone would use.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return stage


def _fused_matrices(stage: TransformerStage) -> set[nn.Parameter]:
    specs = stage.param_specs
    return {p for path, p in stage.named_parameters() if specs[path].blocks and p.dim() > 1}


def set_last_micro_batch(stage: TransformerStage, is_last: bool, mesh: Mesh) -> None:
    """Say before a forward pass whether its backward ends the step; for stages outside a pipeline."""
    if not isinstance(stage, FSDPModule):
        raise TypeError("the stage is not sharded yet")
    reduces = is_last or mesh.layout.shard in ("gradients", "parameters")
    stage.set_requires_gradient_sync(reduces)
    stage.set_is_last_backward(is_last)
    stage.set_reshard_after_backward(is_last or mesh.layout.shard == "parameters")


def is_first_copy(tensor: torch.Tensor) -> bool:
    """Say whether this rank is the first of those that hold the same part of a sharded parameter."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    copies = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(axis) == 0 for axis in copies)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter or gradient, sharing its memory."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, torch.Tensor) else tensor
