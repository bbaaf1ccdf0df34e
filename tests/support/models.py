"""Small native checkpoints, made without training."""

from pathlib import Path
from typing import Any

import torch

from training.checkpoint import write_checkpoint
from training.config import LayoutConfig, ModelConfig
from training.initialization import initial_tensor
from training.parameters import stored_parameters
from training.step_folders import CheckpointInfo, step_folder_name


def tiny_model(**changes: Any) -> ModelConfig:
    """Two layers, hidden 32, four heads, 64 positions, 257 tokens."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    return ModelConfig.model_validate({**sizes, "vocab_size": 257, "vocab_multiple": 2, **changes})


def write_model(
    folder: Path, model: ModelConfig, *, layout: dict[str, Any] | None = None, is_uniform: bool = False, seed: int = 1
) -> Path:
    """Write random weights (or ones that make every token equally likely) as step 3 below `folder`."""
    tensors = {name: initial_tensor(name, shape, model, seed) for name, (shape, _) in stored_parameters(model).items()}
    if is_uniform:
        for name in ("final_norm.weight", "final_norm.bias"):
            if name in tensors:
                tensors[name] = torch.zeros_like(tensors[name])
    info = CheckpointInfo(
        step=3,
        consumed_samples=48,
        seq_length=model.max_position_embeddings,
        model=model.model_dump(mode="json"),
        layout=LayoutConfig.model_validate(layout or {}).model_dump(mode="json"),
        has_optimizer=False,
        parameters={name: tuple(tensor.shape) for name, tensor in tensors.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / step_folder_name(3)
    write_checkpoint(path, tensors, info)
    return path
