"""Changing the type of weights, and counting what the new type cannot hold."""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.parameters import OPTIMIZER_PREFIX

DTYPES = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class Caster:
    """Turns weights into one type; moments of the optimizer keep theirs.

    Args:
        target: None keeps the bits of everything.

    Attributes:
        elements: Elements that changed type.
        overflows: Names of tensors, each with the number of finite elements that became infinite.
    """

    target: torch.dtype | None
    elements: int = 0
    overflows: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which a tensor is written."""
        return dtype if self.target is None or name.startswith(OPTIMIZER_PREFIX) else self.target

    def __call__(self, name: str, tensor: Tensor, *, counts: bool = True) -> Tensor:
        """Cast a piece of tensor `name`; `counts` is off where the same piece is cast again for comparison."""
        wanted = self.dtype_of(name, tensor.dtype)
        if wanted == tensor.dtype:
            return tensor
        cast = tensor.to(wanted)
        if counts:
            lost = int((torch.isinf(cast) & torch.isfinite(tensor)).sum())
            with self._lock:
                self.elements += tensor.numel()
                if lost:
                    self.overflows[name] = self.overflows.get(name, 0) + lost
        return cast
