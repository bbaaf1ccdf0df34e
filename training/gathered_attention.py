"""Attention over sequences that ranks share by gathering keys: for scores with biases, which do not go round a ring.

A rank keeps its queries and gets all keys and values of its rows, so that memory for these is not shared; everything
else of a layer is. Letters: s this rank's queries, k its keys, b batch, n heads, g groups, d head width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from training.backend import AttentionModule
from training.collectives import reduce_scatter
from training.context_parallel import ContextParallel


class GatheredAttention(nn.Module):
    """Attention of this rank's queries to the keys of whole rows.

    Args:
        core: Attention of some queries to some keys.
        context: The ranks that share the sequences.
    """

    def __init__(self, core: AttentionModule, context: ContextParallel) -> None:
        super().__init__()
        self.core, self.context = core, context

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """(s, b, n, d), twice (k, b, g, d) -> (s, b, n * d).

        Args:
            documents: Not taken; they are part of `bias`.
            bias: (1 or b, 1 or n, s, k x size), of these queries and all keys; None sees all keys.
        """
        if documents is not None:
            raise ValueError("documents must be part of the bias")
        out: Tensor = self.core(q, gather_sequence(k, self.context), gather_sequence(v, self.context), None, bias)
        return out


def gather_sequence(x: Tensor, context: ContextParallel) -> Tensor:
    """Return whole sequences, dim 0, from the ranks' parts; gradients are summed over the ranks and cut again."""
    out: Tensor = _Gather.apply(x, context)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return context.gather(x, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        context: ContextParallel = ctx.context
        parts = torch.cat([context.cut(grad, 0, rank) for rank in range(context.size)])
        return reduce_scatter(parts, context.group, context.size), None
