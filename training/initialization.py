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
    1 / sqrt(2 x layers) (Radford et al. 2019, GPT-2, section 2.3). Norm weights are 1, biases 0.
    `init: fan_in` is that of T5 (Raffel et al. 2020, arXiv:1910.10683; the scale of its code): 1 / sqrt(size
    of the input), of queries divided by sqrt(head_dim) more where scores are not, 1 for the tokens' table.

    Returns:
        `shape`, float32, on the CPU.
    """
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    weight = torch.randn(shape, generator=generator)
    if model.init == "fan_in":
        return _scaled_by_input(weight, name, model)
    writes_to_residual = name.endswith(("attn.out.weight", "cross.out.weight", ".down.weight"))
    return weight.mul_(model.init_std / (math.sqrt(2.0 * model.total_layers) if writes_to_residual else 1.0))


def _scaled_by_input(weight: Tensor, name: str, model: ModelConfig) -> Tensor:
    if name == "embedding.word.weight":
        return weight
    fan_in = model.hidden_size if name.endswith("relative.weight") else weight.shape[1]
    weight.mul_(fan_in**-0.5)
    if not model.scales_scores:
        query_scale = model.head_dim**-0.5
        if name.endswith("cross.q.weight"):
            weight.mul_(query_scale)
        elif name.endswith("attn.qkv.weight"):
            heads = model.num_attention_heads // model.num_query_groups
            by_group = weight.view(model.num_query_groups, heads + 2, model.head_dim, -1)
            by_group[:, :heads].mul_(query_scale)
    return weight


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
