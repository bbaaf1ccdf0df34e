"""Forward passes of a sharded model at its own layout, for scoring. All ranks of a model get the same rows.

With data-parallel ranks each dp rank is a model of its own and may get other rows.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from training.mesh import Mesh
from training.model import TransformerStage, Want
from training.sharding import local_tensor


class Scorer:
    """Runs rows through all pipeline stages and gives every rank the last stage's result.

    Args:
        stage: This rank's stage, sharded, with weights.
        mesh: Its layout.
        dtype: Of the activations between stages (`compute_dtype(precision)`).
    """

    def __init__(self, stage: TransformerStage, mesh: Mesh, *, dtype: torch.dtype = torch.float32) -> None:
        self.stage, self.mesh, self.dtype = stage, mesh, dtype
        self.ranks = dist.get_process_group_ranks(mesh.group("pp"))

    @torch.no_grad()
    def log_probs(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each target under the tokens up to its position.

        Under sequence parallelism the length must be divisible by the tensor-parallel degree; pad
        on the right and give padding IGNORE_INDEX targets: a causal model never looks ahead.

        Args:
            tokens: (b, s), int64, equal on all ranks of a model.
            targets: (b, s), int64; IGNORE_INDEX (-100) where nothing is scored.

        Returns:
            log_probs: (b, s), float32 (float64 for a float64 model), in nats; 0 where ignored.
            is_greedy: (b, s), bool; False where ignored.
        """
        out = self._through(tokens, targets, "log_probs")
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        if out is None:
            log_probs = torch.empty(tokens.shape, dtype=exact, device=self.mesh.device)
            greedy = torch.empty(tokens.shape, dtype=torch.bool, device=self.mesh.device)
        else:
            log_probs, greedy = out
        return self._from_last(log_probs.to(exact)), self._from_last(greedy.to(torch.uint8)).bool()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits (b, s, vocab_size) of every position, in the activations' dtype, on every rank."""
        out = self._through(tokens, None, "logits")
        shape = (*tokens.shape, self.stage.vocab_size)
        logits = torch.empty(shape, dtype=self.dtype, device=self.mesh.device) if out is None else out[0]
        return self._from_last(logits)

    def _through(self, tokens: Tensor, targets: Tensor | None, want: Want) -> tuple[Tensor, ...] | None:
        """Run this rank's stage between its neighbours; the last stage returns its result, others None."""
        place = self.mesh.rank("pp")
        x = tokens
        if place > 0:
            x = self._empty_activation(tokens)
            dist.recv(x, self.ranks[place - 1])
        out = self.stage(x, labels=targets, want=want)
        if place < len(self.ranks) - 1:
            dist.send(local_tensor(out).contiguous(), self.ranks[place + 1])
            return None
        return out if isinstance(out, tuple) else (out,)

    def _empty_activation(self, tokens: Tensor) -> Tensor:
        tp = self.mesh.tensor_parallel
        rows, length = tokens.shape
        part = length // tp.size if tp.sequence_parallel else length
        return torch.empty(part, rows, self.stage.model.hidden_size, dtype=self.dtype, device=self.mesh.device)

    def _from_last(self, x: Tensor) -> Tensor:
        if len(self.ranks) == 1:
            return x
        x = x.contiguous()
        dist.broadcast(x, self.ranks[-1], group=self.mesh.group("pp"))
        return x
