"""Which tensors an optimizer keeps for each parameter, and what a checkpoint calls them. Never imports torch.

A checkpoint holds each as `optim.<name>.<state>`, of the parameter's shape: `exp_avg` and `exp_avg_sq`
(AdamW), `momentum` (SGD, Muon), and `ema`, the moving average of the weights.
"""

from collections.abc import Mapping
from typing import Any

from training.parameters import MOMENTS, Shape

MOMENTUM = ("momentum",)
EMA = "ema"
STATE_KEY = "optimizer"  # in a manifest's `extra`; absent where a run kept AdamW's moments alone


def states_of(name: str, shape: Shape, kind: str = "adamw", *, has_ema: bool = False) -> tuple[str, ...]:
    """List the states of one stored parameter.

    Args:
        kind: adamw, sgd or muon.
    """
    keeps_momentum = kind == "sgd" or (kind == "muon" and is_orthogonalized(name, shape))
    return (MOMENTUM if keeps_momentum else MOMENTS) + ((EMA,) if has_ema else ())


def is_orthogonalized(name: str, shape: Shape) -> bool:
    """Say whether Muon takes a parameter: the matrices inside the layers, not embeddings, output, norms and biases."""
    return name.startswith("layers.") and len(shape) > 1


def described(kind: str, *, has_ema: bool) -> dict[str, Any]:
    """Describe an optimizer in a manifest's `extra`; nothing for AdamW alone, as in manifests of earlier releases."""
    return {} if kind == "adamw" and not has_ema else {STATE_KEY: {"kind": kind, "ema": has_ema}}


def states_in(extra: Mapping[str, Any], name: str, shape: Shape) -> tuple[str, ...]:
    """List the states that a checkpoint holds for one stored parameter, by its manifest's `extra`."""
    found = extra.get(STATE_KEY) or {}
    return states_of(name, shape, str(found.get("kind", "adamw")), has_ema=bool(found.get("ema", False)))
