"""What a model asks of a set of layers; `backend_choice` says which set it gets.

A model is built from six kinds of module. `local` makes them from plain PyTorch on any device;
`te` from Transformer Engine on NVIDIA GPUs. Attribute names inside the modules differ, canonical
names in their `ParamSpec`s do not, so a checkpoint moves freely between backends.
"""

from typing import Protocol

from torch import Tensor, nn

from training.parameters import ParamSpec


class AttentionModule(Protocol):
    """Attention over this rank's heads; has no parameters."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """(s, b, heads/tp, d), twice (keys, b, groups/tp, d) -> (s, b, heads/tp * d).

        Args:
            documents: (b, s), int64, of whole sequences: a token sees only tokens of its own number.
            bias: (1 or b, 1 or heads/tp, s, keys), added to the scores; stands for the whole mask.
        """
        ...


class Backend(Protocol):
    """Builders of the parts of a Transformer block. Names are canonical: `layers.3.attn.norm`."""

    def norm_column(
        self, norm: str, linear: str, sizes: tuple[int, int], *, has_bias: bool, blocks: tuple[str, ...] = ()
    ) -> nn.Module:
        """A norm followed by a column-parallel linear; (s/tp, b, in) -> (s, b, out/tp).

        Args:
            norm: Canonical name of the norm.
            linear: Canonical name of the linear layer.
            sizes: (in, out) of the uncut weight.
            has_bias: Whether the linear layer has one.
            blocks: Canonical names of the layers fused into `linear` by rows; each is cut on its own.
        """
        ...

    def column(self, name: str, sizes: tuple[int, int], *, has_bias: bool, blocks: tuple[str, ...] = ()) -> nn.Module:
        """A column-parallel linear without a norm; (s/tp, b, in) -> (s, b, out/tp)."""
        ...

    def row(self, name: str, sizes: tuple[int, int], *, has_bias: bool) -> nn.Module:
        """A row-parallel linear; (s, b, in/tp) -> (s/tp, b, out)."""
        ...

    def norm(self, name: str) -> nn.Module:
        """LayerNorm or RMSNorm as the model says; (s/tp, b, h) -> the same."""
        ...

    def head_norm(self, name: str) -> nn.Module:
        """RMSNorm over the width of each head; (s, b, n, d) -> the same."""
        ...

    def attention(self, *, causal: bool = True) -> AttentionModule:
        """Attention to what is before a token, over the model's sliding window if it has one; or to the whole row."""
        ...

    def param_specs(self, module: nn.Module) -> dict[str, ParamSpec]:
        """Attribute path of each parameter of a module that this backend made, to its spec."""
        ...


def collect_specs(module: nn.Module) -> dict[str, ParamSpec]:
    """Gather the `specs` that the parts of a module carry: attribute path of each parameter to its spec."""
    return {
        f"{path}.{name}" if path else name: spec
        for path, part in module.named_modules()
        for name, spec in getattr(part, "specs", {}).items()
    }
