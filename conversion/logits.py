"""Runs source and target on one batch and compares what they say: the last word on a conversion."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.errors import ConfigError
from conversion.catalogue import Checkpoint
from training.config import LayoutConfig, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _LENGTH, _SEED = 2, 64, 1234


def max_logit_difference(source: Checkpoint, target: Checkpoint) -> float:
    """Largest absolute difference of the logits of two checkpoints on one batch of random tokens, in float32.

    Whole models are built in memory. Hugging Face folders are run by transformers, whose reading of
    the files is independent of ours.

    Raises:
        ConfigError: transformers is needed and not installed.
    """
    import torch

    model = ModelConfig.model_validate(dict(source.info.model))
    length = min(_LENGTH, model.max_position_embeddings)
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(0, model.vocab_size or 1, (_ROWS, length), generator=generator)
    first, second = (logits_of(checkpoint, tokens) for checkpoint in (source, target))
    return float((first - second).abs().max())


def logits_of(checkpoint: Checkpoint, tokens: "Tensor") -> "Tensor":
    """Logits (b, s, vocab_size) of tokens (b, s), float32."""
    if checkpoint.format == "huggingface":
        return _by_transformers(checkpoint.path, tokens)
    return _by_ourselves(checkpoint.path, tokens)


def require_transformers() -> None:
    """Check that Hugging Face models can be run, before any work starts.

    Raises:
        ConfigError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "logits: true runs the Hugging Face model with transformers, which is not installed. "
            "Install shardline[dev], or leave logits out."
        )


def _by_transformers(folder: Path, tokens: "Tensor") -> "Tensor":
    require_transformers()
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # Only the safetensors in this folder are read, and no code that it may bring along.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens).logits
    return logits.float()


def _by_ourselves(folder: Path, tokens: "Tensor") -> "Tensor":
    from training.checkpoint import load_model
    from training.mesh import build_mesh
    from training.scoring import Scorer

    with _one_rank():
        mesh = build_mesh(LayoutConfig())
        return Scorer(load_model(folder, mesh), mesh).logits(tokens)


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    import torch.distributed as dist

    from training.mesh import init_single_rank

    if dist.is_initialized():
        yield
        return
    init_single_rank()
    try:
        yield
    finally:
        dist.destroy_process_group()
