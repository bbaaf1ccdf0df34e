"""The `te` backend: Transformer Engine's layers with its own parallel modes, on NVIDIA GPUs.

The only module that imports transformer-engine, and only when a model asks for it. Written against
the API of 2.10 to 2.20 by reading its source; it cannot run where this project's tests run, so
`make gpu-check` compares it with the `local` backend on the device that is to be used.

Its linear layers hold this rank's part of each weight, gather and reduce inside, and overlap that
with their products. `fully_shard` hands them plain tensors. Masters stay float32: no fp8 weights.
The loss stays ours (training/loss.py): Transformer Engine's cross-entropy wants all logits at once, refuses tensor
parallelism ("not fully tested", 2.9) and counts padding rows of the vocabulary.
Letters: s sequence, b batch, h hidden, n heads, g groups, d head width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from contracts.errors import ConfigError
from training.backend import collect_specs
from training.config import Fp8Recipe, ModelConfig
from training.context_parallel import WHOLE, ContextParallel
from training.mesh import TensorParallel
from training.parameters import ParamSpec
from training.ring_attention import RingAttention

_RECIPES: dict[Fp8Recipe, str] = {
    "current_scaling": "Float8CurrentScaling",
    "block_scaling": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def transformer_engine() -> Any:
    """Import `transformer_engine.pytorch`.

    Raises:
        ConfigError: It is not installed, or does not load on this machine.
    """
    try:
        return import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"model.backend: te needs Transformer Engine, which does not load here ({error}). "
            "Install shardline[te] on a machine with CUDA, or set model.backend: local."
        ) from error


@contextmanager
def fp8(recipe: Fp8Recipe) -> Iterator[None]:
    """Run products of Transformer Engine's layers in 8 bits; no recipe here keeps state between steps."""
    te, recipes = transformer_engine(), import_module("transformer_engine.common.recipe")
    with te.autocast(enabled=True, recipe=getattr(recipes, _RECIPES[recipe])()):
        yield


def in_fp8(forward: Callable[..., Tensor], recipe: Fp8Recipe) -> Callable[..., Tensor]:
    """Return `forward` with its products in 8 bits, also where backward computes it again."""

    @wraps(forward)
    def wrapped(*arguments: Any, **named: Any) -> Tensor:
        with fp8(recipe):
            return forward(*arguments, **named)

    return wrapped


