"""Muon (Jordan et al. 2024): momentum whose every matrix is made nearly orthogonal, whole, whatever the sharding.

Newton-Schulz iterations need a whole matrix, and a rank holds a part. Each matrix has an owner among the ranks
that share the stage: one all-to-all brings the parts of every matrix to its owner, the owner does the
iterations, and a second all-to-all brings the parts of the result back. So the update is that of one process,
no rank does the work of another, and a rank holds its own matrices alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from training.dtensors import is_dealt_expert
from training.gradients import LocalParameter
from training.mesh import Mesh
from training.optimizer_config import OptimizerConfig
from training.parameters import Shape

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dimension of the uncut matrix

# The quintic of https://kellerjordan.github.io/posts/muon/ : slope at zero as large as it gets.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


class Muon:
    """Updates matrices; with several ranks every rank of the stage must call `step` with all of its own."""

    def __init__(self, parameters: list[LocalParameter], config: OptimizerConfig, mesh: Mesh) -> None:
        self.config = config
        self.values = [p.value for p in parameters]
        self.buffers = [torch.zeros_like(v) for v in self.values]
        self.num_blocks = [len(p.spec.stored()) for p in parameters]
        matrices = [(p, shape, box) for p in parameters for shape, box in _boxes(p, mesh)]
        self.shapes = [shape for _, shape, _ in matrices]
        # Ranks of a stage hold the same matrices, but for dealt experts, which only some of them share.
        is_dealt = [is_dealt_expert(p, mesh) for p, _, _ in matrices]
        self.exchanges = []
        for experts in (False, True) if any(is_dealt) else (False,):
            places = [n for n, dealt in enumerate(is_dealt) if dealt == experts]
            boxes = [matrices[n][2] for n in places]
            group = _stage_group(mesh, experts=experts)
            self.exchanges.append((places, MatrixExchange([self.shapes[n] for n in places], boxes, group)))

    def step(self, gradients: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        momentum = self.config.muon_momentum
        parts: list[Tensor] = []
        for buffer, gradient, blocks in zip(self.buffers, gradients, self.num_blocks, strict=True):
            buffer.lerp_(gradient, 1.0 - momentum)
            parts += gradient.lerp(buffer, momentum).chunk(blocks, dim=0) if buffer.numel() else [gradient] * blocks
        found: dict[int, Tensor] = {}
        for places, exchange in self.exchanges:
            found.update(zip(places, exchange.apply([parts[n] for n in places], self._orthogonalized), strict=True))
        updates = iter(found[n] for n in range(len(parts)))
        shapes = iter(self.shapes)
        for value, blocks in zip(self.values, self.num_blocks, strict=True):
            value.mul_(1.0 - lr * weight_decay)
            for part in value.chunk(blocks, dim=0) if value.numel() else [value] * blocks:
                part.add_(next(updates), alpha=-lr * self._scale(next(shapes)))

    def _orthogonalized(self, matrix: Tensor) -> Tensor:
        # As in every published run, bfloat16 is enough where there are kernels for it; the CPU keeps its type.
        dtype = torch.bfloat16 if matrix.is_cuda else matrix.dtype
        return newton_schulz(matrix.to(dtype), self.config.muon_iterations).to(matrix.dtype)

    def _scale(self, shape: Shape) -> float:
        rows, columns = shape[-2:]
        if self.config.muon_scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    def states(self, index: int) -> dict[str, Tensor]:
        return {"momentum": self.buffers[index]}


def newton_schulz(matrix: Tensor, iterations: int) -> Tensor:
    """Make a matrix nearly orthogonal: its singular values come to lie around 1.

    Args:
        matrix: (..., rows, columns); leading dimensions are matrices of their own.

    Returns:
        Of the same shape and type.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonal: Tensor = x.mT if is_tall else x
    return orthogonal


def _boxes(parameter: LocalParameter, mesh: Mesh) -> list[tuple[Shape, Box]]:
    """Shape of each stored matrix of a parameter, and which part of it this rank holds."""
    spec, tp = parameter.spec, mesh.tensor_parallel
    found = []
    for _, shape in spec.stored():
        box = [(0, size) for size in shape]
        if spec.tp_dim is not None:
            box[spec.tp_dim] = _share(box[spec.tp_dim], tp.rank, tp.size)
        sharded = parameter.sharded
        if isinstance(sharded, DTensor):
            for axis, placement in enumerate(sharded.placements):
                if isinstance(placement, Shard):
                    place, size = sharded.device_mesh.get_local_rank(axis), sharded.device_mesh.size(axis)
                    box[placement.dim] = _share(box[placement.dim], place, size)
        found.append((shape, tuple(box)))
    return found


