"""Embeddings of tokens, of learned positions and of kinds of tokens. Letters: s sequence, b batch, h hidden."""

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
        self.offset = model.position_offset
        shape = (model.max_position_embeddings + self.offset, model.hidden_size)
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(shape))
        self.specs = {"weight": ParamSpec(f"{name}.weight", None, shape, sp_partial=tp.sequence_parallel)}

    def forward(self, length: int, positions: Tensor | None = None) -> Tensor:
        """Return (s, 1, h), or this rank's (s/tp, 1, h), for a whole sequence of `length`.

        Args:
            positions: (b, s), int64: gives (s, b, h) or (s/tp, b, h) instead; None counts from 0.
        """
        part = length // self.tp.size if self.tp.sequence_parallel else length
        first = self.tp.rank * part if self.tp.sequence_parallel else 0
        if positions is None:
            return self.weight[self.offset + first : self.offset + first + part].unsqueeze(1)
        return F.embedding(positions.t()[first : first + part] + self.offset, self.weight)


class TypeEmbedding(nn.Module):
    """Embeddings of kinds of tokens; every rank holds the table and reads its part of the sequence."""

    def __init__(self, name: str, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        shape = (model.token_types, model.hidden_size)
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(shape))
        self.specs = {"weight": ParamSpec(f"{name}.weight", None, shape, sp_partial=tp.sequence_parallel)}

    def forward(self, token_types: Tensor | None) -> Tensor:
        """(b, s) int64 -> (s, b, h), or (s/tp, b, h) under sequence parallelism; None is type 0: (1, 1, h)."""
        if token_types is None:
            return self.weight[0].view(1, 1, -1)
        part = token_types.shape[1] // self.tp.size if self.tp.sequence_parallel else token_types.shape[1]
        first = self.tp.rank * part if self.tp.sequence_parallel else 0
        return F.embedding(token_types.t()[first : first + part], self.weight)
