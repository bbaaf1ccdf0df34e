"""The `local` backend: layers of plain PyTorch whose parameters are this rank's part of each matrix.

Letters: s sequence, b batch, h hidden, n heads, g key-value groups, d head width. Between the
matrices an activation is (s, b, h), or (s/tp, b, h) under sequence parallelism.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.backend import AttentionModule, collect_specs
from training.collectives import column_linear, leave_tensor_parallel
from training.config import ModelConfig
from training.context_parallel import WHOLE, ContextParallel
from training.gathered_attention import GatheredAttention
from training.mesh import TensorParallel
from training.parameters import ParamSpec
from training.ring_attention import RingAttention


class LocalBackend:
    """Builds the layers of `model` for one tensor-parallel and one context-parallel rank."""

    def __init__(self, model: ModelConfig, tp: TensorParallel, context: ContextParallel = WHOLE) -> None:
        self.model = model
        self.tp = tp
        self.context = context

    def norm_column(
        self, norm: str, linear: str, sizes: tuple[int, int], *, has_bias: bool, blocks: tuple[str, ...] = ()
    ) -> nn.Module:
        return NormColumn(self.norm(norm), ColumnLinear(linear, sizes, has_bias=has_bias, tp=self.tp, blocks=blocks))

    def column(self, name: str, sizes: tuple[int, int], *, has_bias: bool, blocks: tuple[str, ...] = ()) -> nn.Module:
        return ColumnLinear(name, sizes, has_bias=has_bias, tp=self.tp, blocks=blocks)

    def row(self, name: str, sizes: tuple[int, int], *, has_bias: bool) -> nn.Module:
        return RowLinear(name, sizes, has_bias=has_bias, tp=self.tp)

    def norm(self, name: str) -> "Norm":
        return Norm(name, self.model, sp_partial=self.tp.sequence_parallel)

    def head_norm(self, name: str) -> "HeadNorm":
        return HeadNorm(name, self.model, sp_partial=self.tp.size > 1)

    def attention(self, *, causal: bool = True) -> AttentionModule:
        if self.context.size > 1 and not self.model.is_encoder_decoder:
            return RingAttention(self.context, self.model.sliding_window, causal=causal)
        scale = None if self.model.scales_scores else 1.0
        core = CoreAttention(self.model.sliding_window, causal=causal, scale=scale)
        return GatheredAttention(core, self.context) if self.context.size > 1 else core

    def param_specs(self, module: nn.Module) -> dict[str, ParamSpec]:
        return collect_specs(module)


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), over the last dimension."""

    def __init__(self, name: str, model: ModelConfig, *, sp_partial: bool) -> None:
        super().__init__()
        shape = (model.hidden_size,)
        self.eps = model.norm_eps
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape)) if model.norm == "layernorm" else None
        self.specs = {"weight": ParamSpec(f"{name}.weight", None, shape, sp_partial)}
        if self.bias is not None:
            self.specs["bias"] = ParamSpec(f"{name}.bias", None, shape, sp_partial)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        if self.bias is None:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.layer_norm(x, shape, self.weight, self.bias, self.eps)


class HeadNorm(nn.Module):
    """RMSNorm over the width of each head; every rank has the weight, and its gradient from its own heads."""

    def __init__(self, name: str, model: ModelConfig, *, sp_partial: bool) -> None:
        super().__init__()
        shape = (model.head_dim,)
        self.eps = model.norm_eps
        self.weight = nn.Parameter(torch.empty(shape))
        self.specs = {"weight": ParamSpec(f"{name}.weight", None, shape, sp_partial)}

    def forward(self, x_sbnd: Tensor) -> Tensor:
        return F.rms_norm(x_sbnd, (x_sbnd.shape[-1],), self.weight, self.eps)


