"""A stand-in for `transformer_engine.pytorch` on the CPU: the same modules, arguments and collectives, plain products.

It shows that the `te` backend asks for the right layers and names their parameters rightly at every layout. What the
real kernels compute is checked on a GPU by `make gpu-check`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.collectives import column_linear, leave_tensor_parallel
from training.layers import CoreAttention
from training.mesh import TensorParallel

in_8_bits: list[str] = []  # one entry for each product that ran under a recipe
_recipes: list[str] = []


def install() -> None:
    """Make `import transformer_engine.pytorch` find this module."""
    package, common = ModuleType("transformer_engine"), ModuleType("transformer_engine.common")
    recipe = ModuleType("transformer_engine.common.recipe")
    for name in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"):
        setattr(recipe, name, type(name, (), {}))
    names = {
        "transformer_engine": package,
        "transformer_engine.pytorch": sys.modules[__name__],
        "transformer_engine.common": common,
        "transformer_engine.common.recipe": recipe,
    }
    sys.modules.update(names)


@contextmanager
def autocast(*, enabled: bool, recipe: Any) -> Iterator[None]:
    _recipes.append(type(recipe).__name__ if enabled else "")
    try:
        yield
    finally:
        _recipes.pop()


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parallel_mode: str,
        tp_group: Any,
        tp_size: int,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        device: str,
    ) -> None:
        super().__init__()
        assert device == "cuda" and params_dtype == torch.float32
        rank = torch.distributed.get_rank(tp_group)
        self.tp = TensorParallel(tp_group, rank, tp_size, sequence_parallel)
        self.mode = parallel_mode
        if parallel_mode == "column":
            out_features //= tp_size
        else:
            in_features //= tp_size
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        in_8_bits.extend(_recipes[-1:])
        if self.mode == "column":
            return column_linear(x, self.weight, self.bias, self.tp)
        total = (
            leave_tensor_parallel(F.linear(x, self.weight), self.tp) if self.tp.size > 1 else F.linear(x, self.weight)
        )
        return total if self.bias is None else total + self.bias


class _Norm(nn.Module):
    def __init__(self, hidden_size: int, *, eps: float, device: str, has_bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return _normed(x, self.weight, self.bias, self.eps)


class LayerNorm(_Norm):
    def __init__(self, hidden_size: int, *, eps: float, device: str) -> None:
        super().__init__(hidden_size, eps=eps, device=device, has_bias=True)


class RMSNorm(_Norm):
    def __init__(self, hidden_size: int, *, eps: float, device: str) -> None:
        super().__init__(hidden_size, eps=eps, device=device, has_bias=False)


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, *, eps: float, normalization: str, **more: Any) -> None:
        super().__init__(in_features, out_features, **more)
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features))
        self.layer_norm_bias = nn.Parameter(torch.empty(in_features)) if normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_normed(x, self.layer_norm_weight, self.layer_norm_bias, self.eps))


def _normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    shape = (x.shape[-1],)
    return F.rms_norm(x, shape, weight, eps) if bias is None else F.layer_norm(x, shape, weight, bias, eps)


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        num_gqa_groups: int,
        attention_dropout: float,
        softmax_scale: float | None,
        qkv_format: str,
        attn_mask_type: str,
        window_size: tuple[int, int],
        tp_size: int,
        tp_group: Any,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0 and qkv_format == "sbhd"
        self.heads = (num_attention_heads // tp_size, num_gqa_groups // tp_size, kv_channels)
        window = window_size[0] + 1 if window_size[0] >= 0 else None
        self.core = CoreAttention(window, causal=attn_mask_type == "causal", scale=softmax_scale)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        qkv_format: str = "sbhd",
        attn_mask_type: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> Tensor:
        assert (q.shape[-2], k.shape[-2], q.shape[-1]) == self.heads
        if qkv_format == "sbhd":
            return self.core(q, k, v)
        assert cu_seqlens_q is not None and cu_seqlens_q.dtype == torch.int32 and attn_mask_type is not None
        assert int(cu_seqlens_q[-1]) == len(q) and attn_mask_type.startswith("padding")
        sizes = cu_seqlens_q.diff().tolist()
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([self.core(*(x.unsqueeze(1) for x in part)).squeeze(1) for part in parts])
