"""T5's relative positions: a bias of each head's scores by the distance between query and key.

Raffel et al. 2020, arXiv:1910.10683, section 2.1. All layers of a stack share one table, so every
pipeline stage of the stack holds a copy (training/tied.py). Letters: q queries, k keys, n heads.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.mesh import TensorParallel
from training.model_config import ModelConfig
from training.parameters import ParamSpec


class RelativeBias(nn.Module):
    """This rank's heads of a stack's table.

    Args:
        stack: "encoder", whose tokens see both ways, or "decoder".
    """

    def __init__(self, stack: str, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        shape = (model.relative_buckets, model.num_attention_heads)
        self.sees_both_ways = stack == "encoder"
        self.buckets, self.distance = model.relative_buckets, model.relative_distance
        self.weight = nn.Parameter(torch.empty(shape[0], shape[1] // tp.size))
        self.specs = {"weight": ParamSpec(f"{stack}.relative.weight", 1, shape)}

    def forward(self, queries: Tensor, length: int) -> Tensor:
        """Return (1, n/tp, q, k) for queries at some places, (q,), int64, and k = `length` keys."""
        places = torch.arange(length, device=self.weight.device)
        found = buckets(
            places[None, :] - queries[:, None], self.buckets, self.distance, sees_both_ways=self.sees_both_ways
        )
        return F.embedding(found, self.weight).permute(2, 0, 1).unsqueeze(0)


def buckets(distance: Tensor, num_buckets: int, max_distance: int, *, sees_both_ways: bool) -> Tensor:
    """Bucket of each distance: near ones have their own, far ones share by logarithm, the farthest share the last.

    Args:
        distance: Place of the key minus that of the query, int64.
        max_distance: From here on all are in the last bucket.
        sees_both_ways: Half of the buckets are for keys behind the query.
    """
    first = torch.zeros_like(distance)
    if sees_both_ways:
        num_buckets //= 2
        first = (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    # In float32 on the CPU's order of operations, as everyone does: an edge would move in another precision.
    ratio = (distance.float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (ratio * (num_buckets - exact)).to(torch.int64)).clamp(max=num_buckets - 1)
    return first + torch.where(distance < exact, distance, far)
