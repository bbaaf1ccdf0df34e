"""Collectives that take part in autograd, for layers whose parameters are cut over tensor-parallel ranks.

Letters: s sequence, b batch, h hidden. Activations are (s, b, h); the sequence is cut along dim 0.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from training.mesh import TensorParallel


def all_gather(x: Tensor, group: dist.ProcessGroup | None, size: int) -> Tensor:
    """Concatenate the ranks' equal parts along dim 0."""
    out = x.new_empty(x.shape[0] * size, *x.shape[1:])
    _gather_into(out, x.contiguous(), group)
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None, size: int) -> Tensor:
    """Sum over the ranks and keep this rank's part of dim 0."""
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    _scatter_into(out, x.contiguous(), group)
    return out


def _gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    with warnings.catch_warnings():  # torch 2.13 renames the two calls and keeps the old names working
        warnings.simplefilter("ignore", FutureWarning)
        return dist.all_gather_into_tensor(out, x, group=group, async_op=async_op)


def _scatter_into(out: Tensor, x: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return dist.reduce_scatter_tensor(out, x, group=group, async_op=async_op)


def enter_tensor_parallel(x: Tensor, tp: TensorParallel) -> Tensor:
    """Give every rank the whole activation; gradients are summed over the ranks on the way back.

    Returns:
        (s, b, h): gathered from (s/tp, b, h) under sequence parallelism, else `x` itself.
    """
    return x if tp.size == 1 else _Enter.apply(x, tp)


def leave_tensor_parallel(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum partial results over the ranks.

    Returns:
        (s/tp, b, h) under sequence parallelism, else (s, b, h) on every rank.
    """
    return x if tp.size == 1 else _Leave.apply(x, tp)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """Multiply by a weight that is cut along its rows, as one autograd step with its communication.

    The input's own part is saved, not the gathered whole; backward gathers again while it
    multiplies (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

    Args:
        x: (s, b, in), or (s/tp, b, in) under sequence parallelism.
        weight: (out/tp, in).
        bias: (out/tp,).

    Returns:
        (s, b, out/tp).
    """
    return F.linear(x, weight, bias) if tp.size == 1 else _ColumnLinear.apply(x, weight, bias, tp)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp.group, tp.size) if tp.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        tp = ctx.tp
        if tp.sequence_parallel:
            return reduce_scatter(grad, tp.group, tp.size), None
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=tp.group)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        if tp.sequence_parallel:
            return reduce_scatter(x, tp.group, tp.size)
        # The caller may have saved `x`, so the sum goes to new memory.
        total = x.contiguous().clone()
        dist.all_reduce(total, group=tp.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        tp = ctx.tp
        return (all_gather(grad, tp.group, tp.size) if tp.sequence_parallel else grad), None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.has_bias = tp, bias is not None
        whole = all_gather(x, tp.group, tp.size) if tp.sequence_parallel else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        whole, gathering = x, None
        if tp.sequence_parallel:
            whole = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
            gathering = _gather_into(whole, x.contiguous(), tp.group, async_op=True)
        grad_whole = grad @ weight
        if tp.sequence_parallel:
            grad_x = torch.empty_like(x)
            reducing = _scatter_into(grad_x, grad_whole, tp.group, async_op=True)
        else:
            grad_x = grad_whole
            reducing = dist.all_reduce(grad_x, group=tp.group, async_op=True)
        flat = grad.flatten(0, -2)
        grad_bias = flat.sum(0) if ctx.has_bias else None
        if gathering is not None:
            gathering.wait()
        grad_weight = flat.t() @ whole.flatten(0, -2)
        reducing.wait()
        return grad_x, grad_weight, grad_bias, None