class ColumnLinear(nn.Module):
    """A linear layer cut along its rows: each rank makes a part of the outputs, biases included."""

    def __init__(
        self,
        name: str,
        sizes: tuple[int, int],
        *,
        has_bias: bool,
        tp: TensorParallel,
        blocks: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        size_in, size_out = sizes
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(size_out // tp.size, size_in))
        self.bias = nn.Parameter(torch.empty(size_out // tp.size)) if has_bias else None
        weights = tuple(f"{block}.weight" for block in blocks)
        self.specs = {"weight": ParamSpec(f"{name}.weight", 0, (size_out, size_in), blocks=weights)}
        if has_bias:
            biases = tuple(f"{block}.bias" for block in blocks)
            self.specs["bias"] = ParamSpec(f"{name}.bias", 0, (size_out,), blocks=biases)

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.tp)


class RowLinear(nn.Module):
    """A linear layer cut along its columns: the ranks' partial outputs are summed, then the bias is added."""

    def __init__(self, name: str, sizes: tuple[int, int], *, has_bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        size_in, size_out = sizes
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(size_out, size_in // tp.size))
        self.bias = nn.Parameter(torch.empty(size_out)) if has_bias else None
        self.specs = {"weight": ParamSpec(f"{name}.weight", 1, (size_out, size_in))}
        if has_bias:
            self.specs["bias"] = ParamSpec(f"{name}.bias", None, (size_out,), sp_partial=tp.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        total = leave_tensor_parallel(F.linear(x, self.weight), self.tp)
        return total if self.bias is None else total + self.bias


class NormColumn(nn.Module):
    """A norm and the column-parallel layer that reads it."""

    def __init__(self, norm: Norm, linear: ColumnLinear) -> None:
        super().__init__()
        self.norm = norm
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x))
        return out


class CoreAttention(nn.Module):
    """Scaled dot-product attention over this rank's heads.

    Args:
        window: Tokens that a token sees, itself included; None sees all before it. Only with `causal`.
        causal: A token sees itself and what is before it; else the whole row.
        scale: Scores are multiplied by it; None is 1 / sqrt(d).
    """

    def __init__(self, window: int | None = None, *, causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.window, self.causal, self.scale = window, causal, scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """(s, b, n, d), twice (keys, b, g, d) -> (s, b, n * d).

        Args:
            documents: (b, s): bound what a token sees.
            bias: (1 or b, 1 or n, s, keys), added to the scores, -inf where a token sees nothing: the whole
                mask. Without it there are as many keys as queries.
        """
        has_groups = k.shape[2] != q.shape[2]
        if has_groups and not q.is_cuda:  # the CPU's fused kernel wants as many keys as queries
            repeats = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        q_bnsd, k_bnsd, v_bnsd = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        if bias is not None and bias.requires_grad and not q.is_cuda:
            return self._with_learned_bias(q_bnsd, k_bnsd, v_bnsd, bias)
        mask = bias if bias is not None else self._mask(q.shape[0], documents, q.device)
        out_bnsd = F.scaled_dot_product_attention(
            q_bnsd,
            k_bnsd,
            v_bnsd,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            scale=self.scale,
            enable_gqa=has_groups and q.is_cuda,
        )
        return out_bnsd.permute(2, 0, 1, 3).flatten(2)

    def _with_learned_bias(self, q_bnsd: Tensor, k_bnsd: Tensor, v_bnsd: Tensor, bias: Tensor) -> Tensor:
        """Attend in plain products: the CPU has no fused kernel with a gradient of the bias."""
        scale = self.scale if self.scale is not None else q_bnsd.shape[-1] ** -0.5
        scores = (q_bnsd if scale == 1.0 else q_bnsd * scale) @ k_bnsd.transpose(-1, -2)
        # Not in place: selective recomputation keeps the product as it was.
        exact = torch.float32 if v_bnsd.dtype.itemsize == 2 else v_bnsd.dtype
        out_bnsd = (scores + bias).softmax(-1, dtype=exact).to(v_bnsd.dtype) @ v_bnsd
        return out_bnsd.permute(2, 0, 1, 3).flatten(2)

    def _mask(self, length: int, documents: Tensor | None, device: torch.device) -> Tensor | None:
        """Which keys (columns) a query (row) sees, (s, s) or (b, 1, s, s), bool; None is plain attention."""
        if not self.causal:
            return None if documents is None else same_document(documents)
        is_cut = self.window is not None and self.window < length
        if not is_cut and documents is None:
            return None
        mask = window_mask(length, self.window if self.window is not None else length, device)
        if documents is None:
            return mask
        return mask & same_document(documents)


def same_document(documents: Tensor) -> Tensor:
    """Which keys have the query's number: (b, s) -> (b, 1, s, s), bool."""
    return documents[:, None, :, None] == documents[:, None, None, :]


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Which keys (columns) a query (row) sees: itself and `window` - 1 tokens before it; (s, s), bool."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)
