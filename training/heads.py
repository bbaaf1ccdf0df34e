"""What stands between an encoder's last layer and its losses: BERT's head for masked tokens and that for pairs.

Their matrices are small beside a layer's, so every tensor-parallel rank holds them whole.
Letters: s sequence, b batch, h hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.activation import activate
from training.backend import Backend
from training.collectives import enter_tensor_parallel
from training.config import IGNORE_INDEX
from training.mesh import TensorParallel
from training.model_config import ModelConfig
from training.parameters import PAIR_CLASSES, ParamSpec


class WholeLinear(nn.Module):
    """A linear layer with a bias that every tensor-parallel rank holds whole.

    Args:
        sizes: (in, out).
        is_partial: The gradient of each rank covers a part only (`ParamSpec.sp_partial`).
    """

    def __init__(self, name: str, sizes: tuple[int, int], *, is_partial: bool) -> None:
        super().__init__()
        size_in, size_out = sizes
        self.weight = nn.Parameter(torch.empty(size_out, size_in))
        self.bias = nn.Parameter(torch.empty(size_out))
        self.specs = {
            "weight": ParamSpec(f"{name}.weight", None, (size_out, size_in), is_partial),
            "bias": ParamSpec(f"{name}.bias", None, (size_out,), is_partial),
        }

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class MaskedTokenHead(nn.Module):
    """Dense layer, activation and norm before the output matrix, and the bias behind it (Devlin et al. 2019).

    (s, b, h) or (s/tp, b, h) -> the same.
    """

    def __init__(self, backend: Backend, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.activation = model.activation
        self.dense = WholeLinear("head.dense", (hidden, hidden), is_partial=tp.sequence_parallel)
        self.norm = backend.norm("head.norm")
        self.bias = nn.Parameter(torch.empty(model.padded_vocab_size // tp.size))
        self.specs = {"bias": ParamSpec("output.bias", 0, (model.padded_vocab_size,))}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(activate(self.dense(x), self.activation))
        return out


class PairHead(nn.Module):
    """Says from the first token whether two segments belong as they stand (Devlin et al. 2019, section 3.1).

    Attributes:
        tally: Where it is set, passes without a loss add their rows: (3,), float64: summed cross-entropy in nats,
            rows that were right, and rows.
    """

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.tp = tp
        self.tally: Tensor | None = None
        # The first token is on the first rank under sequence parallelism, and elsewhere only that rank counts.
        self.pooler = WholeLinear("pair.pooler", (hidden, hidden), is_partial=tp.size > 1)
        self.output = WholeLinear("pair.output", (hidden, PAIR_CLASSES), is_partial=tp.size > 1)

    def logits(self, x: Tensor) -> Tensor:
        """(s, b, h) or (s/tp, b, h) -> (b, 2); under tensor parallelism only the first rank's mean something."""
        first = x[0]
        if self.tp.size > 1 and not self.tp.sequence_parallel:
            first = enter_tensor_parallel(first, self.tp)
        out: Tensor = self.output(torch.tanh(self.pooler(first)))
        return out

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the rows' cross-entropies, (), in nats; 0 on all but the first tensor-parallel rank.

        Args:
            x: (s, b, h) or (s/tp, b, h).
            labels: (b,), int64: 1 where the segments do not belong as they stand; IGNORE_INDEX gives none.
            weights: (b,), of each row.
        """
        losses = _losses(self.logits(x), labels)
        return (losses * weights.to(losses.dtype)).sum() * float(self.tp.rank == 0)

    def count(self, x: Tensor, labels: Tensor) -> None:
        """Add the rows to `tally`, if it is set; arguments as for `loss`."""
        logits = self.logits(x)
        if self.tally is None or self.tp.rank != 0:
            return
        counts = labels != IGNORE_INDEX
        is_right = (logits.argmax(-1) == labels) & counts
        self.tally += torch.stack([_losses(logits, labels).double().sum(), is_right.sum(), counts.sum()])


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row, at least in float32; 0 where it is IGNORE_INDEX."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(exact, labels, reduction="none", ignore_index=IGNORE_INDEX)
