"""One Transformer block of every family: attention and an MLP (or experts), options instead of subclasses.

Letters: s sequence, b batch, h hidden, n heads, g groups, r heads per group, d head width.
"""

from torch import Tensor, nn

from training.activation import activate
from training.backend import Backend
from training.context_parallel import WHOLE, ContextParallel
from training.dropout import Dropout
from training.experts import AuxiliaryLosses, Experts
from training.mesh import TOGETHER, ExpertParallel, TensorParallel
from training.model_config import ModelConfig
from training.rotary import rotate

Rotary = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and MLP with residual connections.

    Pre-norm, one after the other: x + attn(norm(x)), then x + mlp(norm(x)). With `parallel_residual`
    both read the block's input: x + attn(norm(x)) + mlp(norm'(x)), where norm' may be norm. Post-norm:
    norm(x + attn(x)), then norm(x + mlp(x)). Layers of a decoder behind an encoder have x + cross(norm(x)) between.
    """

    def __init__(
        self,
        backend: Backend,
        model: ModelConfig,
        tp: TensorParallel,
        layer: int,
        dropout: Dropout,
        auxiliary: AuxiliaryLosses,
        *,
        context: ContextParallel = WHOLE,
        dealt: ExpertParallel = TOGETHER,
    ) -> None:
        super().__init__()
        name = f"layers.{layer}"
        self.dropout = dropout
        self.first_site = 1 + 2 * layer
        self.cross_site = 1 + 2 * model.total_layers + layer
        self.is_parallel, self.is_post = model.parallel_residual, model.norm_position == "post"
        is_apart = self.is_post or model.shared_norm  # the norm is no part of what follows it
        before = self.is_parallel and model.shared_norm
        self.shared_norm = backend.norm(f"{name}.attn.norm") if before else None
        is_decoder = model.is_decoder_layer(layer)
        self.attention = Attention(backend, model, tp, name, has_norm=not is_apart, causal=model.causal or is_decoder)
        self.cross = CrossAttention(backend, model, tp, name) if is_decoder else None
        self.attention_norm = backend.norm(f"{name}.attn.norm") if self.is_post else None
        self.mlp: Experts | Mlp
        if model.has_experts(layer):
            self.mlp = Experts(
                backend,
                model,
                tp,
                name,
                has_norm=not is_apart,
                auxiliary=auxiliary,
                context=context,
                dealt=dealt,
            )
        else:
            self.mlp = Mlp(backend, model, name, has_norm=not is_apart)
        self.mlp_norm = backend.norm(f"{name}.mlp.norm") if self.is_post else None

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        row_ids: Tensor | None,
        documents: Tensor | None = None,
        bias: Tensor | None = None,
        encoded: Tensor | None = None,
        cross_bias: Tensor | None = None,
    ) -> Tensor:
        """(s, b, h) or (s/tp, b, h) -> the same.

        Args:
            rotary: Cosines and sines of the positions.
            row_ids, documents: As `TransformerStage.forward` has them.
            bias: Of the scores of attention, which then stands for the mask.
            encoded: Output of the encoder, as `x`; for layers of a decoder behind it.
            cross_bias: Of the scores of the attention to it.
        """
        first = self.first_site
        if self.is_parallel:
            y = x if self.shared_norm is None else self.shared_norm(x)
            x = x + self.dropout(self.attention(y, rotary, documents, bias), row_ids, first)
            return x + self.dropout(self.mlp(y), row_ids, first + 1)
        x = x + self.dropout(self.attention(x, rotary, documents, bias), row_ids, first)
        if self.attention_norm is not None:
            x = self.attention_norm(x)
        if self.cross is not None and encoded is not None:
            x = x + self.dropout(self.cross(x, encoded, cross_bias), row_ids, self.cross_site)
        x = x + self.dropout(self.mlp(x), row_ids, first + 1)
        return x if self.mlp_norm is None else self.mlp_norm(x)


class Attention(nn.Module):
    """Self-attention with grouped queries; (s, b, h) or (s/tp, b, h) -> the same."""

    def __init__(
        self, backend: Backend, model: ModelConfig, tp: TensorParallel, name: str, *, has_norm: bool, causal: bool
    ) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.groups = model.num_query_groups // tp.size
        self.heads_per_group = model.num_attention_heads // model.num_query_groups
        sizes, qkv = (model.hidden_size, model.qkv_size), f"{name}.attn.qkv"
        self.project = (
            backend.norm_column(f"{name}.attn.norm", qkv, sizes, has_bias=model.qkv_bias)
            if has_norm
            else backend.column(qkv, sizes, has_bias=model.qkv_bias)
        )
        self.q_norm = backend.head_norm(f"{name}.attn.q_norm") if model.qk_norm else None
        self.k_norm = backend.head_norm(f"{name}.attn.k_norm") if model.qk_norm else None
        self.core = backend.attention(causal=causal)
        self.out = backend.row(
            f"{name}.attn.out", (model.attention_size, model.hidden_size), has_bias=model.linear_bias
        )

    def forward(
        self, x: Tensor, rotary: Rotary | None, documents: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        q, k, v = self._queries_keys_values(self.project(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        out: Tensor = self.out(self.core(q, k, v, documents, bias))
        return out

    def _queries_keys_values(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, b, _ = qkv.shape
        heads = self.heads_per_group
        qkv_sbgrd = qkv.view(s, b, self.groups, heads + 2, self.head_dim)
        q = qkv_sbgrd[:, :, :, :heads].reshape(s, b, -1, self.head_dim)
        return q, qkv_sbgrd[:, :, :, heads], qkv_sbgrd[:, :, :, heads + 1]


class CrossAttention(nn.Module):
    """Attention of a decoder's tokens to the output of the encoder; (s, b, h) or (s/tp, b, h) -> the same."""

    def __init__(self, backend: Backend, model: ModelConfig, tp: TensorParallel, layer: str) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        name, hidden = f"{layer}.cross", model.hidden_size
        queries, keys = (hidden, model.attention_size), (hidden, model.cross_kv_size)
        self.query = backend.norm_column(f"{name}.norm", f"{name}.q", queries, has_bias=model.qkv_bias)
        self.key_value = backend.column(f"{name}.kv", keys, has_bias=model.qkv_bias)
        self.core = backend.attention(causal=False)
        self.out = backend.row(f"{name}.out", (model.attention_size, hidden), has_bias=model.linear_bias)

    def forward(self, x: Tensor, encoded: Tensor, bias: Tensor | None) -> Tensor:
        q, kv = self.query(x), self.key_value(encoded)
        q = q.view(*q.shape[:2], -1, self.head_dim)
        kv_sbgtd = kv.view(*kv.shape[:2], -1, 2, self.head_dim)
        out: Tensor = self.out(self.core(q, kv_sbgtd[..., 0, :], kv_sbgtd[..., 1, :], None, bias))
        return out


class Mlp(nn.Module):
    """Two matrices, or three in the gated form; (s, b, h) or (s/tp, b, h) -> the same."""

    def __init__(self, backend: Backend, model: ModelConfig, name: str, *, has_norm: bool) -> None:
        super().__init__()
        self.activation = model.activation
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
        blocks = (f"{name}.mlp.gate", f"{name}.mlp.up") if model.is_gated else ()
        up = f"{name}.mlp.gate_up" if blocks else f"{name}.mlp.up"
        sizes = (hidden, ffn * max(1, len(blocks)))
        self.up = (
            backend.norm_column(f"{name}.mlp.norm", up, sizes, has_bias=model.linear_bias, blocks=blocks)
            if has_norm
            else backend.column(up, sizes, has_bias=model.linear_bias, blocks=blocks)
        )
        self.down = backend.row(f"{name}.mlp.down", (ffn, hidden), has_bias=model.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(activate(self.up(x), self.activation))
        return out
