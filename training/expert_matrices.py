"""The experts that a rank holds: all of a layer's, which see its own tokens, or its share of them, dealt over ranks.

Dealt experts are held by one rank of an expert-parallel group each (and shared or copied by the ranks of other
groups). Rows go to the ranks of their experts by one all-to-all and come back by another; backward does
the same in reverse, so that an expert's gradient has all tokens of its group. Numbers of rows are exchanged
first; nothing is padded or dropped. Letters: t rows, h hidden, e experts, f inner width, k choices of a token.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from training.activation import activate
from training.families import Activation
from training.mesh import ExpertParallel, TensorParallel
from training.parameters import ParamSpec


class ExpertMatrices(nn.Module):
    """The matrices of this rank's experts, fused by rows.

    Args:
        names: Canonical name of each expert of the layer; the rank takes its share of them.
        sizes: (hidden, inner width).
        activation: Between the two matrices.
        has_gate: The first matrix is two, gate and up.
        dealt: The ranks that the experts are dealt to.
    """

    def __init__(
        self,
        names: list[str],
        sizes: tuple[int, int],
        tp: TensorParallel,
        *,
        activation: Activation,
        has_gate: bool,
        dealt: ExpertParallel,
    ) -> None:
        super().__init__()
        self.activation, self.dealt = activation, dealt
        self.num_local = len(names) // dealt.size
        mine = names[dealt.rank * self.num_local : (dealt.rank + 1) * self.num_local]
        self.gate_up, self.down = matrix_pair(mine, sizes, tp, has_gate=has_gate)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Let each expert work on its rows.

        Args:
            rows: (t, h), in the order of all experts of the layer.
            counts: Rows of each of them; their sum is t.

        Returns:
            (t, h).
        """
        if self.dealt.size == 1:
            return self._make(rows, counts)
        sent = torch.tensor(counts, device=rows.device).view(self.dealt.size, -1)
        coming = torch.empty_like(sent)  # of each rank, for each of this rank's experts
        dist.all_to_all_single(coming, sent, group=self.dealt.group)
        splits = (sent.sum(1).tolist(), coming.sum(1).tolist())
        guests: Tensor = _Exchange.apply(rows, self.dealt.group, *splits)
        expert = torch.arange(self.num_local, device=rows.device).repeat(self.dealt.size)
        order, inverse = sorting(expert.repeat_interleave(coming.flatten()))
        made = self._make(dispatch(guests, order, inverse, 1), coming.sum(0).tolist())
        back: Tensor = _Exchange.apply(dispatch(made, inverse, order, 1), self.dealt.group, *reversed(splits))
        return back

    def _make(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split(counts)
        # `unbind` has one gradient for all experts; indexing would make a whole one for each.
        gate_up = self.gate_up.weight.view(self.num_local, -1, rows.shape[1]).unbind()
        down = self.down.weight.view(self.num_local, rows.shape[1], -1).unbind()
        return torch.cat(
            [
                F.linear(activate(F.linear(part, first), self.activation), second)
                for part, first, second in zip(parts, gate_up, down, strict=True)
            ]
        )


class Matrix(nn.Module):
    """This rank's part of a matrix."""

    def __init__(self, spec: ParamSpec, tp: TensorParallel) -> None:
        super().__init__()
        shape = list(spec.global_shape)
        if spec.tp_dim is not None:
            shape[spec.tp_dim] //= tp.size
        self.weight = nn.Parameter(torch.empty(shape))
        self.specs = {"weight": spec}


def matrix_pair(
    names: list[str], sizes: tuple[int, int], tp: TensorParallel, *, has_gate: bool
) -> tuple[Matrix, Matrix]:
    """Matrices into and out of the inner width of several experts, fused by rows.

    Args:
        names: Canonical name of each expert.
        sizes: (hidden, inner width).
    """
    hidden, width = sizes
    into = tuple(f"{name}.{part}.weight" for name in names for part in (("gate", "up") if has_gate else ("up",)))
    out = tuple(f"{name}.down.weight" for name in names)
    prefix = names[0].rpartition(".")[0] if len(names) > 1 else names[0]
    first = ParamSpec(f"{prefix}.gate_up.weight", 0, (len(into) * width, hidden), blocks=into)
    second = ParamSpec(f"{prefix}.down.weight", 1, (len(out) * hidden, width), blocks=out if len(out) > 1 else ())
    if len(into) == 1:
        first = ParamSpec(into[0], 0, (width, hidden))
    return Matrix(first, tp), Matrix(second, tp)


def sorting(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Order that sorts keys, stable, and its inverse."""
    order = keys.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order, inverse


def dispatch(flat: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    """Copy each token for each of its k experts, in the order of experts: (t, h) -> (t x k, h)."""
    out: Tensor = _Dispatch.apply(flat, order, inverse, k)
    return out


def combine(done: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    """Sum what its experts made of each token: (t x k, h) -> (t, h)."""
    out: Tensor = _Combine.apply(done, order, inverse, k)
    return out


class _Dispatch(torch.autograd.Function):
    """A copy of each token for each of its experts, in the order of experts; gradients add up without scattering."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return flat[order.div(k, rounding_mode="floor")]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].view(-1, ctx.k, grad.shape[1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """The sum of what its experts made of each token: the transpose of `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, done: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return done[inverse].view(-1, k, done.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order.div(ctx.k, rounding_mode="floor")], None, None, None


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for, in the order of ranks; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: list[int], coming: list[int]) -> Tensor:
        ctx.group, ctx.splits = group, (sent, coming)
        return _exchanged(rows, group, sent, coming)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, coming = ctx.splits
        return _exchanged(grad, ctx.group, coming, sent), None, None, None


def _exchanged(rows: Tensor, group: dist.ProcessGroup, sent: list[int], coming: list[int]) -> Tensor:
    out = rows.new_empty(sum(coming), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), coming, sent, group=group)
    return out
