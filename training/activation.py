"""Non-linearities of the MLP, plain and gated (Shazeer 2020, arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor

from training.families import Activation


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply a non-linearity.

    Args:
        x: (..., f); (..., 2 f) where the activation is gated: the gate, then what it multiplies.

    Returns:
        (..., f).
    """
    match activation:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
    gate, up = x.chunk(2, dim=-1)
    if activation == "swiglu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none") * up
