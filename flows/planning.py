"""What a chain would cost, and why a stage of it would run."""

from collections.abc import Sequence
from typing import Any

from contracts.difference import explain_recipe
from contracts.store import ArtifactStore
from flows.engine import Planned
from flows.pipeline import PipelineConfig

HOPPER_FLOPS_PER_S = 4e14


def differences(planned: Planned, store: ArtifactStore) -> list[str]:
    """Say, field by field, how a step differs from the nearest build of its stage."""
    if planned.state in ("stale", "corrupt") or planned.is_forced:
        return [planned.reason]
    return str(explain_recipe(store, planned.step.stage.kind, planned.recipe)).splitlines()


def _vocab_size(config: PipelineConfig) -> int | None:
    """Return the vocabulary of a tokenizer that is not trained yet, or that exists already."""
    from preprocessing.tokenization.loading import load_tokenizer

    if config.tokenizer is not None and config.tokenizer.load is None:
        return config.tokenizer.vocab_size
    if config.tokenizer is not None and config.tokenizer.load is not None:
        return load_tokenizer(config.tokenizer.load, encoding=config.tokenizer.encoding).vocab_size
    path = config.ingest.tokenizer
    return None if path is None else load_tokenizer(path).vocab_size


def cost_of(config: PipelineConfig, planned: Sequence[Planned]) -> dict[str, Any]:
    """Return parameters, tokens, memory, disk and time of the training run, as text for a person.

    The vocabulary is the tokenizer's if it is trained already, else what its settings ask for.
    """
    if config.pretrain is None:
        return {}
    from training.config import with_vocab_size
    from training.estimate import estimate

    settings = config.pretrain
    if settings.model.vocab_size is None:
        trained = {item.step.name: item.artifact for item in planned}.get("tokenizer")
        size = trained.summary.get("vocab_size") if trained is not None else None
        if size is None:
            size = _vocab_size(config)
        if size is None:
            return {}
        settings = with_vocab_size(settings, int(size))
    estimated = estimate(settings)
    kept = settings.keep_last + sum(target.to == "native" for target in config.reshape)
    hours = estimated.seconds(HOPPER_FLOPS_PER_S) * estimated.num_ranks / 3600
    return {
        **estimated.as_lines(),
        "disk for checkpoints": f"{kept * estimated.checkpoint_bytes / 2**30:.2f} GiB ({kept} kept)",
        "device-hours": f"{hours:.3g} at 400 TFLOP/s a device (a Hopper GPU at 40 %)",
    }
