"""Runs source and target on one batch and compares what they say: the last word on a conversion."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.errors import ConfigError
from conversion.catalogue import Checkpoint
from conversion.huggingface_encoders import ENCODERS
from conversion.huggingface_files import CONFIG, read_json
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
    if not model.causal:  # transformers takes RoBERTa's id of padding, 1, for no token
        tokens = tokens.clamp(min=2)
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
    config = read_json(folder / CONFIG)
    # Only the safetensors in this folder are read, and no code that it may bring along.
    kind = config["architectures"][0] if config.get("model_type") in ENCODERS else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    told = {"decoder_input_ids": tokens} if config.get("is_encoder_decoder") else {}
    with torch.no_grad():
        out = model.eval()(tokens, **told)
    logits: Tensor = out.prediction_logits if hasattr(out, "prediction_logits") else out.logits
    return logits.float()


def _by_ourselves(folder: Path, tokens: "Tensor") -> "Tensor":
    from training.checkpoint import load_model
    from training.mesh import build_mesh
    from training.scoring import Scorer

    with _one_rank():
        mesh = build_mesh(LayoutConfig())
        stages = load_model(folder, mesh)
        told = {"decoder_inputs": tokens} if stages[0].model.is_encoder_decoder else {}
        return Scorer(stages, mesh).logits(tokens, told)


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
