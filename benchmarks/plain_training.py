"""The plain loop that the training benchmark compares with: the shortest honest single-file PyTorch GPT.

Fused projection of queries, keys and values, `scaled_dot_product_attention`, cross-entropy on
float32 logits, fused AdamW. `chunked` computes the output projection and the loss over slices of
the tokens and recomputes them in backward, as anyone short of memory would.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class PlainSizes:
    """Sizes of the plain model; the reference work is the default."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    sequence: int = 512
    vocabulary: int = 8192
    batch: int = 4


class PlainBlock(nn.Module):
    def __init__(self, sizes: PlainSizes) -> None:
        super().__init__()
        h = sizes.hidden
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(h, dim=2)
        q, k, v = (t.view(b, s, self.heads, h // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self, sizes: PlainSizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        self.blocks = nn.ModuleList(PlainBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.apply(_initialize)

    def forward(self, tokens: Tensor, labels: Tensor, *, chunk: int | None) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x, target = self.norm(x).flatten(0, 1), labels.flatten()
        if chunk is None:
            return F.cross_entropy(x @ self.tokens.weight.t(), target)
        parts = zip(x.split(chunk), target.split(chunk), strict=True)
        losses = [checkpoint(_chunk_loss, a, self.tokens.weight, b, use_reentrant=False) for a, b in parts]
        return torch.stack(losses).sum() / target.numel()


def _chunk_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), target, reduction="sum")


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class PlainLoop:
    """A training step of the plain model.

    Args:
        chunk: Tokens per slice of the loss; None holds all logits.
    """

    def __init__(self, sizes: PlainSizes, *, chunk: int | None) -> None:
        torch.manual_seed(0)
        self.chunk = chunk
        self.model = PlainGPT(sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        loss = self.model(tokens, labels, chunk=self.chunk)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
