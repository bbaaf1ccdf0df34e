"""Token and position embeddings, and rotary positions. Letters: s sequence, b batch, h hidden, d head width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.collectives import leave_tensor_parallel
from training.config import ModelConfig
from training.mesh import TensorParallel
from training.parameters import ParamSpec


class VocabEmbedding(nn.Module):
    """This rank's rows of the token table; also the output matrix, which is cut the same way."""

    def __init__(self, name: str, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        shape = (model.padded_vocab_size, model.hidden_size)
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(shape[0] // tp.size, shape[1]))
        self.specs = {"weight": ParamSpec(f"{name}.weight", 0, shape)}

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, s) int64 -> (s, b, h), or (s/tp, b, h) under sequence parallelism."""
        ids = tokens.t()
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.tp.rank * self.weight.shape[0]
        is_here = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(is_here, local, 0), self.weight)
        return leave_tensor_parallel(rows * is_here.unsqueeze(-1), self.tp)


class PositionEmbedding(nn.Module):
    """Learned absolute positions; every rank holds the table and reads its part of the sequence."""

    def __init__(self, name: str, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        shape = (model.max_position_embeddings, model.hidden_size)
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(shape))
        self.specs = {"weight": ParamSpec(f"{name}.weight", None, shape, sp_partial=tp.sequence_parallel)}

    def forward(self, length: int) -> Tensor:
        """Return (s, 1, h), or this rank's (s/tp, 1, h), for a whole sequence of `length`."""
        part = length // self.tp.size if self.tp.sequence_parallel else length
        first = self.tp.rank * part if self.tp.sequence_parallel else 0
        return self.weight[first : first + part].unsqueeze(1)


class RotaryTable(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021, arXiv:2104.09864), for half-rotated pairs.

    The pair of dimension i < d/2 is (i, i + d/2), as in GPT-NeoX and Llama checkpoints on Hugging Face.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        exponent = torch.arange(0, model.head_dim, 2, dtype=torch.int64).to(exact) / model.head_dim
        frequency = 1.0 / (model.rotary_base**exponent)
        angle = torch.outer(torch.arange(model.max_position_embeddings, dtype=exact), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (s, 1, 1, d)."""
        return self.cos[:length, None, None], self.sin[:length, None, None]


def rotate(x_sbnd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of `x_sbnd` by its position's angle."""
    first, second = x_sbnd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_sbnd * cos.to(x_sbnd.dtype) + turned * sin.to(x_sbnd.dtype)