class TransformerEngineBackend:
    """Builds the layers of `model` for one tensor-parallel rank from Transformer Engine's modules."""

    def __init__(self, model: ModelConfig, tp: TensorParallel, context: ContextParallel = WHOLE) -> None:
        self.te = transformer_engine()
        self.model = model
        self.tp = tp
        self.context = context

    def _parallel(self, mode: str | None) -> dict[str, Any]:
        settings: dict[str, Any] = {"params_dtype": torch.float32, "device": "cuda"}
        if mode is not None:
            parallel = {"parallel_mode": mode, "tp_group": self.tp.group, "tp_size": self.tp.size}
            settings |= {**parallel, "sequence_parallel": self.tp.sequence_parallel}
        return settings

    def norm_column(
        self, norm: str, linear: str, sizes: tuple[int, int], *, has_bias: bool, blocks: tuple[str, ...] = ()
    ) -> nn.Module:
        size_in, size_out = sizes
        layer = self.te.LayerNormLinear(
            size_in,
            size_out,
            eps=self.model.norm_eps,
            bias=has_bias,
            normalization=self._normalization(),
            **self._parallel("column"),
        )
        weights = tuple(f"{block}.weight" for block in blocks)
        specs = {
            **self._norm_specs(norm, "layer_norm_"),
            "weight": ParamSpec(f"{linear}.weight", 0, (size_out, size_in), blocks=weights),
        }
        if has_bias:
            biases = tuple(f"{block}.bias" for block in blocks)
            specs["bias"] = ParamSpec(f"{linear}.bias", 0, (size_out,), blocks=biases)
        return _Named(layer, specs)

    def column(self, name: str, sizes: tuple[int, int], *, has_bias: bool, blocks: tuple[str, ...] = ()) -> nn.Module:
        size_in, size_out = sizes
        layer = self.te.Linear(size_in, size_out, bias=has_bias, **self._parallel("column"))
        weights = tuple(f"{block}.weight" for block in blocks)
        specs = {"weight": ParamSpec(f"{name}.weight", 0, (size_out, size_in), blocks=weights)}
        if has_bias:
            biases = tuple(f"{block}.bias" for block in blocks)
            specs["bias"] = ParamSpec(f"{name}.bias", 0, (size_out,), blocks=biases)
        return _Named(layer, specs)

    def row(self, name: str, sizes: tuple[int, int], *, has_bias: bool) -> nn.Module:
        size_in, size_out = sizes
        layer = self.te.Linear(size_in, size_out, bias=has_bias, **self._parallel("row"))
        specs = {"weight": ParamSpec(f"{name}.weight", 1, (size_out, size_in))}
        if has_bias:
            specs["bias"] = ParamSpec(f"{name}.bias", None, (size_out,), sp_partial=self.tp.sequence_parallel)
        return _Named(layer, specs)

    def norm(self, name: str) -> nn.Module:
        kind = self.te.LayerNorm if self.model.norm == "layernorm" else self.te.RMSNorm
        layer = kind(self.model.hidden_size, eps=self.model.norm_eps, device="cuda")
        return _Named(layer, self._norm_specs(name, ""))

    def head_norm(self, name: str) -> nn.Module:
        shape = (self.model.head_dim,)
        layer = self.te.RMSNorm(self.model.head_dim, eps=self.model.norm_eps, device="cuda")
        return _Named(layer, {"weight": ParamSpec(f"{name}.weight", None, shape, sp_partial=self.tp.size > 1)})

    def attention(self, *, causal: bool = True) -> "_Attention | RingAttention":
        if self.context.size > 1:
            return RingAttention(self.context, self.model.sliding_window, causal=causal)
        return _Attention(self.te, self.model, self.tp, causal=causal)

    def param_specs(self, module: nn.Module) -> dict[str, ParamSpec]:
        return collect_specs(module)

    def _normalization(self) -> str:
        return "LayerNorm" if self.model.norm == "layernorm" else "RMSNorm"

    def _norm_specs(self, name: str, prefix: str) -> dict[str, ParamSpec]:
        shape, is_partial = (self.model.hidden_size,), self.tp.sequence_parallel
        kinds = ("weight", "bias") if self.model.norm == "layernorm" else ("weight",)
        return {f"{prefix}{kind}": ParamSpec(f"{name}.{kind}", None, shape, is_partial) for kind in kinds}


class _Named(nn.Module):
    """A module of Transformer Engine with the specs of its parameters."""

    def __init__(self, layer: nn.Module, specs: dict[str, ParamSpec]) -> None:
        super().__init__()
        self.layer = layer
        self.specs = {f"layer.{name}": spec for name, spec in specs.items()}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class _Attention(nn.Module):
    """Transformer Engine's fused attention; (s, b, n, d), twice (s, b, g, d) -> (s, b, n * d)."""

    def __init__(self, te: Any, model: ModelConfig, tp: TensorParallel, *, causal: bool) -> None:
        super().__init__()
        self.packed_mask = "padding_causal" if causal else "padding"
        window = (-1, 0) if causal else (-1, -1)
        self.core = te.DotProductAttention(
            model.num_attention_heads,
            model.head_dim,
            num_gqa_groups=model.num_query_groups,
            attention_dropout=0.0,
            softmax_scale=None if model.scales_scores else 1.0,
            qkv_format="sbhd",
            attn_mask_type="causal" if causal else "no_mask",
            window_size=window if model.sliding_window is None else (model.sliding_window - 1, 0),
            tp_size=tp.size,
            tp_group=tp.group,
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        if bias is not None:
            raise ValueError("backend: te has no biases of attention; t5 needs backend: local.")
        if documents is None:
            out: Tensor = self.core(q.contiguous(), k.contiguous(), v.contiguous())
            return out
        s, b = q.shape[:2]
        bounds = document_bounds(documents)
        packed: Tensor = self.core(
            *(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)),
            qkv_format="thd",
            attn_mask_type=self.packed_mask,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=s,
            max_seqlen_kv=s,
        )
        return packed.view(b, s, -1).transpose(0, 1).contiguous()


def document_bounds(documents: Tensor) -> Tensor:
    """Ends of the runs of equal numbers, counted through the rows of (b, s): (documents + 1,), int32, from 0."""
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = is_first.flatten().nonzero().squeeze(1)
    return torch.cat((starts, starts.new_tensor([documents.numel()]))).to(torch.int32)