def _share(span: tuple[int, int], rank: int, size: int) -> tuple[int, int]:
    """Part of a span as `torch.chunk` cuts it: equal parts rounded up, the last ones smaller or empty."""
    start, stop = span
    part = -(-(stop - start) // size)
    first = min(stop, start + rank * part)
    return first, min(stop, first + part)


@dataclass(frozen=True)
class _Parts:
    """Boxes of one matrix on each rank of the stage, and the rank that works on it."""

    shape: Shape
    boxes: tuple[Box, ...]
    owner: int

    def sends(self, rank: int) -> bool:
        """Say whether `rank` is the first that holds its box: copies are sent once."""
        return _elements(self.boxes[rank]) > 0 and self.boxes.index(self.boxes[rank]) == rank


class MatrixExchange:
    """Brings parts of matrices to one owner each and the results back; the same on every rank of a stage."""

    def __init__(self, shapes: list[Shape], boxes: list[Box], group: tuple[dist.ProcessGroup | None, int, int]) -> None:
        self.group, self.rank, self.size = group
        every: list[list[Box]] = [boxes]
        if self.size > 1:
            every = [[] for _ in range(self.size)]
            dist.all_gather_object(every, boxes, group=self.group)
        owners = _owners(shapes, self.size)
        self.matrices = [
            _Parts(shape, tuple(rank_boxes[n] for rank_boxes in every), owners[n]) for n, shape in enumerate(shapes)
        ]
        self.owned = [[m for m in self.matrices if m.owner == rank] for rank in range(self.size)]

    def apply(self, parts: Sequence[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Call `work` on every whole matrix and return this rank's part of each result."""
        if self.size == 1:
            return [work(part) for part in parts]
        if not self.matrices:
            return []
        return self._parted([work(whole) for whole in self._assembled(parts)], parts[0])

    def _assembled(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Whole matrices of which this rank is the owner."""
        by_owner: list[list[Tensor]] = [[] for _ in range(self.size)]
        for matrix, part in zip(self.matrices, parts, strict=True):
            if matrix.sends(self.rank):
                by_owner[matrix.owner].append(part)
        mine = self.owned[self.rank]
        sizes = [sum(_elements(m.boxes[r]) for m in mine if m.sends(r)) for r in range(self.size)]
        received = self._all_to_all(by_owner, sizes, parts[0])
        wholes = [parts[0].new_empty(m.shape) for m in mine]
        for rank, flat in enumerate(received):
            pieces = iter(flat.split([_elements(m.boxes[rank]) for m in mine if m.sends(rank)]))
            for matrix, whole in zip(mine, wholes, strict=True):
                if matrix.sends(rank):
                    _cut(whole, matrix.boxes[rank]).copy_(next(pieces).view(_extent(matrix.boxes[rank])))
        return wholes

    def _parted(self, wholes: list[Tensor], like: Tensor) -> list[Tensor]:
        """This rank's part of every matrix, from the owners."""
        mine = self.owned[self.rank]
        outgoing = [[_cut(w, m.boxes[r]) for m, w in zip(mine, wholes, strict=True)] for r in range(self.size)]
        sizes = [sum(_elements(m.boxes[self.rank]) for m in matrices) for matrices in self.owned]
        received = self._all_to_all(outgoing, sizes, like)
        pieces = {}
        for matrices, flat in zip(self.owned, received, strict=True):
            cuts = flat.split([_elements(m.boxes[self.rank]) for m in matrices])
            pieces.update({id(m): cut.view(_extent(m.boxes[self.rank])) for m, cut in zip(matrices, cuts, strict=True)})
        return [pieces[id(m)] for m in self.matrices]

    def _all_to_all(self, outgoing: list[list[Tensor]], sizes: list[int], like: Tensor) -> Sequence[Tensor]:
        flat = [part.flatten() for parts in outgoing for part in parts]
        send = torch.cat(flat) if flat else like.new_empty(0)
        receive = like.new_empty(sum(sizes))
        counts = [sum(part.numel() for part in parts) for parts in outgoing]
        dist.all_to_all_single(receive, send, sizes, counts, group=self.group)
        received: Sequence[Tensor] = receive.split(sizes)
        return received


def _owners(shapes: list[Shape], size: int) -> list[int]:
    """Deal matrices to ranks, the costliest first, each to the rank with the least work so far."""
    load, owners = [0] * size, [0] * len(shapes)
    for n in sorted(range(len(shapes)), key=lambda n: -_cost(shapes[n])):
        owners[n] = min(range(size), key=load.__getitem__)
        load[owners[n]] += _cost(shapes[n])
    return owners


def _cost(shape: Shape) -> int:
    return math.prod(shape) * min(shape[-2:])


def _stage_group(mesh: Mesh, *, experts: bool) -> tuple[dist.ProcessGroup | None, int, int]:
    """Group of the ranks of this rank's pipeline stage; every rank takes part in making all of them.

    Args:
        experts: Only those that hold the same dealt experts as this rank.

    Returns:
        The group (None: this rank alone), this rank's place in it, and its size.
    """
    found: tuple[dist.ProcessGroup | None, int, int] = (None, 0, 1)
    dealt = mesh.expert_parallel.size if experts else 1
    held = [stage.flatten(0, 1)[n::dealt] for stage in mesh.device_mesh.mesh for n in range(dealt)]
    for members in held:
        ranks = members.flatten().tolist()
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            found = (group, ranks.index(dist.get_rank()), len(ranks))
    return found


def _elements(box: Box) -> int:
    return math.prod(_extent(box))


def _extent(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _cut(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(start, stop) for start, stop in box)]
