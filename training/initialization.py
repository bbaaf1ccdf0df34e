"""Initial weights as a function of (seed, canonical name), so that every layout starts from the same model."""

import hashlib
import math

import torch
from torch import Tensor

from training.config import ModelConfig
from training.model import TransformerStage
from training.parameters import ParamSpec, Shape


def initial_tensor(name: str, shape: Shape, model: ModelConfig, seed: int) -> Tensor:
    """Make the initial value of one uncut parameter.

    Matrices are normal with `init_std`; those that write to the residual stream are scaled by
    1 / sqrt(2 x num_layers) (Radford et al. 2019, GPT-2, section 2.3). Norm weights are 1, biases 0.

    Returns:
        `shape`, float32, on the CPU.
    """
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    writes_to_residual = name.endswith(("attn.out.weight", ".down.weight"))
    std = model.init_std / (math.sqrt(2.0 * model.num_layers) if writes_to_residual else 1.0)
    return torch.randn(shape, generator=generator).mul_(std)


@torch.no_grad()
def initialize(stage: TransformerStage, seed: int) -> None:
    """Fill the parameters of `stage`, before it is sharded over the data-parallel ranks."""
    for path, parameter in stage.named_parameters():
        spec = stage.param_specs[path]
        parts = [
            tensor_part(initial_tensor(name, shape, stage.model, seed), spec, stage.tp.rank, stage.tp.size)
            for name, shape in spec.stored()
        ]
        parameter.copy_(torch.cat(parts) if len(parts) > 1 else parts[0])


def tensor_part(whole: Tensor, spec: ParamSpec, rank: int, size: int) -> Tensor:
    """Cut this tensor-parallel rank's part out of an uncut stored tensor."""
    return whole if spec.tp_dim is None else whole.chunk(size, dim=spec.tp_dim)[rank]
