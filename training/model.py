"""The Transformer of every family, one pipeline stage of it at a time.

In: settings, a mesh. Out: an `nn.Module` that turns tokens (or the previous stage's activations)
into activations, or on the last stage into the loss, log-probabilities or logits.
Letters: s sequence, b batch, h hidden.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from training.backend_choice import make_backend
from training.block import Block
from training.config import Precision
from training.dropout import Dropout
from training.embedding import PositionEmbedding, TypeEmbedding, VocabEmbedding
from training.encoder_decoder import Stacks
from training.experts import AuxiliaryLosses, with_loss
from training.heads import MaskedTokenHead, PairHead
from training.loss import output_logits, output_loss, token_log_probs
from training.mesh import Mesh, TensorParallel
from training.model_config import ModelConfig
from training.parameters import ParamSpec
from training.pipeline_split import layers_of_stages
from training.recompute import Recompute, run_block
from training.rotary import RotaryTable
from training.tied import shared_parameters

Want = Literal["loss", "log_probs", "logits", "hidden"]


class TransformerStage(nn.Module):
    """The layers of one pipeline stage; the whole model where there is one stage.

    Args:
        model: Sizes; `vocab_size` must be set.
        mesh: The layout; decides the layers and the part of each matrix.
        place: Number of the stage among all; None where a rank has one.
        auxiliary: Where layers leave their own losses; the stages of a rank share one.
        dtype: Of the rotary tables; parameters are made in torch's default dtype.
        recompute: What backward computes again, of all layers or of each by its number.
        seed: For dropout.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        place: int | None = None,
        auxiliary: AuxiliaryLosses | None = None,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute | Callable[[int], Recompute] = "none",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if model.vocab_size is None:
            raise ValueError("model.vocab_size must be set before the model is built.")
        tp, context, dealt = mesh.tensor_parallel, mesh.context_parallel, mesh.expert_parallel
        backend = make_backend(model, tp, context)
        self.model = model
        self.vocab_size = model.vocab_size
        self.tp = tp
        self.context = context
        self.seed = seed
        self.z_loss = 0.0
        self.kept_losses: list[Tensor] | None = None
        self.place = mesh.rank("pp") if place is None else place
        self.is_first, self.is_last = self.place == 0, self.place == mesh.layout.num_stages - 1
        self.embedding = VocabEmbedding("embedding.word", model, tp) if self.is_first else None
        has_positions = self.is_first and model.position == "learned"
        self.positions = PositionEmbedding("embedding.position", model, tp) if has_positions else None
        has_types = self.is_first and model.token_types > 0
        self.token_types = TypeEmbedding("embedding.token_type", model, tp) if has_types else None
        self.embedding_norm = backend.norm("embedding.norm") if self.is_first and model.embedding_norm else None
        self.rotary = RotaryTable(model, dtype) if model.position == "rope" else None
        self.shared = shared_parameters(model, mesh.layout)
        layers = layers_of_stages(model, mesh.layout)[self.place]
        self.recompute = {str(n): recompute(n) if callable(recompute) else recompute for n in layers}
        self.stacks: Stacks | None = None
        if model.is_encoder_decoder:
            self.stacks = Stacks(backend, model, tp, layers, self.recompute, context)
        part, parts = (tp.rank, tp.size) if tp.sequence_parallel else (0, 1)
        self.dropout = Dropout(model.dropout, seed, part, parts, context)
        self.auxiliary = AuxiliaryLosses() if auxiliary is None else auxiliary
        self.layers = nn.ModuleDict(
            {
                str(n): Block(backend, model, tp, n, self.dropout, self.auxiliary, context=context, dealt=dealt)
                for n in layers
            }
        )
        has_final_norm = self.is_last and model.norm_position == "pre"
        self.final_norm = backend.norm("final_norm") if has_final_norm else None
        self.output = self._output_matrix(tp) if self.is_last else None
        self.head = MaskedTokenHead(backend, model, tp) if self.is_last and model.head == "masked" else None
        self.pair_head = PairHead(model, tp) if self.is_last and model.pair_head else None
        self.param_specs: dict[str, ParamSpec] = backend.param_specs(self)

    def _output_matrix(self, tp: TensorParallel) -> VocabEmbedding | None:
        if not self.model.tied_embeddings:
            return VocabEmbedding("output", self.model, tp)
        # With several stages the last one holds its own copy of the tied table.
        return None if self.is_first else VocabEmbedding("embedding.word", self.model, tp)

    def forward(
        self,
        x: Tensor,
        *,
        labels: Tensor | None = None,
        row_ids: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        token_types: Tensor | None = None,
        pair_labels: Tensor | None = None,
        pair_weights: Tensor | None = None,
        decoder_inputs: Tensor | None = None,
        want: Want = "loss",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the stage.

        Every context-parallel rank is given whole rows and does its part of each; activations and results
        are of that part (`ContextParallel.cut`), s below.

        Args:
            x: Tokens (b, s), int64, on the first stage; else activations (s, b, h), cut along s under
                sequence parallelism.
            labels: (b, s), int64; for loss and log_probs, on the last stage.
            row_ids: (b,), int64: place of each row in the order of samples; only dropout needs it.
            positions: (b, s), int64: of each token; None counts from 0 in every row.
            documents: (b, s), int64: a token sees only tokens of its own number; None sees the whole row.
                With an encoder and a decoder, those of the encoder's tokens; the decoder sees none below 0.
            token_types: (b, s), int64; None is type 0.
            pair_labels: (b,), int64: 1 where the two segments do not belong as they stand; with a pair head, for loss.
            pair_weights: (b,): weight of each row's pair against the loss of a token; None is 1.
            decoder_inputs: (b, t), int64: tokens of the decoder; `x` and the output are then both stacks' activations,
                ((s + t) / tp, b, h), and `labels` are (b, t).
            want: What the last stage returns; other stages return activations.

        Returns:
            Activations; or the summed loss (); or log-probabilities and is_greedy, each (b, s); or
            logits (b, s, vocab_size); or the normed activations ("hidden").
        """
        if self.context.size > 1:
            if self.stacks is None:
                positions = self._places(x, positions)
            x = self.context.cut(x, 1) if self.is_first else x
            labels, token_types, decoder_inputs = (
                None if t is None else self.context.cut(t, 1) for t in (labels, token_types, decoder_inputs)
            )
        if self.embedding is not None:
            x = self._embed(x, row_ids, positions, token_types)
        if self.stacks is not None:
            return self._through_stacks(x, decoder_inputs, row_ids, documents, labels, want)
        rotary = None if self.rotary is None else self.rotary(self._row_length(x), positions)
        for name, block in self.layers.items():
            x = run_block(block, (x, rotary, row_ids, documents), self.recompute[name])
        if not self.is_last:
            return x
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.pair_head is not None and pair_labels is not None and want == "loss" and torch.is_grad_enabled():
            weights = torch.ones_like(pair_labels) if pair_weights is None else pair_weights
            weights = weights * float(self.context.rank == 0)  # the ranks that share a row have its start on the first
            x = with_loss(x, self.pair_head.loss(x, pair_labels, weights), self.auxiliary)
        elif self.pair_head is not None and pair_labels is not None and want == "log_probs":
            self.pair_head.count(x, pair_labels)
        return self._finish(x, labels, want)

    def _row_length(self, x: Tensor) -> int:
        """Tokens of a whole row, from activations."""
        return x.shape[0] * (self.tp.size if self.tp.sequence_parallel else 1) * self.context.size

    def _places(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Positions of this rank's tokens: (b, s), or (1, s) where all rows count from 0."""
        if positions is not None:
            return self.context.cut(positions, 1)
        length = x.shape[1] if self.is_first else self._row_length(x)
        check_length(length, self.model)
        return self.context.places(length, x.device).unsqueeze(0)

    def _through_stacks(
        self,
        x: Tensor,
        decoder_inputs: Tensor | None,
        row_ids: Tensor | None,
        documents: Tensor | None,
        labels: Tensor | None,
        want: Want,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the layers of an encoder and a decoder, whose activations travel together."""
        if self.stacks is None or decoder_inputs is None:
            raise ValueError("an encoder and a decoder need decoder_inputs")
        part = decoder_inputs.shape[1] // (self.tp.size if self.tp.sequence_parallel else 1)
        if self.embedding is not None:
            y = self._embed(decoder_inputs, row_ids, None, None, site=1 + 3 * self.model.total_layers)
        else:
            x, y = x.split([x.shape[0] - part, part])
        x, y = self.stacks(x, y, self.layers, row_ids, documents)
        if not self.is_last:
            return torch.cat((x, y))
        if self.final_norm is not None:
            y = self.final_norm(y)
        return self._finish(y, labels, want)

    def _embed(
        self,
        tokens: Tensor,
        row_ids: Tensor | None,
        positions: Tensor | None,
        token_types: Tensor | None,
        *,
        site: int = 0,
    ) -> Tensor:
        check_length(tokens.shape[1], self.model)
        if self.embedding is None:
            raise RuntimeError("only the first stage embeds tokens")
        x: Tensor = self.embedding(tokens)
        if self.model.embedding_scale != 1.0:
            x = x * self.model.embedding_scale
        if self.positions is not None:
            x = x + self.positions(tokens.shape[1], positions)
        if self.token_types is not None:
            x = x + self.token_types(token_types)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x, row_ids, site)

    def _finish(self, x: Tensor, labels: Tensor | None, want: Want) -> Tensor | tuple[Tensor, Tensor]:
        if want == "hidden":
            return x
        bias = None
        if self.head is not None:
            x, bias = self.head(x), self.head.bias
        if self.model.output_scale != 1.0:
            x = x * self.model.output_scale
        table = self.output if self.output is not None else self.embedding
        if table is None:
            raise RuntimeError("the last stage has an output matrix")
        if want == "logits":
            return output_logits(x, table.weight, vocab_size=self.vocab_size, tp=self.tp, bias=bias)
        if labels is None:
            raise ValueError(f"labels are needed for {want}")
        if want == "log_probs":
            return token_log_probs(x, table.weight, labels, vocab_size=self.vocab_size, tp=self.tp, bias=bias)
        return output_loss(
            x,
            table.weight,
            labels,
            vocab_size=self.vocab_size,
            tp=self.tp,
            bias=bias,
            z_loss=self.z_loss,
            keep=self.kept_losses,
            skips_ignored=self.head is not None,
        )


def check_length(length: int, model: ModelConfig) -> None:
    """Refuse a row that is longer than the model's positions.

    Raises:
        ValueError: It is.
    """
    if length > model.max_position_embeddings:
        raise ValueError(
            f"a row of {length} tokens is longer than max_position_embeddings ({model.max_position_embeddings})."
        )


def compute_dtype(precision: Precision) -> torch.dtype:
    """Dtype of the layers' arithmetic."""
    return {
        "float32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "float64": torch.float64,
    }[precision]


def master_dtype(precision: Precision) -> torch.dtype:
    """Dtype of the parameters between steps, of their gradients and of the optimizer."""
    return torch.float64 if precision == "float64" else torch.float32
