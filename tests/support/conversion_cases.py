"""Checkpoints with random weights and moments, made without ranks, and what was recorded of published models."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.artifact import Artifact
from contracts.store import ArtifactStore
from conversion.config import ReshapeConfig
from conversion.stage import stage_for
from training.checkpoint import write_checkpoint
from training.config import LayoutConfig, ModelConfig
from training.parameters import stored_parameters
from training.step_folders import CheckpointInfo, step_folder_name

HERE = Path(__file__).parent.parent / "cases" / "huggingface"


def random_model(family: str, **changes: Any) -> ModelConfig:
    """Two layers, hidden 32, four heads (Llama: two groups), 100 tokens in 104 rows."""
    groups = {"num_query_groups": 2} if family == "llama" else {}
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 32}
    return ModelConfig.model_validate(
        {"family": family, **sizes, "vocab_size": 100, "vocab_multiple": 8, **groups, **changes}
    )


def write_random(
    root: Path, model: ModelConfig, *, has_optimizer: bool = True, step: int = 7, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a native checkpoint of random numbers below `root`; return its step folder."""
    generator = torch.Generator().manual_seed(step)
    shapes = {name: shape for name, (shape, _) in stored_parameters(model).items()}
    tensors = {name: torch.randn(shape, generator=generator).mul_(0.1).to(dtype) for name, shape in shapes.items()}
    if has_optimizer:
        for name, shape in shapes.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"optim.{name}.{moment}"] = torch.rand(shape, generator=generator).to(dtype)
    info = CheckpointInfo(
        step=step,
        consumed_samples=8 * step,
        seq_length=16,
        model=model.model_dump(mode="json"),
        layout=LayoutConfig().model_dump(mode="json"),
        has_optimizer=has_optimizer,
        parameters=shapes,
        dtype=str(dtype).removeprefix("torch."),
        extra={"seed": 5},
    )
    root.mkdir(parents=True, exist_ok=True)
    folder = root / step_folder_name(step)
    write_checkpoint(folder, tensors, info)
    return folder


def convert(source: Path | Artifact, output: Path, **settings: Any) -> Artifact:
    """Run the reshape stage with its result at exactly `output`."""
    is_artifact = isinstance(source, Artifact)
    config = ReshapeConfig.model_validate({"checkpoint": None if is_artifact else str(source), **settings})
    store = ArtifactStore(output.parent / "store", output=output)
    inputs = {"checkpoint": source} if isinstance(source, Artifact) else {}
    return stage_for(config).run(config, inputs=inputs, store=store)


def published(name: str, group: str = "hf") -> Path:
    """Folder of a recorded model: from this repository, else from SHARDLINE_FIXTURES, else the test is skipped."""
    if group == "hf" and (HERE / name).is_dir():
        return HERE / name
    root = os.environ.get("SHARDLINE_FIXTURES")
    folder = Path(root or "") / "checkpoints" / group / name
    if not root or not folder.is_dir():
        pytest.skip(f"{group}/{name} is not in this repository; set SHARDLINE_FIXTURES to the folder of the fixtures")
    return folder
