"""Forward passes of a sharded model at its own layout, for scoring. All ranks of a model get the same rows.

With data-parallel ranks each dp rank is a model of its own and may get other rows.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.mesh import Mesh
from training.model import TransformerStage, Want
from training.pipeline_split import rank_of_stage
from training.sharding import local_tensor


class Scorer:
    """Runs rows through all pipeline stages and gives every rank the last stage's result.

    Args:
        stages: This rank's stages, sharded, with weights.
        mesh: Its layout.
        dtype: Of the activations between stages (`compute_dtype(precision)`).
    """

    def __init__(self, stages: Sequence[TransformerStage], mesh: Mesh, *, dtype: torch.dtype = torch.float32) -> None:
        self.stages, self.mesh, self.dtype = list(stages), mesh, dtype
        self.ranks = dist.get_process_group_ranks(mesh.group("pp"))

    @torch.no_grad()
    def log_probs(
        self, tokens: Tensor, targets: Tensor, context: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target under the tokens up to its position.

        The length must be divisible by the layout's `sequence_unit`; pad on the right and give padding
        IGNORE_INDEX targets: a causal model never looks ahead.

        Args:
            tokens: (b, s), int64, equal on all ranks of a model.
            targets: (b, s), int64; IGNORE_INDEX (-100) where nothing is scored.
            context: What else the model is told (`Batch.context`).

        Returns:
            log_probs: (b, s), float32 (float64 for a float64 model), in nats; 0 where ignored.
            is_greedy: (b, s), bool; False where ignored.
        """
        out = self._through(tokens, targets, "log_probs", context or {})
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        if out is None:
            log_probs = torch.empty(self._part(targets), dtype=exact, device=self.mesh.device)
            greedy = torch.empty(self._part(targets), dtype=torch.bool, device=self.mesh.device)
        else:
            log_probs, greedy = out
        return self._from_last(log_probs.to(exact)), self._from_last(greedy.to(torch.uint8)).bool()

    @torch.no_grad()
    def logits(self, tokens: Tensor, context: Mapping[str, Tensor] | None = None) -> Tensor:
        """Logits (b, s, vocab_size) of every position, of the decoder where there is one, on every rank.

        Args:
            context: What else the model is told (`Batch.context`).

        Returns:
            In the activations' dtype.
        """
        told = context or {}
        out = self._through(tokens, None, "logits", told)
        shape = (*self._part(told.get("decoder_inputs", tokens)), self.stages[0].vocab_size)
        logits = torch.empty(shape, dtype=self.dtype, device=self.mesh.device) if out is None else out[0]
        return self._from_last(logits)

    def _through(
        self, tokens: Tensor, targets: Tensor | None, want: Want, context: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...] | None:
        """Run this rank's stages between their neighbours; the last stage returns its result, other ranks None."""
        here: Tensor | None = None  # what this rank's stage before left for the next
        for stage in self.stages:
            x = tokens if here is None else here
            if not stage.is_first and here is None:
                x = self._empty_activation(tokens, context)
                dist.recv(x, self._rank_of(stage.place - 1))
            out = stage(x, labels=targets, want=want, **context)
            if stage.is_last:
                return out if isinstance(out, tuple) else (out,)
            if rank_of_stage(self.mesh.layout, stage.place + 1) == self.mesh.rank("pp"):
                here = local_tensor(out)
            else:
                dist.send(local_tensor(out).contiguous(), self._rank_of(stage.place + 1))
                here = None
        return None

    def _rank_of(self, place: int) -> int:
        return self.ranks[rank_of_stage(self.mesh.layout, place)]

    def _empty_activation(self, tokens: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        tp = self.mesh.tensor_parallel
        rows, length = self._part(tokens)
        if "decoder_inputs" in context:
            length += self._part(context["decoder_inputs"])[1]
        part = length // tp.size if tp.sequence_parallel else length
        return torch.empty(part, rows, self.stages[0].model.hidden_size, dtype=self.dtype, device=self.mesh.device)

    def _part(self, tokens: Tensor) -> tuple[int, int]:
        """Rows, and tokens of each that are this rank's."""
        return tokens.shape[0], tokens.shape[1] // self.mesh.size("cp")

    def _from_last(self, x: Tensor) -> Tensor:
        """Give the last stage's result for whole rows to every rank."""
        if len(self.ranks) > 1:
            x = x.contiguous()
            dist.broadcast(x, self._rank_of(self.mesh.layout.num_stages - 1), group=self.mesh.group("pp"))
        return self.mesh.context_parallel.gather(x, 1)
