"""Rotary positions (Su et al. 2021, arXiv:2104.09864), whole or partial heads, and their scaling to longer sequences.

In: a model's settings. Out: cosines and sines for `rotate`. Scalings give the numbers of
transformers' `rope_scaling`. Letters: s sequence, b batch, n heads, d head width, r the part that is turned.
"""

import math

import torch
from torch import Tensor, nn

from training.model_config import ModelConfig, RopeScaling


class RotaryTable(nn.Module):
    """Cosines and sines for half-rotated pairs, made for the longest sequence met so far.

    The pair of dimension i < r/2 is (i, i + r/2), as in GPT-NeoX and Llama checkpoints on Hugging Face.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.exact = torch.float64 if dtype == torch.float64 else torch.float32
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(0, model.rotary_dim, dtype=self.exact), persistent=False)

    def forward(self, length: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (s, 1, 1, r), or (s, b, 1, r) for given positions.

        Args:
            length: Tokens of a row, or more than the highest position.
            positions: (b, s), int64; None counts from 0.
        """
        if length > len(self.cos):
            self._make(length)
        if positions is None:
            return self.cos[:length, None, None], self.sin[:length, None, None]
        places = positions.t()
        return self.cos[places].unsqueeze(2), self.sin[places].unsqueeze(2)

    def _make(self, length: int) -> None:
        """Fill the tables, on the CPU whatever the device, so that all devices have the same numbers."""
        angle = torch.outer(torch.arange(length, dtype=self.exact), rotary_frequencies(self.model, self.exact))
        angle = torch.cat((angle, angle), dim=-1)
        scale = attention_factor(self.model.rope_scaling)
        self.cos = (angle.cos() * scale).to(self.cos.device)
        self.sin = (angle.sin() * scale).to(self.sin.device)


def rotate(x_sbnd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of the first r channels of each head by its position's angle; the other channels stay."""
    width = cos.shape[-1]
    if width < x_sbnd.shape[-1]:
        return torch.cat((rotate(x_sbnd[..., :width], cos, sin), x_sbnd[..., width:]), dim=-1)
    first, second = x_sbnd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_sbnd * cos.to(x_sbnd.dtype) + turned * sin.to(x_sbnd.dtype)


def rotary_frequencies(model: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Radians per position of each pair: (r/2,)."""
    exponent = torch.arange(0, model.rotary_dim, 2, dtype=torch.int64).to(dtype) / model.rotary_dim
    frequency = 1.0 / (model.rotary_base**exponent)
    scaling = model.rope_scaling
    if scaling is None:
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(frequency, scaling)
    return _yarn(frequency, model.rotary_base, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Scale of the cosines and sines, so of the attention scores by its square (Peng et al. 2023, equation 22)."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def _llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide long wavelengths, keep short ones and blend between them (Llama 3.1; Grattafiori et al. 2024)."""
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def _yarn(frequency: Tensor, base: float, scaling: RopeScaling) -> Tensor:
    """Divide slow pairs, keep fast ones and blend between them (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""
    pairs, length = len(frequency), scaling.original_max_position_embeddings

    def pair_that_turns(times: float) -> float:
        return 2 * pairs * math.log(length / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    span = last - first or 0.001
    divided = ((torch.arange(pairs, dtype=frequency.dtype) - first) / span).clamp(0.0, 1.0)
    return frequency / scaling.factor * divided + frequency * (1 - divided)
