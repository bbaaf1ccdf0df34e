"""What a report is about: a checkpoint, the training run above it, its data, and evaluations."""

from collections.abc import Mapping
from dataclasses import dataclass

from contracts.artifact import MODEL_KINDS, Artifact
from contracts.errors import ConfigError
from contracts.store import Workspace


@dataclass(frozen=True)
class Subject:
    """The artifacts of a report.

    Args:
        checkpoint: What was asked for.
        run: The training run that it comes from, itself if it was not reshaped.
        dataset: What the run was trained on; None if that is unknown, gone, or more than one.
        evaluations: To be shown, by name.
    """

    checkpoint: Artifact
    run: Artifact
    dataset: Artifact | None
    evaluations: Mapping[str, Artifact]


def subject_of(inputs: Mapping[str, Artifact], workspace: Workspace) -> Subject:
    """Sort the inputs, and find what they leave out through the manifests in the store.

    Raises:
        ConfigError: There is no checkpoint, or an input is of a kind that cannot be shown in its place.
    """
    if "checkpoint" not in inputs:
        raise ConfigError("report: no checkpoint. Give --checkpoint with the artifact of a training run.")
    evaluations = {}
    for name, item in inputs.items():
        kinds = {"checkpoint": MODEL_KINDS, "dataset": ("dataset",)}.get(name)
        if name.startswith("evaluation"):
            kinds = ("evaluation",)
            evaluations[name.partition(".")[2] or name] = item
        if kinds is not None and item.kind not in kinds:
            raise ConfigError(
                f"report: the input {name} is {item.name}, an artifact of kind {item.kind}; "
                f"{' or '.join(kinds)} is needed there."
            )
    run = _run_above(inputs["checkpoint"], workspace)
    dataset = inputs.get("dataset") or _dataset_of(run, workspace)
    return Subject(inputs["checkpoint"], run, dataset, evaluations)


def _run_above(checkpoint: Artifact, workspace: Workspace) -> Artifact:
    """Go up through reshapes to the run; where the way is lost, the last artifact found stands for it."""
    while (entry := checkpoint.manifest.inputs.get("checkpoint")) is not None:
        above = workspace.store.input_artifact(entry)
        if above is None:
            workspace.progress.note(f"{entry.path} is gone from the store, so the report has no curve of the training")
            break
        checkpoint = above
    return checkpoint


def _dataset_of(run: Artifact, workspace: Workspace) -> Artifact | None:
    entries = [entry for name, entry in run.manifest.inputs.items() if name.startswith("dataset")]
    if len(entries) > 1:
        workspace.progress.note(f"{run.name} was trained on {len(entries)} datasets, so no unigram entropy is shown")
    if len(entries) != 1:
        return None
    found = workspace.store.input_artifact(entries[0])
    if found is None:
        workspace.progress.note(f"{entries[0].path} is gone from the store, so no unigram entropy is shown")
    return found
