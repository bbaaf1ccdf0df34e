"""Follows a training step back to the documents that the model saw in it."""

from typing import Any

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError
from contracts.store import ArtifactStore


def trace_step(checkpoint: Artifact, step: int, store: ArtifactStore, *, with_text: bool) -> list[dict[str, Any]]:
    """Return the documents of one optimizer step of the run that made a checkpoint.

    Args:
        step: Counted from 1.
        with_text: Also decode the tokens of each span.

    Raises:
        ConfigError: The run has no such step.
        InputError: An artifact that leads back to the source is gone.
    """
    run = training_run_of(checkpoint, store)
    steps = int(run.manifest.config["train_steps"])
    if not 1 <= step <= steps:
        raise ConfigError(f"--step {step}: the run {run.name} has the steps 1 to {steps}.")
    from training.tracing import samples_of_step, trace_samples_of

    samples = samples_of_step(run, step)
    return trace_samples_of(run, samples, store, with_text=with_text)


def training_run_of(checkpoint: Artifact, store: ArtifactStore) -> Artifact:
    """Go up from a reshaped checkpoint to the run that trained it.

    Raises:
        InputError: It was not trained here, or the run is gone from the store.
    """
    seen = checkpoint
    while seen.manifest.recipe.stage != "pretrain":
        entry = seen.manifest.inputs.get("checkpoint")
        if entry is None:
            raise InputError(f"{seen.name} was not trained by a run in this store, so nothing leads back to its data.")
        above = store.input_artifact(entry)
        if above is None:
            raise InputError(
                f"{seen.name} was made of {entry.kind} {entry.fingerprint[:12]}, which is not at {entry.path} in "
                f"{store.root.absolute()}. Give --store if the run lies in another one."
            )
        seen = above
    return seen
