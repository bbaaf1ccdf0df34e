"""The layout as a device mesh with axes pp, dp, cp, tp, and what one rank needs to know of it.

The data ranks, dp x cp, are cut once more for what they share instead of copying: into copies x parts
(`DataAxes`). Experts that are dealt to ranks have axes of their own. The mesh is passed as an argument
everywhere; there is no global state besides torch's default group.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from contracts.errors import ConfigError
from training.config import LayoutConfig
from training.context_parallel import ContextParallel
from training.pipeline_split import rank_of_stage

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel group as a layer sees it.

    Args:
        group: Process group of the ranks that share a layer.
        rank: This rank's place in it.
        size: Its number of ranks.
        sequence_parallel: Activations between the matrices are cut along the sequence (dim 0).
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sequence_parallel: bool


@dataclass(frozen=True)
class DataAxes:
    """How data ranks hold a parameter.

    Args:
        shard: For `fully_shard`: one axis of parts, or (copies, parts).
        stored: The same, and the tensor-parallel axis: where a checkpoint's tensors lie.
    """

    shard: DeviceMesh
    stored: DeviceMesh


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that experts are dealt to as a layer sees them.

    Args:
        group: Process group of the ranks that together hold all experts.
        rank: This rank's place in it.
        size: Its number of ranks; 1 deals nothing.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1


TOGETHER = ExpertParallel()  # every rank holds all experts


@dataclass(frozen=True)
class Mesh:
    """A layout in action on this rank."""

    layout: LayoutConfig
    device_mesh: DeviceMesh
    device: torch.device
    data_axes: DataAxes
    expert_axes: DataAxes
    expert_parallel: ExpertParallel

    def rank(self, axis: str) -> int:
        return self.device_mesh.get_local_rank(axis)

    def size(self, axis: str) -> int:
        return self.device_mesh[axis].size()

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.device_mesh.get_group(axis)

    @property
    def tensor_parallel(self) -> TensorParallel:
        size = self.size("tp")
        return TensorParallel(self.group("tp"), self.rank("tp"), size, self.layout.sequence_parallel and size > 1)

    @property
    def context_parallel(self) -> ContextParallel:
        return ContextParallel(self.group("cp"), self.rank("cp"), self.size("cp"))

    @property
    def is_first_stage(self) -> bool:
        """This rank has the first stage, with the embedding."""
        return self.rank("pp") == rank_of_stage(self.layout, 0)

    @property
    def is_last_stage(self) -> bool:
        """This rank has the last stage, with the loss."""
        return self.rank("pp") == rank_of_stage(self.layout, self.layout.num_stages - 1)


def build_mesh(layout: LayoutConfig, device: str = "cpu") -> Mesh:
    """Lay the ranks of the default group out as `layout`; every rank must call it.

    Raises:
        ConfigError: The number of ranks is not the product of the degrees.
    """
    world_size = dist.get_world_size()
    if layout.world_size != world_size:
        needed = layout.world_size
        raise ConfigError(
            f"{layout.degrees_text} needs {needed} ranks, but {world_size} were started. "
            f"Start {needed} ranks, or change a degree."
        )
    shape = (layout.pipeline_parallel, layout.data_parallel, layout.context_parallel, layout.tensor_parallel)
    device_mesh = init_device_mesh(device, shape, mesh_dim_names=AXES)
    data = device_mesh["dp", "cp"]._flatten("data") if layout.context_parallel > 1 else device_mesh["dp"]
    axes = _data_axes(data, device_mesh["tp"], layout.shard_copies)
    experts, dealt = axes, TOGETHER
    if layout.expert_parallel > 1:
        size = layout.expert_parallel
        both = data._unflatten(0, (data.size() // size, size), ("expert_data", "expert"))
        dealt = ExpertParallel(both.get_group("expert"), both.get_local_rank("expert"), size)
        experts = _data_axes(both["expert_data"], device_mesh["tp"], layout.expert_copies, "expert_")
    index = int(os.environ.get("LOCAL_RANK", "0")) if device == "cuda" else None
    here = torch.device(device, index) if index is not None else torch.device(device)
    return Mesh(layout, device_mesh, here, axes, experts, dealt)


def _data_axes(data: DeviceMesh, tp: DeviceMesh, copies: int, prefix: str = "") -> DataAxes:
    shard = data
    if copies > 1:
        shard = data._unflatten(0, (copies, data.size() // copies), (f"{prefix}copy", f"{prefix}part"))
    return DataAxes(shard, DeviceMesh._concatenate([shard, tp]))


def init_ranks(device: str, *, timeout_s: int = 1800) -> None:
    """Join the process group that the launcher's environment variables describe: gloo, or nccl on CUDA."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))


def init_single_rank() -> None:
    """Start a process group of this process alone, without network settings, for tools that run at one rank."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
