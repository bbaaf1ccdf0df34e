"""The two stacks of T5 on one pipeline stage: which layer reads what.

Activations of both stacks travel from stage to stage together, so that the decoder's layers find the encoder's
output wherever they are, and its gradient finds the way back. Letters: s encoder's sequence,
t decoder's, b batch, h hidden, n heads.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from training.backend import Backend
from training.context_parallel import WHOLE, ContextParallel
from training.layers import same_document
from training.mesh import TensorParallel
from training.model_config import ModelConfig
from training.recompute import Recompute, run_block
from training.relative_positions import RelativeBias


class Stacks(nn.Module):
    """What the layers of a stage share: relative positions of either stack, and the norm that ends the encoder.

    Args:
        layers: Of the stage, numbered through both stacks.
    """

    def __init__(
        self,
        backend: Backend,
        model: ModelConfig,
        tp: TensorParallel,
        layers: Sequence[int],
        recompute: Mapping[str, Recompute],
        context: ContextParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.context = context
        self.tp, self.recompute, self.last_of_encoder = tp, recompute, model.num_layers - 1
        kinds = {model.is_decoder_layer(layer) for layer in layers}
        self.encoder_bias = RelativeBias("encoder", model, tp) if False in kinds else None
        self.decoder_bias = RelativeBias("decoder", model, tp) if True in kinds else None
        self.encoder_norm = backend.norm("encoder.norm") if self.last_of_encoder in layers else None

    def forward(
        self, x: Tensor, y: Tensor, layers: nn.ModuleDict, row_ids: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the stage's layers over the activations of the encoder and of the decoder.

        Args:
            x: (s, b, h), or (s/tp, b, h) under sequence parallelism.
            y: (t, b, h), or (t/tp, b, h).
            layers: Of the stage, by number.
            documents: (b, s), int64, of the encoder's tokens, whole rows.
        """
        parts = (self.tp.size if self.tp.sequence_parallel else 1) * self.context.size
        bias, causal_bias, cross_bias = self._biases(x.shape[0] * parts, y.shape[0] * parts, documents, x.dtype)
        for name, block in layers.items():
            if int(name) > self.last_of_encoder:
                y = run_block(block, (y, None, row_ids, None, causal_bias, x, cross_bias), self.recompute[name])
                continue
            x = run_block(block, (x, None, row_ids, None, bias), self.recompute[name])
            if int(name) == self.last_of_encoder and self.encoder_norm is not None:
                x = self.encoder_norm(x)
        return x, y

    def _biases(
        self, length: int, decoder_length: int, documents: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Positions and masks, as one bias each: of the encoder, of the decoder, and of what it sees of the encoder.

        Returns:
            (1 or b, n/tp, s, s), (1, n/tp, t, t), (b, 1, 1, s) or None; only the rows of this rank's queries.
        """
        bias = causal_bias = cross_bias = None
        if self.encoder_bias is not None:
            bias = self.encoder_bias(self._queries(length), length).to(dtype)
            if documents is not None:
                bias = bias.masked_fill(~self.context.cut(same_document(documents), 2), -math.inf)
        if self.decoder_bias is not None:
            queries = self._queries(decoder_length)
            causal_bias = self.decoder_bias(queries, decoder_length).to(dtype)
            later = torch.arange(decoder_length, device=queries.device) > queries[:, None]
            causal_bias = causal_bias.masked_fill(later, -math.inf)
            if documents is not None:
                hidden = (documents < 0)[:, None, None, :]
                cross_bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
                cross_bias = cross_bias.masked_fill(hidden, -math.inf)
        return bias, causal_bias, cross_bias

    def _queries(self, length: int) -> Tensor:
        """Places of this rank's tokens in a row."""
        bias = self.encoder_bias if self.encoder_bias is not None else self.decoder_bias
        if bias is None:
            raise RuntimeError("a stage has layers")
        return self.context.places(length, bias.weight.device)
