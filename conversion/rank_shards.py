"""Which piece of which tensor each rank of a layout holds, as training itself cuts and saves them.

Tensor parallelism cuts a tensor first; data parallelism (`fully_shard`) cuts what is left into
rows, or into columns where blocks of rows are fused in memory (gate and up). Several ranks hold
what is not cut; one of them writes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conversion.catalogue import Box, Shape, num_elements
from training.config import LayoutConfig, ModelConfig
from training.optimizer_state import states_in
from training.parameters import OPTIMIZER_PREFIX, StoredGroup, stored_groups
from training.pipeline_split import layers_of_stages, stages_of_rank


@dataclass(frozen=True)
class Shard:
    """A piece of a stored tensor; `shape` is that of the whole tensor."""

    name: str
    shape: Shape
    box: Box


def shards_by_rank(
    model: ModelConfig, layout: LayoutConfig, *, has_optimizer: bool, extra: Mapping[str, Any] | None = None
) -> list[list[Shard]]:
    """Deal every element of every tensor to exactly one rank.

    Of the ranks that hold the same piece, the one with the smallest files so far writes it. Files
    are measured by the sizes of the whole tensors, as `torch.distributed.checkpoint` does, so that
    every piece lands where training would have put it.

    Args:
        extra: Of the manifest; says which optimizer wrote it.

    Returns:
        One list for each rank, in the order of ranks of the mesh (pp, dp, cp, tp).
    """
    optimizer = extra or {} if has_optimizer else None
    # A rank with the first and the last stage lists a tied table twice and has it once.
    held = [
        list({_key(shard): shard for shard in _held(model, layout, rank, optimizer)}.values())
        for rank in range(layout.world_size)
    ]
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, shards in enumerate(held):
        for shard in shards:
            holders.setdefault(_key(shard), []).append(rank)
            sizes[shard.name] = num_elements(shard.shape)
    load = [0] * len(held)
    writer: dict[tuple[str, tuple[int, ...]], int] = {}
    for key, ranks in holders.items():
        chosen = min(ranks, key=lambda rank: load[rank])
        load[chosen] += sizes[key[0]]
        writer[key] = chosen
    return [[shard for shard in shards if writer[_key(shard)] == rank] for rank, shards in enumerate(held)]


def _key(shard: Shard) -> tuple[str, tuple[int, ...]]:
    return shard.name, tuple(start for start, _ in shard.box)


def _held(model: ModelConfig, layout: LayoutConfig, rank: int, optimizer: Mapping[str, Any] | None) -> Iterator[Shard]:
    """Everything that one rank holds, in the order in which its model lists it."""
    tp, dp = layout.tensor_parallel, layout.data_parallel
    tp_rank, dp_rank, pp_rank = rank % tp, rank // tp % dp, rank // (tp * dp)
    layers = layers_of_stages(model, layout)
    groups = (g for stage in stages_of_rank(layout, pp_rank) for g in _stage_groups(model, layers, stage))
    for group in groups:
        shards = []
        dp_dim = None if layout.shard == "none" else int(group.is_fused and len(group.shape) > 1)
        for name in group.names:
            whole = tuple((0, size) for size in group.shape)
            box = _cut(_cut(whole, group.tp_dim, tp_rank, tp), dp_dim, dp_rank, dp)
            # A tensor with fewer rows than ranks leaves some of them without a piece.
            if all(start < stop for start, stop in box):
                shards.append(Shard(name, group.shape, box))
        yield from shards
        # The parts of a fused parameter keep the same states, since they are of one kind and shape.
        states = states_in(optimizer, shards[0].name, shards[0].shape) if optimizer is not None and shards else ()
        for state in states:
            for shard in shards:
                yield Shard(f"{OPTIMIZER_PREFIX}{shard.name}.{state}", shard.shape, shard.box)


def _stage_groups(model: ModelConfig, layers: Sequence[range], stage: int) -> Iterator[StoredGroup]:
    """The parameters of a stage, in the order in which its modules list them."""
    is_first, is_last = stage == 0, stage == len(layers) - 1
    table: StoredGroup | None = None
    for group in stored_groups(model):
        kind, *rest = group.names[0].split(".")
        if kind == "embedding":
            table = group if rest[0] == "word" else table
            is_here = is_first
        elif kind == "layers":
            is_here = int(rest[0]) in layers[stage]
        else:
            is_here = is_last
        if is_here:
            yield group
    if table is not None and model.tied_embeddings and is_last and not is_first:
        yield table


def _cut(box: Box, dim: int | None, rank: int, size: int) -> Box:
    """Cut as `torch.chunk` does: parts of equal size, the last one smaller, some perhaps empty."""
    if dim is None or size == 1:
        return box
    start, stop = box[dim]
    part = -(-(stop - start) // size)
    first = min(start + rank * part, stop)
    return (*box[:dim], (first, min(first + part, stop)), *box[dim + 1 :])


def degrees(layout: Mapping[str, Any]) -> str:
    """Write a layout's degrees for a reader."""
    axes = ["tensor", "pipeline", "data"]
    axes += [axis for axis in ("context",) if layout.get(f"{axis}_parallel", 1) > 1]
    return " x ".join(f"{axis} {layout.get(f'{axis}_parallel', 1)}" for axis in axes)
